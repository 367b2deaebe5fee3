"""The training itself, as the user defines it: no plan changes anything here."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from whet.base.errors import UsageError, closest_match
from whet.plan.values import SETTING_NAMES
from whet.training.schedule import LearningRateSchedule, make_schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    global_batch_size: int
    """Samples of one optimizer step."""
    epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    """Decides the order of samples and all random draws of the run; initial weights are drawn before it."""
    shuffle: bool = True
    schedule: str | Callable[[int], float] = "constant"
    """constant, linear, cosine or plateau; or a function from a step (counted from 1) to a factor of the rate."""
    warmup_steps: int = 0
    clip: float | None = None
    """The largest norm of the gradient."""
    ema: bool = False
    eval_every: int | None = None
    """Steps between evaluations; None: at the end of each epoch."""
    patience: int | None = None
    """Stop after this many evaluations without a better goal."""
    epochs_per_session: int | None = None
    """Stop after this many epochs; the same command resumes later."""

    def __post_init__(self) -> None:
        if str(self.global_batch_size) == "auto":
            hint = 'whet.train or whet.tune with "auto"; plan.workload.global_batch_size is the size that tune found'
            raise UsageError("a session needs a number", got='global_batch_size="auto"', try_=hint)
        for name in ("global_batch_size", "epochs", "max_steps", "eval_every", "patience", "epochs_per_session"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number above 0", got=repr(value), try_=f"{name}=1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UsageError("seed must be a whole number from 0 to 2**63 - 1", got=repr(self.seed), try_="seed=0")
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            raise UsageError("clip must be above 0", got=repr(self.clip), try_="clip=1.0, or None for no clipping")
        if not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise UsageError(
                "warmup_steps must be a whole number from 0", got=repr(self.warmup_steps), try_="warmup_steps=0"
            )

    def total_steps(self, num_samples: int | None) -> int | None:
        """Optimizer steps of the whole run; None when the data has no length and no limit was set."""
        if num_samples is None:
            return self.max_steps
        steps = self.epochs * -(-num_samples // self.global_batch_size)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def make_schedule(self, total_steps: int | None) -> LearningRateSchedule:
        return make_schedule(self.schedule, total_steps=total_steps, warmup_steps=self.warmup_steps)

    def as_json(self) -> dict[str, Any]:
        """As plain JSON for the run folder; a function is represented by its name."""
        plain = asdict(self)
        if callable(self.schedule):
            plain["schedule"] = getattr(self.schedule, "__name__", "a function")
        return plain


def parse_training_config(options: dict[str, Any]) -> TrainingConfig:
    """Make a TrainingConfig from keywords; an unknown one is refused with a suggestion."""
    known = [field.name for field in fields(TrainingConfig)]
    for name in options:
        if name not in known:
            meant = closest_match(name, known)
            hint = f"did you mean {meant!r}?" if meant else ", ".join(known)
            if name in SETTING_NAMES:
                hint = f"overrides={{{name!r}: {options[name]!r}}}: it is a setting of the plan"
            raise UsageError("unknown keyword", got=name, try_=hint)
    if "global_batch_size" not in options:
        raise UsageError("the global batch size is missing", got="no global_batch_size", try_="global_batch_size=32")
    return TrainingConfig(**options)
