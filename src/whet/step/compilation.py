"""Compiled calls of a model, its blocks and its loss function.

The model stays the same object with the same names, weights and hooks, and uses compiled code only inside a context.
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from whet.base.errors import WhetError
from whet.data.batch import MicroBatch, micro_batch_shapes
from whet.device.abstract import AbstractDevice
from whet.device.environment import configure_compile_cache
from whet.device.rng import get_host_rng, get_torch_rng, set_host_rng, set_torch_rng
from whet.plan.plan import Plan
from whet.step.model_contexts import find_blocks, has_batch_statistics
from whet.step.rollback import BufferSnapshot, release_traceback

_DYNAMIC_LENGTHS = ("sorted", "packed", "packed_bucketed")
"""Values of `lengths` that produce too many shapes to compile each one separately."""
_COMPILER_MODULES = ("torch._dynamo", "torch._inductor")
"""Modules whose errors mean that the compiler failed rather than the model."""
_CPP_ERROR_WORDS = ("C++", "Cxx", "Cpp")
"""Words in errors about a missing C++ compiler."""
_LOSS_OF_MODEL = "the model computes the loss"
"""The decision not to compile a loss that is an output of the model."""


def compile_obstacle(model: nn.Module, plan: Plan) -> str | None:
    """Return the reason why this model cannot be compiled under this plan; None if it can."""
    if plan.activation_checkpointing == "on" and has_batch_statistics(model):
        return (
            "activation_checkpointing=on recomputes blocks with BatchNorm without updating their statistics twice, and "
            "torch's compiler cannot do that"
        )
    return None


def num_graphs() -> int:
    """Return the number of graphs that torch.compile has produced in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


class CompiledCalls:
    """Compiled calls of a model and its loss, or of the model's blocks, active inside `in_use`.

    The modules remain the same objects.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        configure_compile_cache()
        modules = find_blocks(model) if plan.compile == "blocks" else [model]
        if not modules:
            raise WhetError(
                "this model has no blocks to compile",
                got=type(model).__name__,
                try_="an nn.ModuleList or nn.Sequential of blocks, or compile=on for the whole model",
            )
        # By default, torch compiles for the first length and then again for dynamic lengths. Start with dynamic
        # lengths.
        is_dynamic = True if plan.workload.lengths_vary and plan.lengths in _DYNAMIC_LENGTHS else None
        self._calls = [
            (module, module._compiled_call_impl, _compiled_call(module, is_dynamic, plan.attention))
            for module in modules
        ]
        self._model = model
        self.loss = CompiledLoss(model, is_dynamic, plan.attention) if plan.compile == "on" else None
        self._cache_tag = "" if plan.attention == "torch" else f"attention={plan.attention}"

    @property
    def loss_decision(self) -> str:
        """Whether and why the loss is not compiled, as a text for `use_loss_decision`."""
        if self.loss is None:
            return _LOSS_OF_MODEL
        return self.loss.obstacle or ""

    def use_loss_decision(self, decision: str) -> None:
        """Repeat a decision of `settle_loss` without calling the loss, which may draw numbers or keep counts."""
        if decision == _LOSS_OF_MODEL:
            self.loss = None
        elif self.loss is not None:
            self.loss.obstacle = decision or None

    def settle_loss(
        self, loss: Callable[[MicroBatch], Any], micro: MicroBatch, device: AbstractDevice, *, precision: str
    ) -> None:
        """Decide whether the loss function is compiled with the model. Call this once, before the first use.

        It is not if the model itself computes the loss, as in transformers: that gains nothing. Nor is it if torch
        cannot trace it, or compiles it again for the same micro-batch. A step in the middle of a run would then switch
        to other code, and a resumed run would switch at another step. The loss is called up to three times; the buffers
        of the model and the generators are restored.
        """
        if self.loss is None:
            return
        micro = micro.map_tensors(device.put)
        buffers, rng, host_rng = BufferSnapshot(self._model), get_torch_rng(device), get_host_rng()
        try:
            with device.compute_context(), device.autocast(precision):
                if _computes_loss(self._model, loss, micro):
                    self.loss = None
                    return
                with self.in_use():
                    loss(micro)
                    loss(micro)
            if self.loss.is_recompiled and self.loss.obstacle is None:
                self.loss.obstacle = "torch compiles it again in each call: it depends on a Python value that changes"
        except Exception as error:
            # If the first step fails as well, it raises the error.
            release_traceback(error)
        finally:
            buffers.restore()
            set_torch_rng(rng, device)
            set_host_rng(host_rng)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make the modules and the loss run their compiled code inside the `with` block."""
        for module, _, call in self._calls:
            module._compiled_call_impl = call
        before_loss = _losses.get(id(self._model))
        _losses[id(self._model)] = self.loss
        try:
            with self._separate_caches():
                yield
        finally:
            _losses[id(self._model)] = before_loss
            if before_loss is None:
                del _losses[id(self._model)]
            for module, before, _ in self._calls:
                module._compiled_call_impl = before

    def _separate_caches(self) -> AbstractContextManager[object]:
        """Return a context whose compiled code is cached apart from that of other attention kernels.

        Attention kernels are chosen while the model is traced, and torch's keys do not contain them (torch 2.13).
        """
        if not self._cache_tag:
            return nullcontext()
        config: Any = torch.compiler.config
        separate: AbstractContextManager[object] = config.patch(cache_key_tag=config.cache_key_tag + self._cache_tag)
        return separate


