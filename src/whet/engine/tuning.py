"""What is fastest here for this training? Plans measured with its real steps, where the run is long enough for it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.base.units import show_seconds
from whet.data.columns import as_columns
from whet.device.machine_here import machine_here
from whet.engine.progress_line import ProgressLine
from whet.engine.recorder import Show
from whet.engine.refusals import refuse_wrong_kinds
from whet.engine.request import Request, make_request
from whet.engine.rig import StepRig, evidence_key
from whet.engine.training import read_training
from whet.measure import cache
from whet.measure.found import Found
from whet.measure.objective import budget_seconds
from whet.measure.rig import PlannedRig, ProbeFailedError
from whet.measure.search import search
from whet.plan.plan import Plan, make_plan
from whet.plan.setting import Scalar
from whet.step.loss import LossFunction
from whet.step.optimizer import OptimizerChoice

LEAST_SECONDS = 5.0
"""A search that may take less finds out next to nothing."""
_FIRST_STEPS = 5
_LEAST_STEPS = 100
"""Your loss is not called for measuring where a run is shorter."""

OpenRig = Callable[[], AbstractContextManager[PlannedRig]]
"""How the same training is opened in a process of its own, where it can be."""


def tune(
    model: nn.Module,
    data: Any,
    *,
    loss: LossFunction,
    optimizer: Optimizer | OptimizerChoice,
    device: str = "auto",
    wishes: Mapping[str, Scalar] | None = None,
    budget: float = 60.0,
    show: Show | Literal["line"] | None = "line",
    **training: Any,
) -> Plan:
    """The fastest plan that could be found for a training within `budget` seconds, with its evidence.

    Times real optimizer steps of your model on your data; model, optimizer and generators are afterwards as they were.
    Give the plan to `train` or `Session` as `plan=`. All other keywords are those of `train` that decide what is
    trained (global_batch_size, epochs, max_steps, clip, ema, ...). `plan.value("precision")` is a setting,
    `plan.settings["precision"].reason` why. What was found is said on standard error when it is done; `show` may be a
    function that is told instead, or None for silence.
    """
    refuse_wrong_kinds(model, optimizer, "max")
    asked = make_request(model, optimizer, data, read_training(training), device=device, wishes=wishes)
    if not (isinstance(budget, int | float) and budget > 0):
        raise UsageError("budget must be above 0", got=repr(budget), try_="budget=60, in seconds")
    if not _can_be_read_again(data):
        raise UsageError("a stream cannot be measured", got=type(data).__name__, try_="tensors or a map-style dataset")
    with _rig(asked, loss, _plan_by_rules(asked)) as rig:
        found = search(rig.plan, rig, budget_seconds=budget)
    if found.trials:
        cache.remember(rig.about, found)
    _tell(ProgressLine("tune") if show == "line" else show, *found.words)
    return found.applied_to(rig.plan)


def tuned_plan(
    asked: Request, loss: LossFunction, *, open_rig: OpenRig | None = None, show: Show | None = None
) -> Plan | None:
    """The plan for a new run, measured if the run is long enough to earn it back; None, and why, if it is not."""
    plan = _plan_by_rules(asked)
    num_steps = plan.workload.num_steps
    if num_steps is None or num_steps < _LEAST_STEPS or not _can_be_read_again(asked.data):
        return None
    about = evidence_key(plan, asked.model)
    found = cache.recall(about)
    if found is not None:
        _tell(show, f"measured before on this machine: {found.words[0]}")
        return found.applied_to(plan)
    try:
        measured = _measured(asked, loss, plan, num_steps, open_rig=open_rig, show=show)
    except Exception as error:
        # Where the run itself fails too, it will say so in its own words.
        reason = error.reason if isinstance(error, ProbeFailedError) else f"{type(error).__name__}: {error}"
        _tell(show, f"not measured: {(reason.splitlines() or [reason])[0]}")
        return None
    if measured is None:
        return None
    plan, found = measured
    _tell(show, *found.words)
    if not found.trials:
        return None
    cache.remember(about, found)
    return found.applied_to(plan)


def _measured(
    asked: Request, loss: LossFunction, plan: Plan, num_steps: int, *, open_rig: OpenRig | None, show: Show | None
) -> tuple[Plan, Found] | None:
    """What was found, and the plan it is about; None, and why, for a run that would not earn it back."""
    with _rig(asked, loss, plan) as rig:
        plan = rig.plan
        seconds = _run_seconds(rig, num_steps)
        budget = budget_seconds(seconds)
        if budget < LEAST_SECONDS:
            _tell(show, f"not measured: a run of about {show_seconds(seconds)} would not earn it back")
            return None
        expected = f"this run would take about {show_seconds(seconds)}"
        _tell(show, f"measuring what is fastest here, {show_seconds(budget)} at most; {expected}")
        if open_rig is None:
            return plan, search(plan, rig, budget_seconds=budget)
    return plan, _search_elsewhere(open_rig, plan, budget=budget)


def _plan_by_rules(asked: Request) -> Plan:
    machine, conditions = machine_here()
    return make_plan(machine, asked.workload, wishes=asked.wishes, conditions=conditions)


def _rig(asked: Request, loss: LossFunction, plan: Plan) -> StepRig:
    return StepRig(asked.model, asked.optimizer, asked.data, asked.training, loss=loss, plan=plan)


def _tell(show: Show | None, *lines: str) -> None:
    if show is not None:
        for line in lines:
            show("plan", {"changed": line})


def _can_be_read_again(data: Any) -> bool:
    """A stream is used up by whoever reads it first."""
    return as_columns(data) is not None or callable(getattr(data, "__getitem__", None))


def _search_elsewhere(open_rig: OpenRig, plan: Plan, *, budget: float) -> Found:
    """In a process of its own; one that cannot even start is told of, and the rules hold."""
    try:
        with open_rig() as rig:
            return search(plan, rig, budget_seconds=budget)
    except ProbeFailedError as error:
        return Found(words=(f"not measured: {error.reason}",))


def _run_seconds(rig: StepRig, num_steps: int) -> float:
    """How long all steps will take by the rules, from a few of them."""
    prepared = rig.prepare({}, seconds=LEAST_SECONDS)
    seconds = median(prepared.step(index) for index in range(_FIRST_STEPS))
    prepared.close()
    return prepared.preparation_seconds + num_steps * seconds
