"""Kernels for the user's optimizer: fused, where torch has fused kernels and the user made no choice.

The update rule, parameters, groups and state remain the user's. Only the flags that select kernels change, and they are
restored when the session ends.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)
from torch.utils.hooks import RemovableHandle

_FLAGS = ("fused", "foreach", "capturable", "differentiable")
_ATTRIBUTES = (
    "_step_supports_amp_scaling",
    "_need_device_dtype_check_for_fused",
    "_warned_capturable_if_run_uncaptured",
)
"""Attributes that torch sets in the constructor of a fused or capturable optimizer."""

_HOOKED_STEP = Optimizer.profile_hook_step(lambda _: None).__code__
"""The code that torch puts around the `step` of each optimizer class: a label for profilers, and loops over hooks."""
_watch_ids: set[int] = set()
"""The hooks of `watch_updates`, which do not need to see the updates of whet's own steps."""


def watch_updates(hook: Callable[..., None]) -> RemovableHandle:
    """Call `hook` after each step of an optimizer, except after some that whet runs."""
    handle = register_optimizer_step_post_hook(hook)
    _watch_ids.add(handle.id)
    return handle


def update(optimizer: Optimizer) -> None:
    """Call `optimizer.step()`, without the label and the loops over hooks if nothing uses them.

    They take 7 us, and about 50 us after kernels that have replaced them in the processor's caches.
    """
    step: Any = type(optimizer).step
    if (
        getattr(step, "__code__", None) is _HOOKED_STEP
        # Schedulers of torch replace the method of the object.
        and "step" not in vars(optimizer)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not _global_optimizer_pre_hooks
        and _global_optimizer_post_hooks.keys() <= _watch_ids
        and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    ):
        step.__wrapped__(optimizer)
    else:
        optimizer.step()


def kernel_obstacle(optimizer: Optimizer, model: nn.Module) -> str | None:
    """Return the reason why an optimizer keeps its own kernels; None if fused kernels may be used."""
    name = type(optimizer).__name__
    if not is_of_torch(optimizer):
        # A subclass may compute a different update.
        return f"your {name} has no fused kernels"
    if "fused" not in optimizer.defaults:
        return f"{name} has no fused kernels"
    if not all(_is_choice_open(group) for group in optimizer.param_groups):
        return f"you chose the kernels of {name}"
    if has_step_hooks(optimizer):
        return f"{name} has hooks"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(not p.is_floating_point() or p.is_sparse for p in parameters):
        return "fused kernels update only dense real parameters"
    if not all(_is_dense(p) for p in parameters):
        return "fused kernels ignore the gaps in a parameter that is a view"
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        return "fused kernels do not support sparse gradients"
    return None


