"""Apply a plan to a model and a device, for training and for measuring alike.

`build_stepper` does what is done once: move the model, lay out its weights, build the optimizer and the stepper.
`apply_plan` is the context in which steps of that plan run. Training enters its parts one by one, because the model is
verified against its own code in between; measuring enters all of them for each candidate.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.device.abstract import AbstractDevice, AbstractGraphs
from whet.device.cpu import set_num_threads
from whet.distributed.strategies import ParallelStrategy
from whet.plan.plan import Plan
from whet.step.ema import Ema
from whet.step.graphs import GraphedStepper
from whet.step.model_contexts import CompiledCalls, WeightLayout, checkpoint_activations
from whet.step.optimizers import OptimizerChoice, build_optimizer
from whet.step.step import Stepper


def place_model(
    plan: Plan,
    model: nn.Module,
    device: AbstractDevice,
    *,
    optimizer: Optimizer | None = None,
    layout: WeightLayout | None = None,
) -> WeightLayout:
    """Move the model to the device in the planned layout; return the layout, which can restore the original one.

    Raises UsageError for settings that the device does not support, before the layout changes.
    """
    device.put_model(model, optimizer)
    layout = layout or WeightLayout(model)
    device.check_settings(attention=plan.attention, norms=plan.norms, layout=plan.layout)
    layout.use(plan.layout, optimizer)
    return layout


def build_stepper(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    device: AbstractDevice,
    *,
    clip: float | None = None,
    has_ema: bool = False,
    strategy: ParallelStrategy | None = None,
) -> tuple[Stepper, list[float]]:
    """Build the optimizer, if it is not the user's own, and the stepper; also return the base learning rates."""
    strategy = strategy or ParallelStrategy()
    graphs, graph_obstacle = _open_graphs(plan, device, is_alone=strategy.is_alone)
    if isinstance(optimizer, OptimizerChoice):
        choice = optimizer
        optimizer = build_optimizer(
            choice, model, device, kernels=plan.optimizer_kernels, is_captured=graphs is not None
        )
        base_rates = choice.base_rates(optimizer)
    else:
        base_rates = [float(group["lr"]) for group in optimizer.param_groups]
    if plan.loss_scaling == "dynamic":
        device.check_loss_scaling(optimizer)
    options: dict[str, Any] = {
        "precision": plan.precision,
        "loss_scaling": plan.loss_scaling,
        "clip": clip,
        "ema": Ema(model) if has_ema else None,
        "strategy": strategy,
    }
    if graphs is None:
        stepper = Stepper(model, optimizer, device, **options)
    else:
        is_compiled = plan.compile != "off"
        stepper = GraphedStepper(model, optimizer, device, graphs=graphs, is_compiled=is_compiled, **options)
    stepper.graph_obstacle = graph_obstacle
    return stepper, base_rates


def _open_graphs(plan: Plan, device: AbstractDevice, *, is_alone: bool) -> tuple[AbstractGraphs | None, str | None]:
    """The capturer of steps if the plan has graphs, or why there is none."""
    if plan.graph == "off":
        return None, None
    if not is_alone:
        return None, "ranks wait for each other in a step, which no graph can do"
    if plan.activation_checkpointing == "on":
        return None, "activation checkpointing restores generators, which no graph can do"
    graphs = device.graphs()
    return graphs, None if graphs is not None else f"{device.kind} cannot capture a step"


def set_process_settings(plan: Plan, device: AbstractDevice) -> None:
    """Set the number of threads and the precision of float32 products, which apply to the whole process."""
    if isinstance(plan.threads, int):
        set_num_threads(plan.threads)
    device.use_precision(plan.precision)


@contextmanager
def apply_kernels(plan: Plan, device: AbstractDevice) -> Iterator[None]:
    """Use the planned attention and norm kernels while entered."""
    with device.use_kernels(attention=plan.attention, norms=plan.norms):
        yield


@contextmanager
def apply_plan(
    plan: Plan,
    model: nn.Module,
    device: AbstractDevice,
    *,
    layout: WeightLayout,
    optimizer: Optimizer | None = None,
    compiled: CompiledCalls | None = None,
) -> Iterator[None]:
    """Run steps of this plan while entered: layout, threads, precision, kernels, checkpointing, compilation.

    `compiled` is created by the caller, since compiled code is kept when the plan is entered again.
    """
    layout.use(plan.layout, optimizer)
    set_process_settings(plan, device)
    with ExitStack() as stack:
        stack.enter_context(apply_kernels(plan, device))
        if plan.activation_checkpointing == "on":
            stack.enter_context(checkpoint_activations(model))
        if compiled is not None:
            stack.enter_context(compiled.in_use())
        yield
