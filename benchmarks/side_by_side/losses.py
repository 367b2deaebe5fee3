"""Do all ways train the same? The losses of the first steps without dropout, beside those of the other ways."""

import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from side_by_side.process import Way, WayFailedError
from side_by_side.spec import Spec

BOUND = {"fp32": 1e-4, "bf16": 2e-2}
"""The largest relative difference: rounding in float32; in bf16 where there are no two peers whose difference says."""
TIMES_THE_NOISE = 2.0


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far apart the losses of one work are."""

    names: dict[str, str]
    """How tables call the ways."""
    precision: str
    steps: int
    losses: dict[str, list[float]]
    problems: dict[str, str]

    @property
    def noise(self) -> float | None:
        """The largest difference between two peers, whet left out."""
        peers = [found for way, found in self.losses.items() if not way.startswith("whet")]
        pairs = [largest_difference(one, two) for one, two in itertools.combinations(peers, 2)]
        return max(pairs) if pairs else None

    @property
    def bound(self) -> float:
        if self.precision == "fp32" or self.noise is None:
            return BOUND[self.precision]
        return TIMES_THE_NOISE * self.noise

    def difference(self, way: str) -> float:
        """From the first way that is there."""
        return largest_difference(self.losses[way], next(iter(self.losses.values())))

    def agrees(self, way: str) -> bool:
        return self.difference(way) <= self.bound


def largest_difference(one: list[float], two: list[float]) -> float:
    """Relative; infinite where there are not as many."""
    if len(one) != len(two) or not one:
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(one, two, strict=True))


def check(specs: Iterable[Spec], *, at_once: int) -> Agreement:
    """Runs each way for as many steps as its schedule has; nothing is timed, so several at once."""
    specs = list(specs)
    losses: dict[str, list[float]] = {}
    problems: dict[str, str] = {}
    with ThreadPoolExecutor(at_once) as pool:
        for spec, found in zip(specs, pool.map(_losses_of, specs), strict=True):
            if isinstance(found, str):
                problems[spec.name] = found
            else:
                losses[spec.way] = found
    return Agreement(
        names={spec.way: spec.name for spec in specs},
        precision=specs[0].precision,
        steps=specs[0].total_steps,
        losses=losses,
        problems=problems,
    )


def _losses_of(spec: Spec) -> list[float] | str:
    way = Way(spec)
    try:
        made = way.wait_made()
        if "absent" in made:
            return f"not installed: {made['absent']}"
        way.order(steps=1)
        return [float(loss) for loss in way.answer()["losses"]]
    except WayFailedError as error:
        return str(error)
    finally:
        way.close()
