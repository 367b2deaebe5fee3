"""Support for `torch.optim.lr_scheduler`: schedulers are checked before the run and stepped as in a plain loop."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, MultiplicativeLR, OneCycleLR, ReduceLROnPlateau

from whet.base.errors import UsageError
from whet.checkpoint.state_encoder import NotEncodableError
from whet.checkpoint.state_json import decode_state, encode_state
from whet.config.options import SchedulerObject
from whet.step.optimizers import OptimizerChoice
from whet.training.schedule import (
    LearningRates,
    LearningRateSchedule,
    check_parameter_groups,
    describe_function,
    make_schedule,
)
from whet.training.training_config import TrainingConfig

Interval = Literal["step", "epoch", "evaluation"]

_PER_STEP = (OneCycleLR, CyclicLR)
"""Schedulers whose documentation says to step them after every batch."""


class TorchLearningRates(LearningRates):
    """Learning rates that a torch scheduler sets, together with betas or momentum, in the user's optimizer."""

    advances = True

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler, base: list[float], *, interval: str) -> None:
        self._scheduler = scheduler
        self._interval = _interval_of(scheduler, interval)
        self._num_steps = 0
        """The number of times that whet has stepped the scheduler."""
        super().__init__(optimizer, LearningRateSchedule(lambda _: 1.0), base)
        self._expected = self._position()

    def set_for(self, step: int) -> float:  # noqa: ARG002
        """Return the rate of the first group. Raise if other code has stepped the scheduler or changed the rates."""
        check_parameter_groups(self._optimizer, self.base)
        position = self._position()
        if position != self._expected:
            raise UsageError(
                "something else changes the learning rate or steps the scheduler",
                got=f"{position}; whet had left {self._expected}",
                try_="no scheduler.step() and no change of optimizer.param_groups: schedule=scheduler does that",
            )
        return float(self._optimizer.param_groups[0]["lr"])

    def after_step(self, *, is_last_of_epoch: bool, stepped: Iterable[str] | None = None) -> None:
        """Step the scheduler after an optimizer step or an epoch, depending on its interval."""
        has_stepped = stepped is None or bool(list(stepped))
        if (self._interval == "step" and has_stepped) or (self._interval == "epoch" and is_last_of_epoch):
            self._scheduler.step()
            self._num_steps += 1
            self._expected = self._position()

    def observe(self, score: float) -> None:
        """Step ReduceLROnPlateau with the goal metric. Other schedulers do not depend on metrics."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            # The score of a metric with mode "min" is the negated metric, so negate it again. check_plateau_goal has
            # ensured that the goal and the scheduler have the same mode.
            self._scheduler.step(score if self._scheduler.mode == "max" else -score)
            self._num_steps += 1
            self._expected = self._position()

    def check_length(self, num_steps: int | None) -> None:
        """Raise UsageError if OneCycleLR ends before the run; torch would raise only in the middle of training."""
        if num_steps is None or not isinstance(self._scheduler, OneCycleLR):
            return
        left = self._scheduler.total_steps - self._scheduler.last_epoch
        if left < num_steps:
            raise UsageError(
                "OneCycleLR ends before the run",
                got=f"{left:,} steps of OneCycleLR are left; the run has {num_steps:,} to go",
                try_=f"OneCycleLR(optimizer, ..., total_steps={num_steps + self._scheduler.last_epoch})",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state as JSON, and the number of times it was stepped."""
        return {"scheduler": encode_scheduler(self._scheduler), "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any], *, initial: Mapping[str, Any], is_changed: bool) -> None:
        """Restore the scheduler, after the optimizer has been restored.

        With `is_changed`, the scheduler that the user passed to this session is stepped as often as the saved one was.
        """
        scheduler, self._num_steps = self._scheduler, int(state["num_steps"])
        if not is_changed:
            scheduler.load_state_dict(decode_state(state["scheduler"]))
            self._use_initial(initial)
        else:
            reached = [float(group["lr"]) for group in self._optimizer.param_groups]
            self._use_initial(self._given)
            self._use_given_values()
            scheduler.load_state_dict(decode_state(self._given["schedule"]["state"]))
            if isinstance(scheduler, ReduceLROnPlateau):
                self._reduce_again(state, initial, reached)
            else:
                self._repeat_steps()
        self._expected = self._position()

    def close(self) -> None:
        """Keep the current state of the scheduler and the rates, like a plain loop."""
        self._remember()

    def _repeat_steps(self) -> None:
        with warnings.catch_warnings():
            # torch warns about steps of a scheduler without steps of the optimizer. Here, they are intended.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(self._num_steps):
                self._scheduler.step()

    def _reduce_again(self, state: Mapping[str, Any], initial: Mapping[str, Any], reached: list[float]) -> None:
        """Reduce the new rates by the same factor as the saved ones, because earlier metrics are no longer known."""
        saved = decode_state(state["scheduler"])
        progress = {name: saved[name] for name in ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")}
        self._scheduler.load_state_dict({**self._scheduler.state_dict(), **progress})
        for group, rate, before in zip(self._optimizer.param_groups, reached, initial["groups"], strict=True):
            factor = rate / before["lr"] if before["lr"] else 1.0
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] *= factor

    def _position(self) -> tuple[Any, ...]:
        """Return the rates and the counters of the scheduler, which only whet may change."""
        # Do not read a tensor rate, which would wait for the device. The counters of the scheduler change in every step
        # anyway.
        rates = [None if isinstance(rate := group["lr"], Tensor) else rate for group in self._optimizer.param_groups]
        return rates, [getattr(part, "last_epoch", None) for part in _parts(self._scheduler)]

    def _describe_schedule(self) -> Any:
        functions = [
            function
            for part in _parts(self._scheduler)
            for function in (*getattr(part, "lr_lambdas", ()), getattr(part, "_scale_fn_custom", None))
            if function is not None
        ]
        facts = {f"function.{number}": describe_function(function) for number, function in enumerate(functions)}
        return {"state": encode_scheduler(self._scheduler), **facts}


def make_learning_rates(
    optimizer: Optimizer, training: TrainingConfig, base: list[float], *, total_steps: int | None
) -> LearningRates:
    """Return the learning rates of a run, from a torch scheduler or one of whet's schedules."""
    schedule = training.schedule
    if isinstance(schedule, LRScheduler):
        return TorchLearningRates(optimizer, schedule, base, interval=training.schedule_interval)
    assert not isinstance(schedule, SchedulerObject | dict), "one schedule for one optimizer"
    made = make_schedule(schedule, total_steps=total_steps, warmup_steps=training.warmup_steps)
    return LearningRates(optimizer, made, base)


def encode_scheduler(scheduler: LRScheduler) -> Any:
    """Return the state of a scheduler as JSON. Raise UsageError if JSON cannot represent it."""
    try:
        return encode_state(scheduler.state_dict())
    except NotEncodableError as error:
        raise UsageError(
            f"the state of {type(scheduler).__name__} cannot be saved without pickle",
            got=f"state_dict(): {error}",
            try_="a state_dict() of numbers, strings, lists, dicts and small tensors",
        ) from None


def schedule_functions(schedule: object) -> Iterator[Any]:
    """Yield the user's functions that a schedule calls."""
    if isinstance(schedule, Mapping):
        for part in schedule.values():
            yield from schedule_functions(part)
        return
    if isinstance(schedule, LRScheduler):
        for part in _parts(schedule):
            if isinstance(part, LambdaLR | MultiplicativeLR):
                yield from part.lr_lambdas
            elif not type(part).__module__.startswith("torch."):
                yield type(part)
    elif callable(schedule):
        yield schedule


def _parts(scheduler: Any) -> list[Any]:
    """Return the scheduler and all schedulers nested in it."""
    inside = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(part for child in inside for part in _parts(child))]


