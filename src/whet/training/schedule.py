"""Learning rate schedules: a factor of the base rate for each step. Steps are counted from 1."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.checkpoint.state_encoder import NotEncodableError
from whet.checkpoint.state_json import decode_state, encode_state, state_changes
from whet.step.optimizers import EXECUTION_KEYS

SCHEDULE_NAMES = ("constant", "linear", "cosine", "plateau")


class LearningRateSchedule:
    """A factor of the base rate for each step. It depends only on the step, except for plateau, which has state."""

    def __init__(
        self,
        shape: Callable[[int], float],
        *,
        is_plateau: bool = False,
        patience: int = 2,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._shape = shape
        self.facts = dict(facts or {})
        """The numbers that the user's schedule function is bound to."""
        self._is_plateau = is_plateau
        self._patience = patience
        self._best: float | None = None
        self._num_bad = 0
        self._reduction = 1.0

    def factor(self, step: int) -> float:
        """Return the learning rate factor for a step, counted from 1."""
        return self._shape(step) * self._reduction

    def observe(self, score: float) -> None:
        """Record the score of an evaluation, where higher is better.

        Plateau halves the rate if there is no progress.
        """
        if not self._is_plateau:
            return
        if math.isfinite(score) and (self._best is None or score > self._best):
            self._best, self._num_bad = score, 0
            return
        self._num_bad += 1
        if self._num_bad > self._patience:
            self._reduction, self._num_bad = self._reduction / 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs."""
        return {"best": self._best, "num_bad": self._num_bad, "reduction": self._reduction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._best, self._num_bad, self._reduction = state["best"], state["num_bad"], state["reduction"]


def make_schedule(
    shape: str | Callable[[int], float], *, total_steps: int | None, warmup_steps: int = 0
) -> LearningRateSchedule:
    """Create a schedule from a name or a function of the step. During warm-up, the rate rises linearly."""
    if callable(shape):
        return LearningRateSchedule(shape, facts=describe_function(shape))
    if shape not in SCHEDULE_NAMES:
        raise UsageError("unknown schedule", got=shape, try_=" or ".join(SCHEDULE_NAMES))
    if shape in ("linear", "cosine") and total_steps is None:
        raise UsageError(
            f"a {shape} schedule needs to know the last step", got="data without a length", try_="max_steps=N"
        )

    def factor(step: int) -> float:
        if step <= warmup_steps:
            return step / (warmup_steps + 1)
        if shape in ("constant", "plateau") or total_steps is None:
            return 1.0
        # Use step - 1, so that the last step still has a rate above zero: a rate of 0 would waste it.
        done = (step - 1 - warmup_steps) / max(1, total_steps - warmup_steps)
        return 1 - done if shape == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LearningRateSchedule(factor, is_plateau=shape == "plateau")


class LearningRates:
    """Sets the learning rates of an optimizer: the base rate of each parameter group times the schedule's factor.

    It also keeps the hyperparameters with which the run was started; a resume compares them with those it is given.
    """

    advances = False
    """Whether `after_step` has an effect. A function of the step has nothing to advance."""

    def __init__(self, optimizer: Optimizer, schedule: LearningRateSchedule, base: list[float]) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._last_set: list[float] = []
        self._last_factor = 1.0
        self._given = {"groups": _compared_values(optimizer, base), "schedule": self._describe_schedule()}
        # Hyperparameters that differ from what the last session left were changed by the user.
        self._is_left = _left_by_session.get(optimizer) == self._given
        self.initial: dict[str, Any] = {}
        """The hyperparameters with which the run was started, as JSON. Every checkpoint saves them."""
        self._base: list[float] = []
        self._use_initial(self._given)

    @property
    def base(self) -> list[float]:
        """The initial learning rate of each parameter group, which the schedule multiplies by its factor."""
        return self._base

    def set_for(self, step: int) -> float:
        """Set the rates for a step and return that of the first group. Raise if other code has changed the rates."""
        groups, before = self._optimizer.param_groups, self._last_set
        if len(groups) != len(self._base):
            check_parameter_groups(self._optimizer, self._base)
        factor = self._schedule.factor(step)
        # Tensor rates belong to optimizers that whet built. Reading them would wait for the device.
        if before and not isinstance(groups[0]["lr"], torch.Tensor):
            rates = [group["lr"] for group in groups]
            if rates != before:
                raise UsageError(
                    "the learning rate was changed outside the session",
                    got=f"{rates}; whet had set {before}",
                    try_="schedule=scheduler: whet then steps your scheduler, and your code does not",
                )
            if factor == self._last_factor:
                return before[0]
        self._last_set, self._last_factor = set_learning_rate(self._optimizer, factor, self._base), factor
        return self._last_set[0]

    def after_step(self, *, is_last_of_epoch: bool, stepped: Iterable[str] | None = None) -> None:
        """Advance the schedule after a batch. `stepped` names the optimizers that took a step; None means all."""

    def observe(self, score: float) -> None:
        """Record the score of an evaluation, where higher is better."""
        self._schedule.observe(score)

    def check_length(self, num_steps: int | None) -> None:
        """Raise UsageError if the schedule ends before the remaining `num_steps`; None means that number is unknown."""

    def changes(self, saved: Mapping[str, Any]) -> list[str]:
        """Describe the hyperparameters that the user has changed since the run was started, such as "lr 0.1 -> 0.3"."""
        return [] if self._is_left else hyperparameter_changes(saved, self._given)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule that a resume needs."""
        return self._schedule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, initial: Mapping[str, Any], is_changed: bool) -> None:
        """Restore the state, after the optimizer has been restored.

        With `is_changed`, the run continues with the hyperparameters that the user passed to this session.
        """
        self._schedule.load_state_dict(dict(state))
        self._use_initial(self._given if is_changed else initial)
        if is_changed:
            self._use_given_values()
        # Restoring the optimizer has overwritten its rates. Forget the last rates; otherwise the check for a second
        # scheduler would fail.
        self._last_set = []

    def close(self) -> None:
        """Reset the optimizer to its base rates and record the hyperparameters that this session leaves."""
        set_learning_rate(self._optimizer, 1.0, self.base)
        self._remember()

    def _use_initial(self, initial: Mapping[str, Any]) -> None:
        self.initial = dict(initial)
        self._base = [float(values["lr"]) for values in initial["groups"]]

    def _use_given_values(self) -> None:
        for group, values in zip(self._optimizer.param_groups, self._given["groups"], strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), torch.Tensor):
                    # Keep the tensor itself, because a captured graph may read it.
                    group[key].copy_(torch.as_tensor(decode_state(value)))
                else:
                    group[key] = decode_state(value)

    def _remember(self) -> None:
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        current = {"groups": _compared_values(self._optimizer, rates), "schedule": self._describe_schedule()}
        _left_by_session[self._optimizer] = current

    def _describe_schedule(self) -> Any:
        return self._schedule.facts


