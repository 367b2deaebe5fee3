"""Contexts that apply a plan to a model while it trains, and undo it afterwards."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from whet.base.errors import UsageError, WhetError
from whet.device.environment import configure_compile_cache
from whet.plan.plan import Plan


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: what the outermost lists of modules hold, else what the outermost sequences do."""
    for kind in (nn.ModuleList, nn.Sequential):
        found = (block for group in _outermost(model, kind) for block in group.children())
        blocks = list(dict.fromkeys(found))
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
def checkpoint_activations(model: nn.Module) -> Iterator[None]:
    """While entered, only the inputs of blocks are kept. The model stays the user's: no name and no weight changes.

    Draws are repeated too, so that dropout is the same in both passes and the gradient stays what it was.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise WhetError(
            "this model has no blocks whose activations could be computed again",
            got=type(model).__name__,
            try_="an nn.ModuleList or nn.Sequential of blocks, or a smaller micro_batch",
        )
    before = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        # Only where it is needed: torch does not compile what has contexts of its own.
        again = partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = partial(again, context_fn=partial(_contexts, block)) if _batch_norms(block) else again
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            # The class's own forward shows again, or the one that the user had put before it.
            del block.forward
            if own is not None:
                block.forward = own


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether a block takes running statistics, which the repeated pass must leave alone."""
    return any(_batch_norms(block) for block in find_blocks(model))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For the first pass and for the repeated one, which must not count in running statistics again."""
    return nullcontext(), _freeze_statistics(block)


@contextmanager
def _freeze_statistics(block: nn.Module) -> Iterator[None]:
    norms = _batch_norms(block)
    kept = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: b if b is None else b.clone() for name, b in norm._buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)


def _batch_norms(block: nn.Module) -> list[nn.Module]:
    return [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


_DYNAMIC_LENGTHS = ("sorted", "packed", "packed few")
"""How lengths are handled where steps have more shapes than are worth compiling one by one."""
_COMPILER_MODULES = ("torch._dynamo", "torch._inductor")
"""Whose errors say that compiling failed, and not the model."""
_CPP_ERROR_WORDS = ("C++", "Cxx", "Cpp")
"""Words of errors about the compiler that torch's own calls."""


def compile_obstacle(model: nn.Module, plan: Plan) -> str | None:
    """Why this model runs as it is written whatever the plan says, if so."""
    if plan.activation_checkpointing == "on" and has_batch_statistics(model):
        return (
            "activation_checkpointing=on computes blocks with BatchNorm again without counting them twice, and torch's "
            "compiler cannot do that"
        )
    return None