_losses: dict[int, "CompiledLoss | None"] = {}
"""The compiled losses in use, by the id of their model."""


def compiled_loss(model: nn.Module) -> "CompiledLoss | None":
    """Return the compiled loss that is in use for a model; None if its loss runs eagerly."""
    return _losses.get(id(model))


def _computes_loss(model: nn.Module, loss: Callable[[MicroBatch], Any], micro: MicroBatch) -> bool:
    """Return whether the loss is an output of the model, by calling it."""
    outputs: list[Any] = []
    hook = model.register_forward_hook(lambda _model, _inputs, output: outputs.extend(_values(output)))
    try:
        with torch.no_grad():
            returned = loss(micro)
    finally:
        hook.remove()
    return any(value is output for value in _values(returned) for output in outputs)


def _values(output: Any) -> list[Any]:
    return list(output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output])


class CompiledLoss:
    """Calls a loss function as one piece of compiled code with the model that it calls.

    The compiler then fuses the loss with the last layers, and keeps fewer activations for the backward pass. If torch
    cannot trace the loss as a whole, `obstacle` holds the reason, and only the calls of the model are compiled.
    """

    def __init__(self, model: nn.Module, is_dynamic: bool | None, attention: str) -> None:
        self.obstacle: str | None = None
        self.is_recompiled = False
        """Whether torch has compiled the loss again for shapes that it had compiled it for."""
        self._compiled_for: set[Hashable] = set()
        self._model, self._is_dynamic = model, is_dynamic
        # torch does not check the attention kernel before it reuses compiled code (torch 2.13).
        self._key = type(model), tuple(parameter.shape for parameter in model.parameters()), attention
        self._calls: dict[Hashable, Callable[..., Any]] = {}
        """Compiled callers, by the code of the loss function."""

    def __call__(self, micro: MicroBatch, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)` for the data of a micro-batch."""
        if self.obstacle is not None:
            return function(*args)
        code: Any = getattr(function, "__code__", type(function))
        if (call := self._calls.get(code)) is None:
            call = torch.compile(_caller((*self._key, code)), fullgraph=True, dynamic=self._is_dynamic)
            self._calls[code] = call
        num_before = num_graphs()
        try:
            returned = call(function, *args)
        except Exception as error:
            if not type(error).__module__.startswith(_COMPILER_MODULES):
                raise
            # Raises the user's own error, if that was the cause.
            returned = function(*args)
            self.obstacle = _compile_error_text(error)
            return returned
        if num_graphs() != num_before:
            key = code, self._model.training, torch.is_grad_enabled(), micro_batch_shapes(micro)
            self.is_recompiled = self.is_recompiled or key in self._compiled_for
            self._compiled_for.add(key)
        return returned


_callers: dict[Hashable, Callable[..., Any]] = {}


def _caller(key: Hashable) -> Callable[..., Any]:
    """Return a function that calls its first argument with the others, and whose code is that of this key only.

    torch keeps compiled code, and counts how often it compiles, by code object. Models of one architecture, such as the
    trials of a search, share theirs.
    """
    if key not in _callers:

        def call(function: Callable[..., Any], *args: Any) -> Any:
            return function(*args)

        call.__code__ = call.__code__.replace(co_name=f"loss_{len(_callers)}")
        _callers[key] = call
    return _callers[key]


def _compiled_call(module: nn.Module, is_dynamic: bool | None, attention: str) -> Any:
    before = module._compiled_call_impl
    if attention != "torch" or type(module).__module__.startswith("torch.nn.") or "forward" in module.__dict__:
        # The compiler skips modules of torch.nn, such as nn.Sequential, and forward methods set on an instance, as in
        # checkpointed blocks. A function around the call makes it trace them. It reads `attention`, because torch
        # would reuse the code for other attention kernels, which it does not check (torch 2.13).
        def call_module(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs) if attention else None

        compiled: Any = torch.compile(call_module, dynamic=is_dynamic)
    else:
        module.compile(dynamic=is_dynamic)
        compiled, module._compiled_call_impl = module._compiled_call_impl, before

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            if not type(error).__module__.startswith(_COMPILER_MODULES):
                raise
            reason = _compile_error_text(error)
            lacks_compiler = any(word in reason for word in _CPP_ERROR_WORDS)
            hint = "; on a CPU compiling needs a C++ compiler (g++, Xcode's tools)" if lacks_compiler else ""
            raise WhetError("the model could not be compiled", got=reason, try_=f"compile=off{hint}") from error

    return call


def _compile_error_text(error: Exception) -> str:
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return "torch has compiled it for too many shapes or values"
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("Set TORCH"))[:300]
