"""Apply a plan to a model and a device, for both training and measuring.

`open_planned_device`, `open_planned_source`, `place_model`, `make_strategy` and `build_stepper` are each called once.
`apply_plan` is the context manager in which the steps of a plan run. Training enters the parts of that context one by
one, because it verifies the model in between; measuring enters the whole context for each candidate.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from whet.data.adapters import LoadingConfig, open_source
from whet.data.loader import CollateFunction
from whet.data.source import AbstractSource
from whet.data.split import RankShare
from whet.device.abstract import AbstractDevice, AbstractGraphs
from whet.device.cpu import set_num_threads
from whet.device.open import open_device, rank_device
from whet.distributed.group import RankGroup
from whet.distributed.ranks import RankInfo
from whet.distributed.strategies import ParallelStrategy, ReplicatedStrategy
from whet.plan.plan import Plan, override
from whet.step.attention import use_explicit_masks
from whet.step.compilation import CompiledCalls
from whet.step.ema import Ema
from whet.step.graphs import GraphedStepper
from whet.step.model_contexts import (
    WeightLayout,
    checkpoint_activations,
    deterministic,
    find_blocks,
    split_large_heads,
)
from whet.step.optimizer_kernels import save_kernels, set_kernels
from whet.step.optimizers import OptimizerChoice, build_optimizer
from whet.step.step import Stepper
from whet.step.unpadding import Unpadding

_DEFAULT_BUCKET_MB = 25.0


def open_planned_device(plan: Plan, ranks: RankInfo | None = None) -> tuple[Plan, AbstractDevice, str | None]:
    """Open the device that the plan names and apply the process-wide settings. Each rank gets its own GPU.

    Return the plan, the device, and the reason why it is not the requested device (None if it is). With
    on_device_failure=cpu, a device that cannot be opened is replaced by the CPU, with a new plan for it.
    """
    opened = open_device(
        rank_device(plan.device, 0 if ranks is None or ranks.is_single_process else ranks.local_rank),
        on_failure=plan.on_device_failure,
        overlaps_copies=plan.copies == "overlapped",
    )
    reason = opened.fallback_reason
    if reason is not None:
        plan = override(plan, {"device": "cpu"})
    elif str(plan.overrides.get("device", opened.device.kind)).partition(":")[0] != opened.device.kind:
        reason = plan.settings["device"].reason
    high, low = plan.high_watermark, plan.low_watermark
    opened.device.check_environment(
        watermarks=None if high is None or low is None else (high, low), needs_fallback=plan.mps_fallback == "on"
    )
    set_process_settings(plan, opened.device)
    return plan, opened.device, reason


def open_planned_source(
    data: Any,
    device: AbstractDevice,
    plan: Plan,
    *,
    global_batch_size: int,
    seed: int = 0,
    shuffle: bool = False,
    share: RankShare | None = None,
    collate_fn: CollateFunction | None = None,
    pad_token_id: int | None = None,
) -> AbstractSource:
    """Open the data as planned: stored on the device or on the host, read by worker processes or by this process."""
    return open_source(
        data,
        device,
        global_batch_size=global_batch_size,
        seed=seed,
        shuffle=shuffle,
        is_resident=plan.data_location == "device",
        loading=LoadingConfig(
            workers=int(plan.workers or 0), start=plan.worker_start_method, prefetch=int(plan.prefetch or 2)
        ),
        share=share,
        collate_fn=collate_fn,
        pad_token_id=pad_token_id,
    )


def place_model(
    plan: Plan,
    model: nn.Module,
    device: AbstractDevice,
    *,
    optimizer: Optimizer | None = None,
    layout: WeightLayout | None = None,
) -> WeightLayout:
    """Move the model to the device and give its weights the planned memory layout.

    Return the layout, which can restore the original one. Raise UsageError, before the layout changes, for settings
    that the device does not support.
    """
    # Move the model first: the layout applies to the tensors on the device.
    device.put_model(model, optimizer)
    if optimizer is not None:
        _move_state(optimizer)
    layout = layout or WeightLayout(model)
    device.check_settings(attention=plan.attention, norms=plan.norms, layout=plan.layout)
    layout.use(plan.layout, optimizer)
    return layout


def _move_state(optimizer: Optimizer) -> None:
    """Move state that an optimizer creates in its constructor, as Adagrad does, to the device of each parameter."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and isinstance(state, dict):
            # Scalar state is a step count, and the kernels determine which device it belongs on.
            moved = {k: v.to(parameter.device) for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
            state.update(moved)


def make_strategy(model: nn.Module, group: RankGroup, plan: Plan, device: AbstractDevice) -> ParallelStrategy:
    """Return the strategy that distributes the model over the ranks. All ranks start with the weights of rank 0."""
    if group.is_single_process:
        return ParallelStrategy()
    group.broadcast_model(model)
    if plan.sharding == "full":
        # Imported only when needed: FSDP loads a large part of torch.
        from whet.distributed.sharded import ShardedStrategy

        return ShardedStrategy(model, group, blocks=find_blocks(model), kind=device.kind)
    bucket_mb = float(plan.bucket_mb) if isinstance(plan.bucket_mb, int) else _DEFAULT_BUCKET_MB
    return ReplicatedStrategy(model, group, bucket_mb=bucket_mb)


def build_stepper(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    device: AbstractDevice,
    *,
    clip: float | None = None,
    has_ema: bool = False,
    strategy: ParallelStrategy | None = None,
    other_parameters: Sequence[nn.Parameter] = (),
    keeps_kernels: bool = False,
) -> tuple[Stepper, list[float]]:
    """Build the stepper, and the optimizer unless the user passed one. Return the stepper and the base learning rates.

    A user's optimizer gets the planned kernels unless `keeps_kernels` is set.
    """
    strategy, restore_kernels = strategy or ParallelStrategy(), None
    graphs, graph_obstacle = _open_graphs(plan, device, is_single_process=strategy.is_single_process)
    if isinstance(optimizer, OptimizerChoice):
        choice = optimizer
        optimizer = build_optimizer(
            choice, model, device, kernels=plan.optimizer_kernels, is_captured=graphs is not None
        )
        base_rates = choice.base_rates(optimizer)
    else:
        base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        if plan.optimizer_kernels != "yours" and not keeps_kernels:
            restore_kernels = save_kernels(optimizer)
            set_kernels(optimizer, plan.optimizer_kernels, is_captured=graphs is not None)
    # Checked after the optimizer is built, because the result depends on whether it is fused.
    if plan.loss_scaling == "dynamic":
        device.check_loss_scaling(optimizer)
    options: dict[str, Any] = {
        "precision": plan.precision,
        "loss_scaling": plan.loss_scaling,
        "clip": clip,
        "ema": Ema(model) if has_ema else None,
        "strategy": strategy,
        "other_parameters": other_parameters,
    }
    if graphs is None:
        stepper = Stepper(model, optimizer, device, **options)
    else:
        is_compiled = plan.compile != "off"
        stepper = GraphedStepper(
            model,
            optimizer,
            device,
            graphs=graphs,
            is_compiled=is_compiled,
            only_if_launch_bound=plan.graph == "launch_bound",
            **options,
        )
    stepper.graph_obstacle = graph_obstacle
    stepper.restore_kernels = restore_kernels
    return stepper, base_rates


def _open_graphs(
    plan: Plan, device: AbstractDevice, *, is_single_process: bool
) -> tuple[AbstractGraphs | None, str | None]:
    """Return the device's graph capture, or None and the reason why a plan that uses graphs gets none."""
    if plan.graph == "off":
        return None, None
    if not is_single_process:
        return None, "ranks wait for each other in a step, which no graph can do"
    if plan.activation_checkpointing == "on":
        return None, "activation checkpointing restores generators, which no graph can do"
    graphs = device.graphs()
    return graphs, None if graphs is not None else f"{device.kind} cannot capture a step"


def set_process_settings(plan: Plan, device: AbstractDevice) -> None:
    """Set the number of threads and the precision of float32 matrix products, which are global to the process."""
    if isinstance(plan.threads, int):
        set_num_threads(plan.threads)
    device.use_precision(plan.precision)


@contextmanager
def apply_kernels(plan: Plan, model: nn.Module, device: AbstractDevice) -> Iterator[None]:
    """Use the planned kernels and causal masks, and split products that the device would compute wrongly."""
    with (
        deterministic(plan.deterministic == "on"),
        use_explicit_masks() if plan.causal_mask == "explicit" else nullcontext(),
        device.use_kernels(attention=plan.attention, norms=plan.norms),
        split_large_heads(plan, model),
    ):
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
    """Apply a plan inside the `with` block: layout, threads, precision, kernels, masks, checkpointing and compilation.

    The caller creates `compiled`, so that compiled code is reused when the plan is applied again.
    """
    layout.use(plan.layout, optimizer)
    set_process_settings(plan, device)
    with ExitStack() as stack:
        stack.enter_context(apply_kernels(plan, model, device))
        if plan.activation_checkpointing == "on":
            stack.enter_context(checkpoint_activations(model))
        if plan.lengths == "unpadded":
            stack.enter_context(Unpadding(model).in_use())
        if compiled is not None:
            stack.enter_context(compiled.in_use())
        yield
