"""Do all ways train the same? The losses of the first steps without dropout, beside those of the other ways."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from side_by_side.process import Way, WayFailedError
from side_by_side.spec import Spec

BOUND = {"fp32": 1e-4, "bf16": 2e-2}
"""The largest relative difference: rounding in float32; in bf16 where there is no peer to say."""
TIMES_THE_NOISE = 2.0


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far the losses of one work are from those that all should have.

    These are the first way's: in half precision its own in float32. Loops that call the same kernels round alike, so
    what they differ by from each other says little; how far bf16 takes each of them from float32 is the yardstick.
    """

    names: dict[str, str]
    """How tables call the ways."""
    precision: str
    steps: int
    losses: dict[str, list[float]]
    problems: dict[str, str]
    exact: list[float] | None = None
    """In float32, by the first way; None where all are."""

    @property
    def noise(self) -> float | None:
        """How far the farthest peer is, whet left out, where that is rounding to half precision."""
        if self.exact is None:
            return None
        return max((self.difference(way) for way in self.losses if not way.startswith("whet")), default=None)

    @property
    def bound(self) -> float:
        return BOUND[self.precision] if self.noise is None else TIMES_THE_NOISE * self.noise

    def difference(self, way: str) -> float:
        """The largest, relative."""
        return largest_difference(self.losses[way], self.exact or next(iter(self.losses.values())))

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
    precision = specs[0].precision
    finer = [replace(specs[0], precision="fp32")] if precision != "fp32" else []
    losses: dict[str, list[float]] = {}
    problems: dict[str, str] = {}
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(_losses_of, [*finer, *specs]))
        exact = answers.pop(0) if finer else None
        for spec, found in zip(specs, answers, strict=True):
            if isinstance(found, str):
                problems[spec.name] = found
            else:
                losses[spec.way] = found
    return Agreement(
        names={spec.way: spec.name for spec in specs},
        precision=precision,
        steps=specs[0].total_steps,
        losses=losses,
        problems=problems,
        exact=exact if isinstance(exact, list) else None,
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
