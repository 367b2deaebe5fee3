"""Temporary changes to a model: activation checkpointing, split heads, layout, deterministic kernels.

The model stays the same object with the same names, weights and hooks, and every change is undone on exit.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from whet.base.errors import UsageError, WhetError
from whet.plan.plan import Plan
from whet.plan.warnings import ROW_LIMIT


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the children of its outermost ModuleLists, or else of its Sequentials."""
    for kind in (nn.ModuleList, nn.Sequential):
        children = (block for group in _outermost(model, kind) for block in group.children())
        blocks = list(dict.fromkeys(children))
        if any(True for block in blocks for _ in block.parameters()):
            return blocks
    return []


def _outermost(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    if isinstance(module, kind):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, kind)


@contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """Allow only deterministic kernels inside the `with` block, or all kernels.

    If only deterministic kernels are allowed, torch raises for an operator that has none.
    """
    before = _deterministic_flags()
    if is_on != before[0]:
        # This may also switch the flag off: if the flag is on, the plan is "off" only by the user's override.
        torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        # Setting the flag takes 100 us (torch 2.13), and a measurement does this for every step.
        if _deterministic_flags() != before:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _deterministic_flags() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


# --- activation checkpointing ----------------------------------------------------------------------------------------


@contextmanager
def checkpoint_activations(model: nn.Module) -> Iterator[None]:
    """Keep only the inputs of blocks and recompute their activations in the backward pass.

    The recomputation restores the random generators, so dropout masks and gradients are unchanged.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise WhetError(
            "this model has no blocks whose activations could be recomputed",
            got=type(model).__name__,
            try_="an nn.ModuleList or nn.Sequential of blocks, or a smaller micro_batch",
        )
    before = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        recomputed = partial(checkpoint, block.forward, use_reentrant=False)
        # Use a context function only if needed, because torch cannot compile a checkpoint that has one.
        block.forward = partial(recomputed, context_fn=partial(_contexts, block)) if _batch_norms(block) else recomputed
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            # Deleting the attribute restores the forward method of the class. A forward that the user had set is put
            # back.
            del block.forward
            if own is not None:
                block.forward = own


def without_recomputation(forward: Any) -> Any:
    """Return the forward function of a block as it was before `checkpoint_activations`; any other value unchanged."""
    return forward.args[0] if isinstance(forward, partial) and forward.func is checkpoint else forward


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether a block has running statistics, which a recomputation must not update a second time."""
    return any(_batch_norms(block) for block in find_blocks(model))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts for the first pass and for the recomputation, which must not update running statistics."""
    return nullcontext(), _freeze_statistics(block)


@contextmanager
def _freeze_statistics(block: nn.Module) -> Iterator[None]:
    norms = _batch_norms(block)
    before = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: b if b is None else b.clone() for name, b in norm._buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)


def _batch_norms(block: nn.Module) -> list[nn.Module]:
    return [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


# --- split output layers ----------------------------------------------------------------------------------------------


def large_heads(plan: Plan, model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers, by name, whose backward pass gives wrong gradients on the planned device.

    The gradient of a layer's input is a product that sums over the layer's outputs. On M1 and M2 with torch before
    2.14, such sums are wrong over more than 32,768 outputs (pytorch#177116), as in the output layer of a language
    model.
    """
    if "linear-rows" not in plan.hazards:
        return {}
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    # A subclass that overrides forward may compute something other than a plain product.
    return {
        name: linear
        for name, linear in linears
        if linear.out_features > ROW_LIMIT
        and type(linear).forward is nn.Linear.forward
        and "forward" not in linear.__dict__
    }


@contextmanager
def split_large_heads(plan: Plan, model: nn.Module) -> Iterator[None]:
    """Compute `large_heads` in slices of their outputs inside the `with` block. This costs one copy of the outputs."""
    heads: list[nn.Module] = [*large_heads(plan, model).values()]
    for head in heads:
        head.forward = partial(_linear_in_pieces, head)
    try:
        yield
    finally:
        for head in heads:
            del head.forward


def _linear_in_pieces(head: Any, x: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return functional.linear(x, head.weight, head.bias)
    weights = head.weight.split(ROW_LIMIT)
    biases = [None] * len(weights) if head.bias is None else head.bias.split(ROW_LIMIT)
    pieces = [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return torch.cat(pieces, dim=-1)


# --- memory format of weights ----------------------------------------------------------------------------------------
# Fused optimizer kernels on the CPU ignore strides (torch 2.13). State in a different layout would silently be applied
# to the wrong weights, so state always follows the layout of its parameter.

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class WeightLayout:
    """A switch between the original memory format of the weights and channels_last.

    With `keep_addresses`, weights return to the same address when a layout is used again, which captured steps require.
    This takes memory for both layouts.
    """

    def __init__(self, model: nn.Module, *, keep_addresses: bool = False) -> None:
        parameters = list(model.parameters())
        owners = Counter(parameter.untyped_storage().data_ptr() for parameter in parameters)
        # Skip parameters that share memory, because a copy would no longer share it.
        alone = (parameter for parameter in parameters if owners[parameter.untyped_storage().data_ptr()] == 1)
        self._original = [(p, p.stride()) for p in alone if p.dim() in _CHANNELS_LAST and _is_dense(p)]
        self._memory: dict[tuple[int, tuple[int, ...]], Tensor] | None = {} if keep_addresses else None

    def use(self, layout: str, optimizer: Optimizer | None = None) -> None:
        """Switch the weights and their optimizer state to a layout. "contiguous" is the original layout."""
        if layout == "channels_last" and not self._original:
            raise UsageError(
                "channels_last is a layout of convolutions",
                got="a model without weights of four or five dimensions",
                try_="layout=contiguous",
            )
        for parameter, stride in self._original:
            self._lay_out(parameter, _channels_last_stride(parameter) if layout == "channels_last" else stride)
        if optimizer is not None:
            for parameter, _ in self._original:
                align_state(parameter, optimizer.state.get(parameter, {}))

    @torch.no_grad()
    def _lay_out(self, parameter: Tensor, stride: tuple[int, ...]) -> None:
        if parameter.stride() == stride:
            return
        old = parameter.data
        new = None if self._memory is None else self._memory.get((id(parameter), stride))
        if new is None or (new.device, new.dtype) != (old.device, old.dtype):
            new = old.new_empty_strided(old.shape, stride)
        parameter.data = new.copy_(old)
        if parameter.grad is not None:
            parameter.grad = _laid_out_like(parameter.grad, parameter)
        if self._memory is not None:
            self._memory |= {(id(parameter), old.stride()): old, (id(parameter), stride): new}


def align_state(parameter: Tensor, state: dict[str, Any]) -> None:
    """Convert the optimizer state of a parameter to the layout of the parameter, in place."""
    for value in state.values():
        # The momentum of sparse gradients is sparse.
        is_dense = isinstance(value, Tensor) and value.layout is torch.strided
        if is_dense and value.shape == parameter.shape and value.stride() != parameter.stride():
            value.data = _laid_out_like(value, parameter)


def _channels_last_stride(parameter: Tensor) -> tuple[int, ...]:
    memory_format = _CHANNELS_LAST[parameter.dim()]
    if parameter.is_contiguous(memory_format=memory_format):
        return parameter.stride()
    return torch.empty_like(parameter, device="meta", memory_format=memory_format).stride()


def _laid_out_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of the tensor with the strides of the parameter."""
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _is_dense(parameter: Tensor) -> bool:
    """Return whether the elements neither overlap nor leave gaps, so that changing the layout only reorders them."""
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()