# --- checks before the run --------------------------------------------------------------------------------------------


def check_scheduler(training: TrainingConfig, optimizer: Optimizer | OptimizerChoice) -> None:
    """Raise UsageError for a scheduler object that the session cannot step as a plain loop would."""
    scheduler = training.schedule
    if isinstance(scheduler, str) or not isinstance(scheduler, LRScheduler | SchedulerObject):
        if training.schedule_interval != "auto":
            raise UsageError(
                "schedule_interval is for torch schedulers",
                got=f"schedule_interval={training.schedule_interval!r}, schedule={training.as_json()['schedule']}",
                try_="no schedule_interval: names and functions decide each step's rate",
            )
        return
    name = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        hint = "schedule=torch.optim.lr_scheduler.StepLR(optimizer, ...), or a function from a step to a factor"
        raise UsageError("the schedule is no scheduler of torch", got=name, try_=hint)
    if isinstance(optimizer, OptimizerChoice):
        raise UsageError(
            "a torch scheduler needs your own optimizer: an OptimizerChoice is built later",
            got=f"schedule={name} with an OptimizerChoice",
            try_="optimizer=torch.optim.AdamW(...), or a schedule by name or function",
        )
    if any(getattr(part, "optimizer", optimizer) is not optimizer for part in _parts(scheduler)):
        raise UsageError(
            "the scheduler belongs to a different optimizer",
            got=f"{name} over another {type(scheduler.optimizer).__name__}",
            try_="the same optimizer in schedule=...(optimizer, ...) and optimizer=",
        )
    if training.warmup_steps:
        raise UsageError(
            "warmup_steps does not change a torch scheduler",
            got=f"warmup_steps={training.warmup_steps} with {name}",
            try_="warmup_steps=0, and SequentialLR(optimizer, [LinearLR(...), ...], [...]) for a warm-up",
        )
    _interval_of(scheduler, training.schedule_interval)
    encode_scheduler(scheduler)


