"""Check that all loops train the same: compare the losses of the first steps without dropout."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from side_by_side.process import LoopFailedError, LoopProcess
from side_by_side.spec import Spec

BOUND = {"fp32": 1e-4, "bf16": 2e-2}
"""The largest accepted relative difference; for bf16 only if no peer provides a noise level."""
NOISE_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The differences between the losses of each loop and the reference losses.

    The reference is the first loop, in float32. Loops that call the same kernels round the same way, so their mutual
    differences in bf16 would be too strict a bound; the distance of the peers' bf16 losses from float32 is used.
    """

    names: dict[str, str]
    """Display names of the loops."""
    precision: str
    steps: int
    losses: dict[str, list[float]]
    problems: dict[str, str]
    exact: list[float] | None = None
    """Losses of the first loop in float32; None if all loops run in float32."""

    @property
    def noise(self) -> float | None:
        """The largest difference of a peer (not whet) from float32; None if all loops run in float32."""
        if self.exact is None:
            return None
        return max((self.difference(loop) for loop in self.losses if not loop.startswith("whet")), default=None)

    @property
    def bound(self) -> float:
        return BOUND[self.precision] if self.noise is None else NOISE_FACTOR * self.noise

    def difference(self, loop: str) -> float:
        """The largest relative difference of a loop."""
        return largest_difference(self.losses[loop], self.exact or next(iter(self.losses.values())))

    def agrees(self, loop: str) -> bool:
        return self.difference(loop) <= self.bound


def largest_difference(one: list[float], two: list[float]) -> float:
    """Return the largest relative difference; infinite for lists of different lengths."""
    if len(one) != len(two) or not one:
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(one, two, strict=True))


def check(specs: Iterable[Spec], *, at_once: int) -> Agreement:
    """Run each loop for its scheduled steps; nothing is timed, so several run at once."""
    specs = list(specs)
    precision = specs[0].precision
    reference = [replace(specs[0], precision="fp32")] if precision != "fp32" else []
    losses: dict[str, list[float]] = {}
    problems: dict[str, str] = {}
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(_losses_of, [*reference, *specs]))
        exact = answers.pop(0) if reference else None
        for spec, result in zip(specs, answers, strict=True):
            if isinstance(result, str):
                problems[spec.name] = result
            else:
                losses[spec.loop] = result
    return Agreement(
        names={spec.loop: spec.name for spec in specs},
        precision=precision,
        steps=specs[0].total_steps,
        losses=losses,
        problems=problems,
        exact=exact if isinstance(exact, list) else None,
    )


def _losses_of(spec: Spec) -> list[float] | str:
    loop = LoopProcess(spec)
    try:
        made = loop.wait_made()
        if "absent" in made:
            return f"not installed: {made['absent']}"
        loop.order(steps=1)
        return [float(loss) for loss in loop.answer()["losses"]]
    except LoopFailedError as error:
        return str(error)
    finally:
        loop.close()
