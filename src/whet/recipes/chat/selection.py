"""Select the conversations to keep and assign each to a split."""

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from whet.base.errors import WhetError
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.manifest import SPLITS, Split
from whet.recipes.chat.sources import ConversationFile, RejectedRecord, read_conversations

Array = np.ndarray[Any, np.dtype[Any]]
LEFT_OUT = 255
"""In `Survey.parts`, where others are numbers of PARTS."""

_SAMPLE_CHARACTERS, _TRIED_CHARACTERS = 8_000_000, 100_000
"""To learn from, and to try a given vocabulary with. More text makes a vocabulary of some thousand entries no better,
and takes longer than it is worth."""
_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What the first reading found."""

    parts: Array
    """uint8, for each conversation in the order of reading: the number of its part, or LEFT_OUT."""
    sample: tuple[str, ...]
    """Texts of the training part, for a vocabulary to be learned from or tried with."""
    bad: tuple[RejectedRecord, ...]
    num_bad: int
    num_found: int
    num_repeated: int
    """Held-out conversations' equals that a training file had too; they are left out there."""


def select_conversations(
    sources: Sequence[ConversationFile],
    *,
    seed: int,
    train_split: float,
    subsample_size: int | None,
    max_bad: int,
    learns_vocabulary: bool,
    told: Callable[[int], None],
) -> Selection:
    """Reads everything once; more than `max_bad` bad records are an error."""
    places, files = array("Q"), array("B")
    sample = _TextSample(_SAMPLE_CHARACTERS if learns_vocabulary else _TRIED_CHARACTERS)
    bad: list[RejectedRecord] = []
    num_bad = 0
    key = seed.to_bytes(16, "little", signed=True)
    for number, source in enumerate(sources):
        for found in read_conversations(source):
            if isinstance(found, RejectedRecord):
                num_bad += 1
                if len(bad) < _SHOWN:
                    bad.append(found)
                if num_bad > max_bad:
                    raise _too_many(bad, max_bad)
                continue
            place = _place(found.turns, key)
            places.append(place)
            files.append(number)
            if source.part in (None, "train"):
                sample.offer(place, found.turns)
            if len(places) % 1024 == 0:
                told(len(places))
    if not places:
        first = f"; the first: {bad[0].where}: {bad[0].why}" if bad else ""
        raise WhetError("no conversation could be read", got=f"{num_bad} bad records{first}", try_="another file")
    ordered = np.frombuffer(places, dtype=np.uint64)
    given = np.array([SPLITS.index(source.part or "train") for source in sources], dtype=np.uint8)[np.asarray(files)]
    has = {source.part for source in sources if source.part}
    parts, num_repeated = _assign_splits(
        ordered,
        given,
        missing=[part for part in ("val", "test") if part not in has],
        train_split=train_split,
        subsample_size=subsample_size,
    )
    last = ordered[parts == 0].max(initial=0)
    return Selection(
        parts=parts,
        sample=tuple(sample.texts(int(last))),
        bad=tuple(bad),
        num_bad=num_bad,
        num_found=len(places),
        num_repeated=num_repeated,
    )


def _assign_splits(
    places: Array, given: Array, *, missing: Sequence[Split], train_split: float, subsample_size: int | None
) -> tuple[Array, int]:
    parts = given.copy()
    # What a held-out file has is not trained on, and what test has does not choose between models.
    num_repeated = 0
    for part in (0, 1):
        here = np.flatnonzero(given == part) if (given > part).any() else np.empty(0, dtype=np.int64)
        repeated = here[np.isin(places[here], places[given > part])]
        parts[repeated] = LEFT_OUT
        num_repeated += len(repeated)
    train = np.flatnonzero(parts == 0)
    order = train[np.argsort(places[train], kind="stable")]
    if subsample_size is not None:
        end = _whole(places[order], min(subsample_size, len(order)))
        parts[order[end:]] = LEFT_OUT
        order = order[:end]
    held = _num_held(len(order), train_split) if missing else 0
    start = _whole(places[order], len(order) - held)
    middle = start if missing == ["test"] else _whole(places[order], (start + len(order) + 1) // 2)
    middle = len(order) if missing == ["val"] else middle
    parts[order[start:middle]] = SPLITS.index("val")
    parts[order[middle:]] = SPLITS.index("test")
    return parts, num_repeated


def _num_held(total: int, train_split: float) -> int:
    """How many are held out: one for dev and one for test at least, where there are three."""
    if train_split >= 1 or total < 3:
        return 0
    return max(2, round(total * (1 - train_split)))


def _whole(ordered: Array, end: int) -> int:
    """The nearest end at or before `end` that leaves no equal conversations on two sides; after it, if none is."""
    if end in (0, len(ordered)) or ordered[end] != ordered[end - 1]:
        return end
    before = int(np.searchsorted(ordered, ordered[end], side="left"))
    return before or int(np.searchsorted(ordered, ordered[end], side="right"))


def _place(turns: tuple[Turn, ...], key: bytes) -> int:
    content = "\0".join([part for turn in turns for part in turn])
    return int.from_bytes(blake2b(content.encode(), digest_size=8, key=key).digest(), "little")


class _TextSample:
    """Texts of the conversations whose places come first, as many as fit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._kept: list[tuple[int, tuple[str, ...]]] = []
        """A heap with the last place on top."""

    def offer(self, place: int, turns: tuple[Turn, ...]) -> None:
        if self._size >= self._most and (not self._kept or place >= -self._kept[0][0]):
            return
        texts = tuple(turn.text for turn in turns)
        self._size += sum(map(len, texts))
        heapq.heappush(self._kept, (-place, texts))
        while self._size > self._most and len(self._kept) > 1:
            self._size -= sum(map(len, heapq.heappop(self._kept)[1]))

    def texts(self, last: int) -> Iterator[str]:
        """In the order of places, up to the last one that is trained on."""
        for place, texts in sorted(self._kept, reverse=True):
            if -place <= last:
                yield from texts


def _too_many(bad: Sequence[RejectedRecord], max_bad: int) -> WhetError:
    shown = "; ".join(f"{where}: {why}" for where, why in bad[:3])
    return WhetError(
        f"more than {max_bad} records are no conversations",
        got=shown,
        try_="another --format, a cleaner file, or a larger --max-bad to leave them out",
    )