class CompiledCalls:
    """Calls through torch.compile, to be used for a while; model and blocks stay the same objects."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        configure_compile_cache()
        parts = find_blocks(model) if plan.compile == "blocks" else [model]
        if not parts:
            raise WhetError(
                "this model has no blocks to compile",
                got=type(model).__name__,
                try_="an nn.ModuleList or nn.Sequential of blocks, or compile=on for the whole model",
            )
        # Left to itself torch compiles for the first length, then again for any length.
        is_dynamic = True if plan.workload.lengths_vary and plan.lengths in _DYNAMIC_LENGTHS else None
        self._parts = [(part, part._compiled_call_impl, _compiled_call(part, is_dynamic)) for part in parts]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        for part, _, call in self._parts:
            part._compiled_call_impl = call
        try:
            yield
        finally:
            for part, before, _ in self._parts:
                part._compiled_call_impl = before


def _compiled_call(part: nn.Module, is_dynamic: bool | None) -> Any:
    before = part._compiled_call_impl
    if type(part).__module__.startswith("torch.nn.") or "forward" in part.__dict__:
        # torch's compiler passes over calls of torch's own modules, such as nn.Sequential, but looks into ours; it also
        # passes over a forward that is not the class's own, as blocks that are computed again have.
        compiled: Any = torch.compile(lambda *words, **named: part._call_impl(*words, **named), dynamic=is_dynamic)
    else:
        part.compile(dynamic=is_dynamic)
        compiled, part._compiled_call_impl = part._compiled_call_impl, before

    def call(*words: Any, **named: Any) -> Any:
        try:
            return compiled(*words, **named)
        except Exception as error:
            if not type(error).__module__.startswith(_COMPILER_MODULES):
                raise
            reason = _compile_error_text(error)
            lacks_compiler = any(word in reason for word in _CPP_ERROR_WORDS)
            hint = "; on a CPU compiling needs a C++ compiler (g++, Xcode's tools)" if lacks_compiler else ""
            raise WhetError("the model could not be compiled", got=reason, try_=f"compile=off{hint}") from error

    return call


def _compile_error_text(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("Set TORCH"))[:300]


@contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """Only kernels that give the same bits each time, if asked for; an operator that has none fails by name."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if is_on:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class WeightLayout:
    """The layout of one model's weights: as it was found, or with channels last, and back.

    With `keep_addresses` weights lie in the same place whenever a layout comes again, as captured steps need it; that
    takes memory for both.
    """

    def __init__(self, model: nn.Module, *, keep_addresses: bool = False) -> None:
        parameters = list(model.parameters())
        owners = Counter(parameter.untyped_storage().data_ptr() for parameter in parameters)
        # Left as they are: parameters that share their memory, since they would no longer.
        alone = (parameter for parameter in parameters if owners[parameter.untyped_storage().data_ptr()] == 1)
        self._own = [(p, p.stride()) for p in alone if p.dim() in _CHANNELS_LAST and _is_dense(p)]
        self._places: dict[tuple[int, tuple[int, ...]], Tensor] | None = {} if keep_addresses else None

    def use(self, name: str, optimizer: Optimizer | None = None) -> None:
        """Lays the weights out; what an optimizer keeps for them follows. "contiguous" is as they were found."""
        if name == "channels_last" and not self._own:
            raise UsageError(
                "channels_last is a layout of convolutions",
                got="a model without weights of four or five dimensions",
                try_="layout=contiguous",
            )
        for parameter, stride in self._own:
            self._lay_out(parameter, _channels_last_stride(parameter) if name == "channels_last" else stride)
        if optimizer is not None:
            for parameter, _ in self._own:
                align_state(parameter, optimizer.state.get(parameter, {}))

    @torch.no_grad()
    def _lay_out(self, parameter: Tensor, stride: tuple[int, ...]) -> None:
        if parameter.stride() == stride:
            return
        memory = parameter.data
        place = None if self._places is None else self._places.get((id(parameter), stride))
        if place is None or (place.device, place.dtype) != (memory.device, memory.dtype):
            place = memory.new_empty_strided(memory.shape, stride)
        parameter.data = place.copy_(memory)
        if parameter.grad is not None:
            parameter.grad = _laid_out_like(parameter.grad, parameter)
        if self._places is not None:
            self._places |= {(id(parameter), memory.stride()): memory, (id(parameter), stride): place}


def align_state(parameter: Tensor, state: dict[str, Any]) -> None:
    """Lays out what an optimizer keeps for a parameter as the parameter itself; the objects stay the same."""
    for kept in state.values():
        if isinstance(kept, Tensor) and kept.shape == parameter.shape and kept.stride() != parameter.stride():
            kept.data = _laid_out_like(kept, parameter)


def _channels_last_stride(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a parameter with channels last."""
    memory_format = _CHANNELS_LAST[parameter.dim()]
    if parameter.is_contiguous(memory_format=memory_format):
        return parameter.stride()
    return torch.empty_like(parameter, device="meta", memory_format=memory_format).stride()


def _laid_out_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The same numbers as they would lie in the parameter."""
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _is_dense(parameter: Tensor) -> bool:
    """Whether every element has a place of its own, without gaps: only then is a layout a mere order."""
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()
