"""What holds while a run trains, and is put back afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from whet.base.errors import WhetError
from whet.device.environment import before_compiling
from whet.plan.plan import Plan
from whet.step.blocks import find_blocks
from whet.step.recompute import has_statistics

_MANY_SHAPES = ("sorted", "packed", "packed few")
"""How lengths are handled where steps have more shapes than are worth compiling one by one."""
_COMPILER = ("torch._dynamo", "torch._inductor")
"""Whose errors say that compiling failed, and not the model."""
_ABOUT_CPP = ("C++", "Cxx", "Cpp")
"""Words of errors about the compiler that torch's own calls."""


def cannot_compile(model: nn.Module, plan: Plan) -> str | None:
    """Why this model runs as it is written whatever the plan says, if so."""
    if plan.value("activation_checkpointing") == "on" and has_statistics(model):
        return (
            "activation_checkpointing=on computes blocks with BatchNorm again without counting them twice, and torch's "
            "compiler cannot do that"
        )
    return None


class Compiled:
    """Calls through torch.compile, to be used for a while; model and blocks stay the same objects."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        before_compiling()
        parts = find_blocks(model) if plan.value("compile") == "blocks" else [model]
        if not parts:
            raise WhetError(
                "this model has no blocks to compile",
                got=type(model).__name__,
                try_="an nn.ModuleList or nn.Sequential of blocks, or compile=on for the whole model",
            )
        # Left to itself torch compiles for the first length, then again for any length.
        is_dynamic = True if plan.workload.lengths_vary and plan.value("lengths") in _MANY_SHAPES else None
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
            if not type(error).__module__.startswith(_COMPILER):
                raise
            reason = _reason(error)
            lacks_compiler = any(word in reason for word in _ABOUT_CPP)
            hint = "; on a CPU compiling needs a C++ compiler (g++, Xcode's tools)" if lacks_compiler else ""
            raise WhetError("the model could not be compiled", got=reason, try_=f"compile=off{hint}") from error

    return call


def _reason(error: Exception) -> str:
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
