"""The training options of a session. The user sets them, and no plan changes them."""

from collections.abc import Mapping
from typing import Any

from whet.base.errors import UsageError
from whet.config.options import SessionOptions
from whet.config.resolve import read_options
from whet.plan.values import SETTING_NAMES
from whet.training.schedule import LearningRateSchedule, make_schedule


class TrainingConfig(SessionOptions):
    """The options that define the training; `config/options.py` declares them."""

    def make_schedule(self, total_steps: int | None) -> LearningRateSchedule:
        return make_schedule(self.schedule, total_steps=total_steps, warmup_steps=self.warmup_steps)

    def as_json(self) -> dict[str, Any]:
        """Return the options for the run folder. A function is replaced by its name."""
        plain = dict(self)
        if callable(self.schedule):
            plain["schedule"] = getattr(self.schedule, "__name__", "a function")
        return plain


def parse_training_config(keywords: Mapping[str, object]) -> TrainingConfig:
    """Make a TrainingConfig from keywords. Raise for an unknown keyword, with a suggestion."""
    for name, value in keywords.items():
        if name in SETTING_NAMES:
            hint = f"overrides={{{name!r}: {value!r}}}: it is a setting of the plan"
            raise UsageError("unknown keyword", got=name, try_=hint)
    if keywords.get("global_batch_size") == "auto":
        hint = 'whet.train or whet.tune with "auto"; plan.workload.global_batch_size is the size that tune chose'
        raise UsageError("a session needs a number", got='global_batch_size="auto"', try_=hint)
    return read_options(TrainingConfig, keywords)
