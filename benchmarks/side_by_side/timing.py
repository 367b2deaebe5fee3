"""Who is how fast? All ways are made ready one after the other, then take turns on the same batches in tossed order."""

import contextlib
import random
import statistics
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from side_by_side.process import Way, WayFailedError
from side_by_side.spec import Spec

_LEAST_STEPS = 4
_PASSES, _PASSES_CAPTURED = 1, 4
"""Over the data before time is taken, so that every shape was met. whet captures a shape when it comes again, and all
once more when a larger one comes."""


@dataclass(kw_only=True)
class Taken:
    """What one way took."""

    way: str
    name: str
    batch: int
    first_step: float
    """Seconds from the order to begin until the first step was done."""
    warmup_steps: int
    warmup_seconds: float
    rough: float
    """Seconds of a step before the turns begin."""
    blocks: list[float] = field(default_factory=list)
    """Seconds of one step, the mean of each block."""
    held: int = 0
    """Bytes that the device keeps for the process at most."""
    used: int = 0
    """Bytes of its tensors at most; on a CPU the whole process."""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.blocks)

    @property
    def setup(self) -> float:
        """Seconds lost in all until every shape was met: what the first pass took beyond what it takes later."""
        return max(0.0, self.first_step + self.warmup_seconds - (1 + self.warmup_steps) * self.step_seconds)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """All that was found for one work."""

    spec: Spec
    words: str
    flops: float
    ceiling: float
    """Operations in a second, by products of large matrices in the same run."""
    taken: list[Taken]
    missing: dict[str, str]
    """Ways that are not here, or failed, and why."""
    block_steps: int


def hold(specs: Iterable[Spec], *, rounds: int, seconds: float, most_warmup: int, tell: Any) -> Contest:
    """`seconds` is what a block of the slowest way takes."""
    specs = list(specs)
    missing: dict[str, str] = {}
    with ExitStack() as closing:
        taken: dict[str, Taken] = {}
        # Loading packages and drawing weights is not timed, so all do it at once.
        ways = {spec.way: Way(spec) for spec in (_ceiling_of(specs[0]), *specs)}
        for way in ways.values():
            closing.callback(way.close)
        _drop_absent(ways, missing)
        product = ways.pop("ceiling")
        ceiling = _ready(product, most_warmup=10)
        _compile_first(ways)
        for name, way in list(ways.items()):
            try:
                taken[name] = _ready(way, most_warmup=most_warmup)
                tell(f"{way.spec.name}: first step after {taken[name].first_step:.1f} s")
            except WayFailedError as error:
                missing[way.spec.name] = str(error)
                del ways[name]
                tell(f"{way.spec.name}: {error}")
        if not taken:
            raise SystemExit("no way could be made ready")
        slowest = max(found.rough for found in taken.values())
        block = max(_LEAST_STEPS, round(seconds / slowest))
        first = next(iter(ways.values()))
        coin = random.Random(0)
        for number in range(rounds):
            # Not one way alone shall find the device warm from the products.
            ceiling.blocks.append(_block(product, max(10, round(0.2 / ceiling.rough))))
            for name in coin.sample(list(ways), len(ways)):
                try:
                    taken[name].blocks.append(_block(ways[name], block, into=taken[name]))
                except WayFailedError as error:
                    missing[ways[name].spec.name] = f"in round {number + 1}: {error}"
                    del ways[name], taken[name]
        return Contest(
            spec=first.spec,
            words=str(first.made["words"]),
            flops=float(first.made["flops"]),
            ceiling=float(product.made["flops"]) / min(ceiling.blocks),
            taken=list(taken.values()),
            missing=missing,
            block_steps=block,
        )


def _drop_absent(ways: dict[str, Way], missing: dict[str, str]) -> None:
    """Leaves out who is not here or failed, with the reason."""
    for name, way in list(ways.items()):
        try:
            absent = way.wait_made().get("absent")
            why = f"not installed: {absent}" if absent else None
        except WayFailedError as error:
            why = str(error)
        if why:
            missing[way.spec.name] = why
            del ways[name]


def _compile_first(ways: dict[str, Way]) -> None:
    """Those that compile make their first steps at once, on a GPU: it waits for the compilers, which take cores."""
    ordered = [way for way in ways.values() if way.spec.is_compiled and way.spec.device != "cpu"]
    for way in ordered:
        with contextlib.suppress(WayFailedError):
            way.order(steps=1)
    for way in ordered:
        with contextlib.suppress(WayFailedError):
            way.first = way.answer()


def _ready(way: Way, *, most_warmup: int) -> Taken:
    """Until a way has met every batch of the data, or as many as it may."""
    made = way.made
    first = way.first or way.steps(1)
    passes = _PASSES_CAPTURED if way.spec.way.startswith("whet") else _PASSES
    warmup = min(most_warmup, passes * int(made["epoch"]))
    warm = way.steps(warmup)
    return Taken(
        way=way.spec.way,
        name=way.spec.name,
        batch=int(made["batch"]),
        first_step=first["seconds"],
        warmup_steps=warmup,
        warmup_seconds=warm["seconds"],
        rough=_block(way, _LEAST_STEPS),
        notes=first["notes"],
    )


def _block(way: Way, steps: int, *, into: Taken | None = None) -> float:
    answer = way.steps(steps)
    if into is not None:
        into.held, into.used, into.notes = int(answer["held"]), int(answer["used"]), answer["notes"]
    return float(answer["seconds"]) / steps


def _ceiling_of(spec: Spec) -> Spec:
    return Spec(**{**spec.as_json(), "way": "ceiling"})