def check_plateau_goal(training: TrainingConfig, *, goal: str | None, mode: str) -> None:
    """Raise UsageError if no goal metric would step ReduceLROnPlateau, or if their modes differ."""
    scheduler = training.schedule
    if not isinstance(scheduler, ReduceLROnPlateau):
        return
    if goal is None:
        raise UsageError(
            "ReduceLROnPlateau is stepped by the goal metric",
            got="no goal",
            try_=f'goal="loss", mode="{scheduler.mode}"',
        )
    if scheduler.mode != mode:
        raise UsageError(
            "ReduceLROnPlateau and the goal disagree on which values are better",
            got=f"ReduceLROnPlateau(mode={scheduler.mode!r}), goal={goal!r} with mode={mode!r}",
            try_=f'mode="{scheduler.mode}", or ReduceLROnPlateau(optimizer, mode="{mode}")',
        )


def _interval_of(scheduler: LRScheduler, requested: str) -> Interval:
    """Return when a scheduler is stepped. Raise UsageError if that is unknown or contradicts the scheduler's class."""
    name = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        if requested != "auto":
            raise UsageError(
                f"{name} is stepped at each evaluation",
                got=f"schedule_interval={requested!r}",
                try_="no schedule_interval, and eval_every=N for the steps between evaluations",
            )
        return "evaluation"
    per_step = [type(part).__name__ for part in _parts(scheduler) if isinstance(part, _PER_STEP)]
    if per_step:
        if requested == "epoch":
            hint = 'schedule_interval="step"'
            raise UsageError(
                f"{per_step[0]} is stepped after each step", got=f"schedule_interval={requested!r}", try_=hint
            )
        return "step"
    if requested == "auto":
        # A wrong guess would train with wrong rates, without any error.
        raise UsageError(
            f"{name} needs a schedule_interval",
            got="no schedule_interval",
            try_='schedule_interval="step" or schedule_interval="epoch", as in your training loop',
        )
    return "step" if requested == "step" else "epoch"
