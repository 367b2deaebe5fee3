"""What was seen, where, and how often in each step?"""

from dataclasses import dataclass, field

from whet.verify.lines import Line
from whet.verify.preflight.finding import Finding, Sighting, as_place
from whet.verify.preflight.watcher import Phase

_Key = tuple[Sighting, Line | None, bool, Phase]

_PHASES: dict[Phase, str] = {
    "making": "the making of the model",
    "training": "the forward pass",
    "updating": "the optimizer's step",
}


@dataclass
class Notebook:
    """Sightings with their lines, counted for each step."""

    step: int = 0
    counts: dict[_Key, dict[int, int]] = field(default_factory=dict)

    def write(self, seen: Sighting, line: Line | None, *, is_backward: bool, phase: Phase) -> None:
        by_step = self.counts.setdefault((seen, line, is_backward, phase), {})
        by_step[self.step] = by_step.get(self.step, 0) + 1

    def findings(self) -> list[Finding]:
        """In the order in which they were first seen."""
        return [
            Finding(
                id=seen.id,
                severity=seen.severity,
                what=seen.what,
                try_=seen.try_,
                place=as_place(line, is_backward=is_backward) if line else None,
                during="" if line else "the backward pass" if is_backward else _PHASES[phase],
                count=next(iter(by_step.values())),
            )
            for (seen, line, is_backward, phase), by_step in self.counts.items()
        ]
