"""Helpers for measurements before a training run: the bench in this process, and progress reports."""

import contextlib
from collections.abc import Iterator
from typing import Any

from whet.autotune.step_bench import ProgressCallback
from whet.base.errors import UsageError
from whet.plan.plan import Plan
from whet.step.loss import LossFunction
from whet.training.callbacks.event_log import EventHandler, emit_event
from whet.training.run_config import RunConfig, is_rereadable
from whet.training.step_bench import LocalStepBench


class MeasurementStoppedError(KeyboardInterrupt):
    """Raised if Ctrl-C is pressed before a training run, while its plan or batch size is being measured."""


@contextlib.contextmanager
def stopped_by_ctrl_c(on_event: EventHandler | None) -> Iterator[None]:
    """Report that Ctrl-C lost nothing, and drop the traceback of the measured step, which does not help the user."""
    try:
        yield
    except KeyboardInterrupt:
        message = "stopped by Ctrl-C while measuring: nothing was trained and nothing was written"
        emit_event(on_event, "stopping", {"step": 0, "message": message})
        raise MeasurementStoppedError(message) from None


def local_bench(config: RunConfig, loss: LossFunction, plan: Plan) -> LocalStepBench:
    """Return a bench that times this training run in the current process."""
    return LocalStepBench(config.model, config.optimizer, config.data, config.training, loss=loss, plan=plan)


def report_lines(on_event: EventHandler | None, *lines: str) -> None:
    """Emit each line as an event of kind "tuning"."""
    for line in lines:
        emit_event(on_event, "tuning", {"message": line})


def progress_callback(on_event: EventHandler | None) -> ProgressCallback | None:
    """Return a callback that emits the progress of a measurement as events; None if there is no event handler."""
    return None if on_event is None else lambda progress: emit_event(on_event, "measuring", progress.as_event())


def check_rereadable(data: Any) -> None:
    """Raise UsageError for an iterable dataset: measuring would consume samples that training needs."""
    if not is_rereadable(data):
        raise UsageError(
            "an iterable dataset cannot be used for measuring",
            got=type(data).__name__,
            try_="tensors or a map-style dataset",
        )