_left_by_session: WeakKeyDictionary[Optimizer, dict[str, Any]] = WeakKeyDictionary()
"""The hyperparameters that the last session left in an optimizer. A second call with the same objects resumes."""


def _compared_values(optimizer: Optimizer, rates: list[float]) -> list[dict[str, Any]]:
    """Return the encoded hyperparameters of each group. Values without a short encoding are not compared."""
    groups = []
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        values: dict[str, Any] = {}
        for key, value in group.items():
            if key not in ("params", "lr", *EXECUTION_KEYS):
                with contextlib.suppress(NotEncodableError):
                    values[key] = encode_state(_as_number(value))
        groups.append({**values, "lr": rate})
    return groups


def _as_number(value: Any) -> Any:
    # Compare tensors as numbers, because the plan determines whether a value is on the device.
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def hyperparameter_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the changed hyperparameters by name.

    >>> hyperparameter_changes({"groups": [{"lr": 0.1}], "schedule": {}}, {"groups": [{"lr": 0.3}], "schedule": {}})
    ['lr 0.1 -> 0.3']
    """
    changes = []
    # A different number of groups is detected when the optimizer is restored.
    for number, (before, after) in enumerate(zip(saved["groups"], now["groups"], strict=False), start=1):
        where = f" (parameter group {number})" if len(saved["groups"]) > 1 else ""
        changes += [f"{change}{where}" for change in state_changes(before, after)]
    of_schedule = state_changes(saved["schedule"], now["schedule"], path="schedule")
    # Private values follow from public ones. They are named only if nothing else differs.
    public = [change for change in of_schedule if "._" not in change]
    return changes + public or of_schedule


def describe_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the numbers and strings that a function is bound to: arguments of a partial, closure and defaults.

    >>> from functools import partial
    >>> describe_function(partial(pow, 2, mod=7))
    {'args.0': 2, 'mod': 7}
    """
    values: dict[str, Any] = {}
    while isinstance(function, partial):
        values |= {f"args.{index}": value for index, value in enumerate(function.args)} | function.keywords
        function = function.func
    if isinstance(function, FunctionType):
        variables = inspect.getclosurevars(function).nonlocals
        defaults = [p for p in inspect.signature(function).parameters.values() if p.default is not p.empty]
        values = {**variables, **{p.name: p.default for p in defaults}, **values}
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}


def set_learning_rate(optimizer: Optimizer, factor: float, base_rates: list[float]) -> list[float]:
    """Set the learning rate of each group to `factor` times its base rate, and return the rates.

    Rates that are tensors are changed in place.
    """
    rates = [base * factor for base in base_rates]
    # strict=False: a group that was added later has no base rate. The next step raises a better error for it.
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return rates


def check_parameter_groups(optimizer: Optimizer, base_rates: list[float]) -> None:
    """Raise UsageError if parameter groups were added or removed.

    An added group has no base rate and is not clipped.
    """
    if len(optimizer.param_groups) != len(base_rates):
        raise UsageError(
            "the parameter groups of the optimizer changed after the session started",
            got=f"{len(optimizer.param_groups)} groups; {len(base_rates)} at the beginning",
            try_="all parameters in it from the beginning, with requires_grad_(False) until they are trained",
        )
