"""The training options of a session. They are set by the user, and no plan changes them."""

from collections.abc import Mapping
from typing import Any

from whet.base.errors import UsageError
from whet.config.options import SchedulerObject, SessionOptions
from whet.config.resolve import read_options


class TrainingConfig(SessionOptions):
    """The options that define a training run; they are declared in `config/options.py`."""

    def as_json(self) -> dict[str, Any]:
        """Return the options for the run folder. A function is represented by its name, a scheduler by its class."""
        plain = dict(self)
        if isinstance(self.schedule, SchedulerObject):
            plain["schedule"] = type(self.schedule).__name__
        if isinstance(self.schedule, dict):
            parts = {name: self.model_copy(update={"schedule": part}) for name, part in self.schedule.items()}
            plain["schedule"] = {name: part.as_json()["schedule"] for name, part in parts.items()}
        for name in ("schedule", "collate_fn"):
            if callable(plain[name]):
                plain[name] = getattr(plain[name], "__name__", type(plain[name]).__name__)
        return plain


def parse_training_config(keywords: Mapping[str, object]) -> TrainingConfig:
    """Create a TrainingConfig from keywords. For an unknown keyword, raise UsageError with a suggestion."""
    if keywords.get("global_batch_size") == "auto":
        hint = 'whet.train or whet.tune with "auto"; plan.workload.global_batch_size is the size that tune chose'
        raise UsageError("a session needs a fixed global batch size", got='global_batch_size="auto"', try_=hint)
    return read_options(TrainingConfig, keywords)
