"""The optimizers of a run: a single one, or several by name, such as a generator's and a discriminator's.

The first one is the main optimizer. Each has its own stepper, learning rates and number of steps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from whet.base.errors import UsageError
from whet.step.optimizers import OptimizerChoice
from whet.training.schedule import LearningRates
from whet.training.training_config import TrainingConfig

AnyOptimizer = Optimizer | OptimizerChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSet:
    """The optimizers of a run, as passed by the user."""

    main: AnyOptimizer
    main_name: str = ""
    """The name of the main optimizer; empty if it is the only one and has no name."""
    others: Mapping[str, Optimizer] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.main_name, *self.others)

    @property
    def torch_optimizers(self) -> dict[str, Optimizer]:
        """All optimizers that have already been built, by name."""
        first = {self.main_name: self.main} if isinstance(self.main, Optimizer) else {}
        return {**first, **self.others}


def as_module(model: Any) -> Any:
    """Combine several models into one module: a dict becomes an nn.ModuleDict, and a list an nn.ModuleList."""
    if isinstance(model, Mapping) and model and all(isinstance(part, nn.Module) for part in model.values()):
        return _in_mode(nn.ModuleDict(dict(model)))
    if isinstance(model, list | tuple) and model and all(isinstance(part, nn.Module) for part in model):
        return _in_mode(nn.ModuleList(model))
    return model


def _in_mode(container: nn.Module) -> nn.Module:
    # A new container is in training mode even if its parts are in eval mode, so set its mode from its parts.
    container.training = all(part.training for part in container.children())
    return container


def as_optimizer_set(optimizer: Any) -> OptimizerSet:
    """Return the optimizers passed in a call. Raise UsageError for several optimizers without names."""
    if isinstance(optimizer, list | tuple):
        raise UsageError(
            "several optimizers need names",
            got=f"a {type(optimizer).__name__} of {len(optimizer)}",
            try_='{"d": optimizer_d, "g": optimizer_g}, then session.step(loss, batch, optimizer="d")',
        )
    if not isinstance(optimizer, Mapping):
        return OptimizerSet(main=optimizer)
    wrong = [f"{name!r}: {type(one).__name__}" for name, one in optimizer.items() if not isinstance(one, Optimizer)]
    if wrong or not optimizer or not all(isinstance(name, str) and name.isidentifier() for name in optimizer):
        raise UsageError(
            "several optimizers are a dict from a name to a torch.optim.Optimizer",
            got=", ".join(wrong) or repr(list(optimizer)),
            try_='{"d": torch.optim.Adam(d.parameters()), "g": torch.optim.Adam(g.parameters())}',
        )
    (name, main), *others = optimizer.items()
    return OptimizerSet(main=main, main_name=name, others=dict(others))


def parameters_of_others(optimizers: Mapping[str, Optimizer], name: str) -> list[nn.Parameter]:
    """Return the parameters that only other optimizers update."""
    own = {id(p) for group in optimizers[name].param_groups for p in group["params"]}
    return [
        parameter
        for other, optimizer in optimizers.items()
        if other != name
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in own
    ]


def config_for_optimizer(training: TrainingConfig, name: str, optimizer: AnyOptimizer) -> TrainingConfig:
    """Return the options with the schedule for one of several optimizers.

    A dict maps each name to a schedule, and a torch scheduler belongs to the optimizer it was created for. Any other
    schedule applies to every optimizer.
    """
    if not name:
        return training
    schedule = training.schedule
    if isinstance(schedule, Mapping):
        schedule = schedule.get(name, "constant")
    elif isinstance(schedule, LRScheduler) and schedule.optimizer is not optimizer:
        schedule = "constant"
    interval = training.schedule_interval if isinstance(schedule, LRScheduler) else "auto"
    return training.model_copy(update={"schedule": schedule, "schedule_interval": interval})


def check_schedules(training: TrainingConfig, optimizers: OptimizerSet) -> None:
    """Raise UsageError if the schedule names optimizers that do not exist."""
    schedule = training.schedule
    if isinstance(schedule, Mapping):
        unknown = [name for name in schedule if name not in optimizers.names]
        if unknown or not optimizers.main_name:
            names = ", ".join(optimizers.names) or "one without a name"
            raise UsageError(
                "a dict of schedules has the names of the optimizers",
                got=f"schedules for {', '.join(map(str, schedule))}; optimizers: {names}",
                try_="schedule={name: scheduler} with those names, or one schedule for all",
            )
        return
    is_known = any(getattr(schedule, "optimizer", None) is one for one in optimizers.torch_optimizers.values())
    if isinstance(schedule, LRScheduler) and optimizers.others and not is_known:
        raise UsageError(
            "the scheduler belongs to a different optimizer",
            got=f"{type(schedule).__name__} over an optimizer that the session does not know",
            try_="schedule={name: scheduler} over the optimizers of the session",
        )


class RatesByName(LearningRates):
    """The learning rate schedules of several optimizers, by name."""

    advances = True

    def __init__(self, rates: Mapping[str, LearningRates]) -> None:
        self._rates = dict(rates)

    @property
    def base(self) -> list[float]:
        """The initial learning rates of the main optimizer."""
        return next(iter(self._rates.values())).base

    @property
    def initial(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: rates.initial for name, rates in self._rates.items()}

    def set_for(self, step: int) -> float:
        first, *_ = [rates.set_for(step) for rates in self._rates.values()]
        return first

    def after_step(self, *, is_last_of_epoch: bool, stepped: Iterable[str] | None = None) -> None:
        names = set(self._rates) if stepped is None else set(stepped)
        for name, rates in self._rates.items():
            rates.after_step(is_last_of_epoch=is_last_of_epoch, stepped=("",) if name in names else ())

    def observe(self, score: float) -> None:
        for rates in self._rates.values():
            rates.observe(score)

    def check_length(self, num_steps: int | None) -> None:
        """Skip the check: only the user's loop determines how often each optimizer steps."""

    def changes(self, saved: Mapping[str, Any]) -> list[str]:
        names = [name for name in self._rates if name in saved]
        return [f"{change} of {name}" for name in names for change in self._rates[name].changes(saved[name])]

    def state_dict(self) -> dict[str, Any]:
        return {name: rates.state_dict() for name, rates in self._rates.items()}

    def load_state_dict(self, state: Mapping[str, Any], *, initial: Mapping[str, Any], is_changed: bool) -> None:
        for name, rates in self._rates.items():
            rates.load_state_dict(state[name], initial=initial[name], is_changed=is_changed)

    def close(self) -> None:
        for rates in self._rates.values():
            rates.close()