def gradient_obstacle(optimizer: Optimizer, parameters: Sequence[Tensor], *, is_resumed: bool = False) -> str | None:
    """Return the reason why fused kernels would fail on these gradients or later ones; None if they would work.

    On the CPU, torch's fused kernels read a gradient as if it had the strides of its parameter (torch 2.13). Pass
    `is_resumed=True` if earlier steps of the run have used fused kernels.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if any(gradient.is_sparse for _, gradient in gradients):
        return "fused kernels do not support sparse gradients"
    if not all(_has_same_layout(parameter, gradient) for parameter, gradient in gradients):
        return "fused kernels need gradients in the memory layout of their parameters"
    if type(optimizer) is SGD and not _can_start_momentum(optimizer, is_resumed=is_resumed):
        return "fused SGD starts the momentum of all parameters in the same step"
    return None


def _can_start_momentum(optimizer: Optimizer, *, is_resumed: bool) -> bool:
    """Return whether fused SGD can start the momentum that is missing.

    It fails if only some momentum buffers exist, for example after a layer is unfrozen.
    """
    parameters = [p for group in optimizer.param_groups if group["momentum"] for p in group["params"]]
    has_started = [optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in parameters]
    if is_resumed and any(has_started):
        # The uninterrupted run stays with its fused kernels when a layer is frozen or replaced. Switching here would
        # round differently, so only a step that would fail in both is an obstacle.
        now = {begun for p, begun in zip(parameters, has_started, strict=True) if p.grad is not None}
        return len(now) < 2
    return all(has_started) or (not any(has_started) and all(p.grad is not None for p in parameters))


def set_kernels(optimizer: Optimizer, kernels: str, *, is_captured: bool) -> None:
    """Select fused, foreach or for-loop kernels. With `is_captured`, all per-step values are kept on the device."""
    is_fused = kernels == "fused"
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = is_fused, kernels == "foreach"
        if "capturable" in group:
            group["capturable"] = is_captured
    if is_fused:
        # The loss scaler reads the first attribute. The second one makes torch check devices and dtypes once.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    # torch warns about eager steps of a capturable optimizer. Here, they are intended: they precede a capture.
    optimizer._warned_capturable_if_run_uncaptured = True
    _place_step_counts(optimizer)


def save_kernels(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that restores the optimizer's current choice of kernels."""
    missing: Any = object()
    flags = [{flag: group[flag] for flag in _FLAGS if flag in group} for group in optimizer.param_groups]
    attributes = {name: vars(optimizer).get(name, missing) for name in _ATTRIBUTES}

    def restore() -> None:
        # A group that was added later has no saved flags and keeps its own.
        for group, saved in zip(optimizer.param_groups, flags, strict=False):
            group.update(saved)
        for name, value in attributes.items():
            if value is missing:
                vars(optimizer).pop(name, None)
            else:
                setattr(optimizer, name, value)
        _place_step_counts(optimizer)

    return restore


def replicate(optimizer: Optimizer) -> Optimizer:
    """Return a copy of a torch optimizer over the same parameters, with separate groups and state.

    Several plans can then alternate on one model: each has its own kernels, and the addresses of its state do not
    change. Other optimizers are returned unchanged, because they may keep state anywhere.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return optimizer
    replica: Optimizer = object.__new__(type(optimizer))
    vars(replica).update(vars(optimizer))
    # A torch scheduler replaces this method with one that updates the original.
    vars(replica).pop("step", None)
    replica.param_groups = [_clone_tensors(group) for group in optimizer.param_groups]
    replica.state = defaultdict(dict, {key: _clone_tensors(state) for key, state in optimizer.state.items()})
    return replica


def _clone_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def _place_step_counts(optimizer: Optimizer) -> None:
    """Move the step counts to where torch keeps them: the device for fused and capturable kernels, else the CPU."""
    for group in optimizer.param_groups:
        is_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            count = state.get("step") if isinstance(state, dict) else None
            if isinstance(count, Tensor):
                state["step"] = count.to(parameter.device if is_on_device else torch.device("cpu"))


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run before or after each update."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether the class of an optimizer is torch's own, and no subclass with its name."""
    kind = type(optimizer)
    return getattr(torch.optim, kind.__name__, None) is kind


def _is_choice_open(group: dict[str, Any]) -> bool:
    """Return whether the user set none of the flags that select kernels, or asked for fused ones.

    Fused kernels compute the same bits if they are capturable, but torch refuses to capture them without the flag.
    """
    is_open = group.get("fused") is None and group.get("foreach") is None
    return bool(is_open or group.get("fused")) and not group.get("capturable") and not group.get("differentiable")


def _has_same_layout(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of the same shape have the same memory layout."""
    strides = zip(first.shape, first.stride(), second.stride(), strict=True)
    # The stride of a dimension of size 1 has no meaning. It differs for 1 x 1 convolutions in channels_last.
    return all(size == 1 or one == other for size, one, other in strides)


def _is_dense(parameter: Tensor) -> bool:
    # A new tensor with preserve_format has the same strides only if there are no gaps or overlaps.
    return parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() == parameter.stride()
