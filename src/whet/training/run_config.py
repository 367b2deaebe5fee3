"""The user's request, validated and with defaults filled in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from whet.base.origin import calling_script
from whet.config.goal import GoalMode, resolve_mode
from whet.data.adapters import is_map_style
from whet.data.loader import is_rereadable_loader, with_loader_options
from whet.device import mps
from whet.device.open import current_machine
from whet.distributed.ranks import check_not_mps, read_rank_info
from whet.machine.pressure import ReadSystemState
from whet.plan.plan import Plan, make_plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.run.folder import PYTHON_RECIPE, check_run_name
from whet.step.optimizer_kernels import has_step_hooks, is_of_torch, kernel_obstacle
from whet.step.optimizers import OptimizerChoice
from whet.training import checks
from whet.training.callback import Callback
from whet.training.callbacks.event_log import EventHandler
from whet.training.callbacks.progress_line import ProgressLine
from whet.training.keywords import SessionKeywords
from whet.training.optimizer_set import (
    OptimizerSet,
    as_module,
    as_optimizer_set,
    check_schedules,
    config_for_optimizer,
)
from whet.training.torch_schedule import check_plateau_goal, check_scheduler
from whet.training.training_config import TrainingConfig, parse_training_config
from whet.training.workload import describe_workload
from whet.verify.trainable import OutputFunction, adapt_outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The user's request: model, data, optimizer, training options and run folder."""

    model: nn.Module
    optimizer: Optimizer | OptimizerChoice
    """The main optimizer, which is usually the only one."""
    optimizers: OptimizerSet
    data: Any
    training: TrainingConfig
    workload: Workload
    overrides: Mapping[str, Scalar]
    plan: Plan | None = None
    """The plan for a new run; None if setup() is to make one."""
    measure: bool = True
    """Whether the first step of a custom loop measures which plan is fastest."""
    path: Path | None = None
    """The run folder; None to write nothing."""
    goal: str | None = None
    """The metric that selects the best checkpoint."""
    mode: GoalMode = "max"
    """Whether a higher ("max") or a lower ("min") value of the goal is better."""
    recipe: str = PYTHON_RECIPE
    script: str | None = None
    """The user's file and function that made this call; None for a recipe."""
    command: list[str] = field(default_factory=list)
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options that are written to the run folder and compared when the run resumes."""
    allow: tuple[str, ...] = ()
    """Changes that are allowed when the run resumes: "data", "batch", "lr"."""
    init_from: str | Path | None = None
    """The run or import that provides the initial weights of a new run."""
    attach: Mapping[str, bytes] = field(default_factory=dict)
    """Extra files of a new run folder, by name."""
    outputs: OutputFunction | None = None
    """For causal models, a function from a micro-batch to outputs, which is used to verify causality."""
    callbacks: tuple[Callback, ...] = ()
    register: Mapping[str, Any] = field(default_factory=dict)
    """User objects that are saved and restored with the run, by name."""
    loss: Any = None
    """The loss function of `whet.train`, which is known before the first step; None in a custom loop."""
    evaluate: Any = None
    """The evaluation function of `whet.train`; None in a custom loop."""
    is_custom_loop: bool = False
    """Whether the user wrote the training loop, whose variables a session cannot see."""
    on_event: EventHandler | None = None
    read_sensors: ReadSystemState | None = None
    """A function that reads the sensors; None means the sensors of this machine."""


def make_run_config(
    model: Any,
    optimizer: Any,
    data: Any,
    keywords: SessionKeywords,
) -> RunConfig:
    """Validate the arguments of a call and fill in defaults. Several models or optimizers are passed as dicts."""
    model, optimizers = as_module(model), as_optimizer_set(optimizer)
    training = parse_training_config(with_loader_options(data, keywords.training))
    plan, overrides, device = keywords.plan, keywords.overrides or {}, keywords.device
    checks.check_model_and_optimizer(model, optimizers)
    checks.check_overrides_with_plan(plan, overrides, device)
    check_schedules(training, optimizers)
    for name, one in {optimizers.main_name: optimizers.main, **optimizers.others}.items():
        check_scheduler(config_for_optimizer(training, name, one), one)
    mode = resolve_mode(keywords.goal, keywords.mode)
    for name, one in optimizers.torch_optimizers.items():
        check_plateau_goal(config_for_optimizer(training, name, one), goal=keywords.goal, mode=mode)
    ranks = read_rank_info()
    # Check this before the ranks connect: there are no collectives for MPS tensors, so the ranks would only fail later.
    check_not_mps(ranks.size, device=str(overrides.get("device", device)), is_mac=mps.mps_unavailable_reason() is None)
    chosen = {**(plan.overrides if plan else overrides), **({} if device == "auto" else {"device": device})}
    described_optimizer = _describe_optimizer(optimizers.main, model)
    checks.check_kernels(chosen.get("optimizer_kernels"), described_optimizer)
    checks.check_several_optimizers(optimizers, training, num_ranks=ranks.size)
    if keywords.run is not None:
        check_run_name(Path(keywords.run))
    described = keywords.workload or describe_workload(model, data, training, recipe=keywords.recipe)
    return RunConfig(
        model=model,
        optimizer=optimizers.main,
        optimizers=optimizers,
        data=data,
        training=training,
        workload=described.model_copy(
            update={
                "world_size": ranks.size,
                "local_size": ranks.local_size,
                **described_optimizer,
            }
        ),
        overrides=chosen,
        plan=plan,
        measure=keywords.measure,
        path=None if keywords.run is None else Path(keywords.run),
        goal=keywords.goal,
        mode=mode,
        recipe=keywords.recipe,
        script=None if keywords.command else calling_script(),
        command=list(keywords.command),
        config=_recorded_options(training, keywords),
        allow=checks.parse_allow(keywords.allow),
        init_from=keywords.init_from,
        attach=keywords.attach,
        outputs=None if keywords.outputs is None else adapt_outputs(keywords.outputs),
        callbacks=tuple(keywords.callbacks),
        register=dict(keywords.register or {}),
        on_event=ProgressLine(epochs=training.epochs) if keywords.on_event == "line" else keywords.on_event,
        read_sensors=keywords.read_sensors,
    )


def _recorded_options(training: TrainingConfig, keywords: SessionKeywords) -> Mapping[str, Any]:
    """Return the options that a resume compares: those of a recipe, or those of the training run."""
    if keywords.config is not None:
        return keywords.config
    weights = {} if keywords.init_from is None else {"init_from": str(keywords.init_from)}
    return {**training.as_json(), **weights}


def _describe_optimizer(optimizer: Optimizer | OptimizerChoice, model: nn.Module) -> dict[str, Any]:
    """Return the facts about the optimizer that a plan needs."""
    if not isinstance(optimizer, Optimizer):
        return {"built_optimizer": optimizer.name}
    return {
        "optimizer": type(optimizer).__name__,
        "optimizer_obstacle": kernel_obstacle(optimizer, model),
        "may_update_outside": is_of_torch(optimizer) and not has_step_hooks(optimizer),
    }


def plan_from_rules(config: RunConfig) -> Plan:
    """Return the plan that the rules make for this machine, without measurements."""
    machine, system_state = current_machine()
    return make_plan(machine, config.workload, overrides=config.overrides, system_state=system_state)


def is_rereadable(data: Any) -> bool:
    """Return whether the data can be read more than once. Reading an iterable dataset consumes it."""
    if isinstance(data, DataLoader):
        return is_rereadable_loader(data)
    return is_map_style(data)
