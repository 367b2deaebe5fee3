"""Undo a step that failed before its update, and plan for less memory."""

import traceback
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from whet.base.errors import InsufficientMemoryError
from whet.device.abstract import AbstractDevice
from whet.device.rng import get_host_rng, get_torch_rng, host_rng_equal, set_host_rng, set_torch_rng
from whet.plan.plan import Plan, with_runtime_changes, with_smaller_micro_batch
from whet.plan.setting import MeasuredSetting
from whet.step.model_contexts import find_blocks


class SavedBuffer(NamedTuple):
    """A buffer as it was."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    values: Tensor

    def has_changed(self) -> bool:
        """Whether it is another object or has other values; torch does not note all that kernels write."""
        if self.module._buffers.get(self.name) is not self.buffer or self.buffer._version != self.version:
            return True
        return not torch.equal(self.buffer, self.values)

    def put_back(self) -> None:
        """The same object with the same values again."""
        self.module._buffers[self.name] = self.buffer
        try:
            self.buffer.copy_(self.values)
        except RuntimeError:
            # One that shows the same numbers several times over cannot be written to.
            self.module._buffers[self.name] = self.values


class BufferSnapshot:
    """All buffers of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._objects = [(module, dict(module._buffers)) for module in model.modules()]
        self.kept = [
            SavedBuffer(module, name, buffer, buffer._version, buffer.detach().clone())
            for module, buffers in self._objects
            for name, buffer in buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Every buffer is the same object with the same values again; what was added since is taken away."""
        for module, buffers in self._objects:
            module._buffers.clear()
            module._buffers.update(buffers)
        for kept in self.kept:
            kept.put_back()

    def have_others_come(self) -> bool:
        """Whether buffers were added or taken away since."""
        return any(module._buffers.keys() != buffers.keys() for module, buffers in self._objects)


class StepRollback:
    """Keeps what one step after the other may change; cheap enough for every step."""

    def __init__(self, model: nn.Module, device: AbstractDevice) -> None:
        self._model = model
        self._device = device
        self._all: BufferSnapshot | None = None
        self._is_learnt = False
        self._volatile: list[tuple[nn.Module, str]] = []
        self._watched: list[SavedBuffer] = []
        self._kept: list[SavedBuffer] = []
        self._host = get_host_rng()
        self._is_host_in_use = True
        self._generators: tuple[Tensor, Tensor | None] | None = None

    def keep(self) -> None:
        """Before a step."""
        self._generators = None
        if self._is_host_in_use:
            self._host = get_host_rng()
        if not self._is_learnt:
            self._all = BufferSnapshot(self._model)
        else:
            self._kept = [
                SavedBuffer(module, name, buffer, buffer._version, buffer.detach().clone())
                for module, name in self._volatile
                if (buffer := module._buffers.get(name)) is not None
            ]
        self._generators = get_torch_rng(self._device)

    @property
    def writes_buffers(self) -> bool:
        """Whether the forward pass changes what the model remembers, as far as is known."""
        return bool(self._volatile)

    def learn(self) -> None:
        """After a step that was finished: the first one shows what steps change."""
        if self._is_learnt or self._all is None:
            return
        # Statistics may be frozen at first and written to later.
        is_volatile = [k.has_changed() or isinstance(k.module, nn.modules.batchnorm._NormBase) for k in self._all.kept]
        self._volatile = [(k.module, k.name) for k, changes in zip(self._all.kept, is_volatile, strict=True) if changes]
        self._watched = [k for k, changes in zip(self._all.kept, is_volatile, strict=True) if not changes]
        self._is_host_in_use = not host_rng_equal(self._host, get_host_rng())
        self._is_learnt = True

    @torch.no_grad()
    def put_back(self) -> bool:
        """After a step that failed before its update: undoes what it did. False if something changed unexpectedly."""
        if self._generators is None:
            # Memory ran out in `keep` itself: the step had not begun.
            return True
        set_torch_rng(self._generators, self._device)
        if self._is_host_in_use:
            set_host_rng(self._host)
        elif not host_rng_equal(self._host, get_host_rng()):
            return False
        assert self._all is not None
        if not self._is_learnt:
            self._all.put_back()
            return True
        for kept in self._kept:
            kept.put_back()
        return not self._all.have_others_come() and not any(kept.has_changed() for kept in self._watched)


def release_traceback(error: BaseException) -> str:
    """The first line of an error, once nothing is kept alive by it: frames in its traceback hold activations."""
    for raised in _error_chain(error):
        traceback.clear_frames(raised.__traceback__)
        raised.__traceback__ = None
    return (str(error).splitlines() or [type(error).__name__])[0]


def reduce_memory(
    plan: Plan, model: nn.Module, *, num_samples: int, step: int, problem: str, may_cut: bool = True
) -> Plan:
    """The plan with half the micro-batch, or with activations computed again; refuses where neither is left.

    `num_samples` is how many the step had. A model that remembers something of every forward pass, as BatchNorm does,
    may not be cut: that would change what it learns.
    """
    planned = plan.micro_batch
    assert isinstance(planned, int)
    micro = min(planned, num_samples)
    if micro > 1 and may_cut:
        reason = f"micro batch {planned} ran out of memory at step {step:,}"
        return with_smaller_micro_batch(plan, micro // 2, reason=reason, problem=problem)
    if plan.activation_checkpointing == "off" and find_blocks(model):
        reason = f"micro batch {micro} ran out of memory at step {step:,}"
        return with_runtime_changes(
            plan,
            {"activation_checkpointing": MeasuredSetting(value="on", reason=reason, evidence={"problem": problem})},
        )
    if micro > 1:
        raise InsufficientMemoryError(
            "a step of this model needs more memory than there is",
            got=f"micro batch {micro}: {problem}",
            try_=f"micro_batch={micro // 2}, if running statistics (BatchNorm's, say) may be taken over fewer samples; "
            "or a smaller global_batch_size",
        )
    raise InsufficientMemoryError(
        "not even one sample fits into memory", got=problem, try_="a smaller model, shorter samples, or precision=bf16"
    )


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        raised = waiting.pop()
        if id(raised) not in seen:
            seen.add(id(raised))
            yield raised
            waiting += [other for other in (raised.__cause__, raised.__context__) if other is not None]
