"""The parts of a state that make it too large for a checkpoint.

A reader limits the size of what it reads, so a larger checkpoint could be written and never be read.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from whet.checkpoint import encoding
from whet.checkpoint.attributes import describe_attribute
from whet.checkpoint.snapshot import OMITTED, REGISTERED, Snapshot
from whet.checkpoint.state_format import TAG

_ENTRY_BYTES = 1024
"""More than an entry of a header takes without its name: a dtype, up to 32 sizes, and two offsets."""


class StatePart(NamedTuple):
    """A part of the user's state that a checkpoint can leave out."""

    kind: Literal["registered", "callback", "attribute"]
    name: str
    owner: str = ""
    """The module or optimizer that has the attribute."""

    def __str__(self) -> str:
        if self.kind == "attribute":
            return f"the attribute {describe_attribute(self.owner, self.name)}"
        return f"{REGISTERED} {self.name!r}" if self.kind == "registered" else f"the callback {self.name}"


class Excess(NamedTuple):
    """A limit of a checkpoint that a state exceeds."""

    limit: str
    got: str
    part: StatePart | None
    """The part that contributes most, or None if no part can be left out."""
    got_part: str


def find_excess(snapshot: Snapshot) -> Excess | None:
    """Return the limit that a snapshot exceeds, or None if a checkpoint can hold it."""
    if len(snapshot.tensors) > encoding.MAX_TENSORS or _header_bytes(snapshot) > encoding.MAX_HEADER_BYTES:
        counts = {part: _count_tensors(encoded) for part, encoded in _parts(snapshot) if part.kind != "attribute"}
        part = max(counts, key=counts.__getitem__, default=None)
        part = part if part is not None and counts[part] else None
        return Excess(
            limit=f"{encoding.MAX_TENSORS:,} tensors or {encoding.MAX_HEADER_BYTES >> 20} MiB of their names",
            got=f"{len(snapshot.tensors):,} tensors",
            part=part,
            got_part="" if part is None else f"{counts[part]:,} tensors",
        )
    try:
        num_bytes = len(encoding.dump_json(snapshot.facts))
    except (TypeError, ValueError):
        # Writing the checkpoint reports this.
        return None
    if num_bytes <= encoding.MAX_FACTS_BYTES:
        return None
    sizes = {part: len(encoding.dump_json({"": encoded})) for part, encoded in _parts(snapshot)}
    part = max(sizes, key=sizes.__getitem__, default=None)
    return Excess(
        limit=f"{encoding.MAX_FACTS_BYTES >> 20} MiB of numbers and text outside tensors and arrays",
        got=f"{num_bytes >> 20} MiB",
        part=part,
        got_part="" if part is None else f"{sizes[part] >> 20} MiB",
    )


def _header_bytes(snapshot: Snapshot) -> int:
    # A character takes up to 12 bytes in JSON. Computing the exact size would take longer than the rest.
    if sum(12 * len(name) + _ENTRY_BYTES for name in snapshot.tensors) <= encoding.MAX_HEADER_BYTES:
        return 0
    return encoding.layout_tensors(snapshot.tensors).header_bytes()


def _parts(snapshot: Snapshot) -> Iterator[tuple[StatePart, Any]]:
    facts = snapshot.facts
    for name, encoded in facts["registered"].items():
        if encoded != OMITTED:
            yield StatePart("registered", name), encoded
    for name, encoded in facts["progress"].get("callbacks", {}).items():
        if not name.startswith(TAG):
            yield StatePart("callback", name), encoded
    for owner, attributes in facts["model"].get("attributes", {}).get("now", {}).items():
        for name, encoded in attributes.items():
            if encoded != {TAG: "opaque"}:
                yield StatePart("attribute", name, owner), encoded


def _count_tensors(encoded: Any) -> int:
    count, rest = 0, [encoded]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            count += value.get(TAG) in ("reference", "view")
            rest += value.values()
        elif isinstance(value, list):
            rest += value
    return count
