"""What is fastest here for this training? Plans measured with its real steps, where the run is long enough for it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.base.units import show_seconds
from whet.data.columns import as_columns
from whet.device.machine_here import machine_here
from whet.engine.rig import StepRig
from whet.engine.training import Training, read_training
from whet.engine.workload import describe
from whet.measure import cache
from whet.measure.found import Found
from whet.measure.objective import budget_seconds
from whet.measure.rig import PlannedRig, ProbeFailedError
from whet.measure.search import search
from whet.plan.plan import Plan, make_plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.step.ema import named_tensors
from whet.step.loss import LossFunction
from whet.step.optimizer import OptimizerChoice

LEAST_SECONDS = 5.0
"""A search that may take less finds out next to nothing."""
_FIRST_STEPS = 5
_LEAST_STEPS = 100
"""Your loss is not called for measuring where a run is shorter."""

Say = Callable[[str], None]
OpenRig = Callable[[], AbstractContextManager[PlannedRig]]
"""How the same training is opened in a process of its own, where it can be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tunable:
    """A training, and how it could be measured."""

    model: nn.Module
    data: Any
    loss: LossFunction
    optimizer: Optimizer | OptimizerChoice
    training: Training
    workload: Workload
    wishes: Mapping[str, Scalar]

    def plan(self) -> Plan:
        """The plan by rules."""
        machine, conditions = machine_here()
        wishes = dict(self.wishes)
        if isinstance(self.optimizer, Optimizer):
            wishes["optimizer_kernels"] = "your optimizer"
        return make_plan(machine, self.workload, wishes=wishes, conditions=conditions)

    def rig(self, plan: Plan) -> StepRig:
        return StepRig(self.model, self.optimizer, self.data, self.training, loss=self.loss, plan=plan)


def tune(
    model: nn.Module,
    data: Any,
    *,
    loss: LossFunction,
    optimizer: Optimizer | OptimizerChoice,
    device: str = "auto",
    wishes: Mapping[str, Scalar] | None = None,
    budget: float = 60.0,
    say: Say | None = None,
    **training: Any,
) -> Plan:
    """The fastest plan that could be found for a training within `budget` seconds, with its evidence.

    Times real optimizer steps of your model on your data; model, optimizer and generators are afterwards as they were.
    Give the plan to `train` or `Session` as `plan=`. All other keywords are those of `train` that decide what is
    trained (global_batch_size, epochs, max_steps, clip, ema, ...).
    """
    read = read_training(training)
    chosen = {**(wishes or {}), **({} if device == "auto" else {"device": device})}
    tunable = Tunable(
        model=model,
        data=data,
        loss=loss,
        optimizer=optimizer,
        training=read,
        workload=describe(model, data, read, recipe="tune"),
        wishes=chosen,
    )
    with tunable.rig(tunable.plan()) as rig:
        found = search(rig.plan, rig, budget_seconds=budget)
    if say is not None:
        for line in found.words:
            say(line)
    return found.applied_to(rig.plan)


def tuned_plan(tunable: Tunable, *, open_rig: OpenRig | None = None, say: Say) -> Plan:
    """The plan for a new run: measured if the run is long enough to earn it back, else by rules; it says which."""
    plan = tunable.plan()
    num_steps = plan.workload.num_steps
    if num_steps is None or num_steps < _LEAST_STEPS or not _can_be_read_again(tunable.data):
        return plan
    about = _about(plan, tunable.model)
    found = cache.recall(about)
    if found is not None:
        say(f"measured before on this machine: {found.words[0]}")
        return found.applied_to(plan)
    with tunable.rig(plan) as rig:
        plan = rig.plan
        try:
            seconds = _run_seconds(rig, num_steps)
        except ProbeFailedError:
            # The run itself will say what is wrong, in its own words.
            return plan
        budget = budget_seconds(seconds)
        if budget < LEAST_SECONDS:
            say(f"not measured: a run of about {show_seconds(seconds)} would not earn it back")
            return plan
        expected = f"this run would take about {show_seconds(seconds)}"
        say(f"measuring what is fastest here, {show_seconds(budget)} at most; {expected}")
        if open_rig is None:
            found = search(plan, rig, budget_seconds=budget)
    if found is None and open_rig is not None:
        found = _search_elsewhere(open_rig, plan, budget=budget)
    assert found is not None
    for line in found.words:
        say(line)
    if found.trials:
        cache.remember(about, found)
    return found.applied_to(plan)


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


def _about(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """What evidence holds for: this machine and software, this model, data of these shapes, these wishes."""
    return {
        "machine": plan.machine.as_json(),
        "workload": plan.workload.as_json(),
        "wishes": dict(plan.wishes),
        "model": [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in named_tensors(model)],
        "modules": sorted({type(module).__name__ for module in model.modules()}),
    }
