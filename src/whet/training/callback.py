"""The state of a run: everything besides tensors that a resume needs."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from whet.data.batch import Position


@dataclass(kw_only=True, slots=True)
class State:
    step: int = 0
    """Optimizer steps done."""
    position: Position = field(default_factory=Position)
    """Data consumed by the optimizer, not data fetched."""
    samples: int = 0
    evaluated_step: int = 0
    """The step of the last evaluation."""
    best_score: float | None = None
    best_step: int | None = None
    num_worse: int = 0
    """Evaluations since the best one."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "State":
        return cls(**{**data, "position": Position(**data["position"])})

    def judge(self, score: float) -> bool:
        """Takes the score of an evaluation (higher is better; NaN and Inf never are); whether it is the best so far."""
        if math.isfinite(score) and (self.best_score is None or score > self.best_score):
            self.best_score, self.best_step, self.num_worse = score, self.step, 0
            return True
        self.num_worse += 1
        return False
