"""What is fastest here for this training? Plans measured with its real steps, where the run is long enough for it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.base.units import show_seconds
from whet.engine.open_batch import LR_BATCH, find_batch, is_open, refuse_stream, tell, watch_of
from whet.engine.progress_line import ProgressLine
from whet.engine.recorder import Show
from whet.engine.refusals import refuse_wrong_kinds
from whet.engine.request import Request, can_be_read_again, make_request, plan_by_rules
from whet.engine.rig import StepRig, evidence_key
from whet.engine.training import read_training
from whet.measure import cache
from whet.measure.found import Found
from whet.measure.objective import budget_seconds
from whet.measure.progress import Watch
from whet.measure.rig import PlannedRig, ProbeFailedError
from whet.measure.search import search
from whet.plan.plan import Plan, with_batch
from whet.plan.setting import Scalar
from whet.step.loss import LossFunction
from whet.step.optimizer import OptimizerChoice

LEAST_SECONDS = 5.0
"""A search that may take less finds out next to nothing."""
_FIRST_STEPS = 5
_BATCH_SHARE = 1 / 3
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
    lr_batch: int = LR_BATCH,
    **training: Any,
) -> Plan:
    """The fastest plan that could be found for a training within `budget` seconds, with its evidence.

    Times real optimizer steps of your model on your data; model, optimizer and generators are afterwards as they were.
    Give the plan to `train` or `Session` as `plan=`. All other keywords are those of `train` that decide what is
    trained (global_batch_size, epochs, max_steps, clip, ema, ...). `plan.value("precision")` is a setting,
    `plan.settings["precision"].reason` why. How far it is, and what was found, is said on standard error; `show` may be
    a function that is told instead, or None for silence.

    With global_batch_size="auto" the knee of the curve is found first, in a third of the budget: `plan.workload.batch`
    has it, and your learning rate for it, which is taken to be meant for `lr_batch` samples. `train` with this plan and
    global_batch_size="auto" takes both.
    """
    refuse_wrong_kinds(model, optimizer, "max")
    has_open_batch = is_open(training)
    if has_open_batch:
        training = {**training, "global_batch_size": lr_batch}
    asked = make_request(model, optimizer, data, read_training(training), device=device, wishes=wishes)
    if not (isinstance(budget, int | float) and budget > 0):
        raise UsageError("budget must be above 0", got=repr(budget), try_="budget=60, in seconds")
    refuse_stream(data)
    told = ProgressLine("tune") if show == "line" else show
    watch = watch_of(told)
    with _rig(asked, loss, plan_by_rules(asked)) as rig:
        chosen, left = None, budget
        if has_open_batch:
            chosen = find_batch(rig, optimizer, budget=_BATCH_SHARE * budget, watch=watch)
            left -= chosen.spent_seconds
            tell(told, *chosen.lines)
        found = search(rig.plan, rig, budget_seconds=left, watch=watch)
    if found.trials:
        cache.remember(rig.about, found)
    tell(told, *found.words)
    return with_batch(found.applied_to(rig.plan), chosen)


def tuned_plan(
    asked: Request, loss: LossFunction, *, open_rig: OpenRig | None = None, show: Show | None = None
) -> Plan | None:
    """The plan for a new run, measured if the run is long enough to earn it back; None, and why, if it is not."""
    plan = plan_by_rules(asked)
    num_steps = plan.workload.num_steps
    if num_steps is None or num_steps < _LEAST_STEPS or not can_be_read_again(asked.data):
        return None
    about = evidence_key(plan, asked.model)
    found = cache.recall(about)
    if found is not None:
        tell(show, f"measured before on this machine: {found.words[0]}")
        return found.applied_to(plan)
    try:
        measured = _measured(asked, loss, plan, num_steps, open_rig=open_rig, show=show)
    except Exception as error:
        # Where the run itself fails too, it will say so in its own words.
        reason = error.reason if isinstance(error, ProbeFailedError) else f"{type(error).__name__}: {error}"
        tell(show, f"not measured: {(reason.splitlines() or [reason])[0]}")
        return None
    if measured is None:
        return None
    plan, found = measured
    tell(show, *found.words)
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
            tell(show, f"not measured: a run of about {show_seconds(seconds)} would not earn it back")
            return None
        expected = f"this run would take about {show_seconds(seconds)}"
        tell(show, f"measuring what is fastest here, {show_seconds(budget)} at most; {expected}")
        if open_rig is None:
            return plan, search(plan, rig, budget_seconds=budget, watch=watch_of(show))
    return plan, _search_elsewhere(open_rig, plan, budget=budget, watch=watch_of(show))


def _rig(asked: Request, loss: LossFunction, plan: Plan) -> StepRig:
    return StepRig(asked.model, asked.optimizer, asked.data, asked.training, loss=loss, plan=plan)


def _search_elsewhere(open_rig: OpenRig, plan: Plan, *, budget: float, watch: Watch | None) -> Found:
    """In a process of its own; one that cannot even start is told of, and the rules hold."""
    try:
        with open_rig() as rig:
            return search(plan, rig, budget_seconds=budget, watch=watch)
    except ProbeFailedError as error:
        return Found(words=(f"not measured: {error.reason}",))


def _run_seconds(rig: StepRig, num_steps: int) -> float:
    """How long all steps will take by the rules, from a few of them."""
    prepared = rig.prepare({}, seconds=LEAST_SECONDS)
    seconds = median(prepared.step(index) for index in range(_FIRST_STEPS))
    prepared.close()
    return prepared.preparation_seconds + num_steps * seconds
