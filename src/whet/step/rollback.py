"""Roll back a step that failed before its update, and reduce the memory that a plan needs."""

import traceback
from collections.abc import Callable, Iterator
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
    """A buffer and a copy of its values."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    values: Tensor

    @classmethod
    def of(cls, module: nn.Module, name: str, buffer: Tensor) -> "SavedBuffer":
        """Copy the values of a buffer."""
        # A tensor made in inference mode counts no versions. Its copy must not be one either.
        with torch.inference_mode(mode=False):
            return cls(module, name, buffer, _version(buffer), buffer.detach().clone())

    def has_changed(self) -> bool:
        """Return whether the buffer was replaced or its values changed."""
        # Values are compared too, because some kernels do not update the version counter.
        if self.module._buffers.get(self.name) is not self.buffer or _version(self.buffer) != self.version:
            return True
        # torch cannot compare sparse tensors.
        return self.buffer.layout is not torch.strided or not torch.equal(self.buffer, self.values)

    def restore(self) -> None:
        """Restore the buffer object and its values."""
        self.module._buffers[self.name] = self.buffer
        try:
            self.buffer.copy_(self.values)
        except RuntimeError:
            # An expanded tensor cannot be written to, because its elements share memory.
            self.module._buffers[self.name] = self.values


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class BufferSnapshot:
    """A copy of all buffers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._objects = [(module, dict(module._buffers)) for module in model.modules()]
        self.saved = [
            SavedBuffer.of(module, name, buffer)
            for module, buffers in self._objects
            for name, buffer in buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every buffer and remove buffers that were added since."""
        for module, buffers in self._objects:
            if isinstance(module, torch.jit.ScriptModule):
                # Buffers of a TorchScript module cannot be added or removed.
                continue
            module._buffers.clear()
            module._buffers.update(buffers)
        for saved in self.saved:
            saved.restore()

    def has_new_names(self) -> bool:
        """Return whether buffers were added or removed."""
        return any(module._buffers.keys() != buffers.keys() for module, buffers in self._objects)


class StepRollback:
    """A copy of the state that forward and backward may change, so that a failed step can be repeated.

    Weights and optimizer state change only in the update; forward and backward change random generators and buffers.
    The first step shows which buffers change, and whether it draws from the generators of Python and NumPy. If anything
    else changes later, `restore` returns False.
    """

    def __init__(self, model: nn.Module, device: AbstractDevice) -> None:
        self._model = model
        self._device = device
        self.is_learned = False
        """Whether a completed step has shown what steps change."""
        self._all: BufferSnapshot | None = None
        """All buffers before the first step."""
        self._volatile: list[tuple[nn.Module, str]] = []
        """Buffers that steps change. They are saved before each step."""
        self._constant: list[SavedBuffer] = []
        """Buffers that steps are not expected to change."""
        self._saved: list[SavedBuffer] = []
        self._copies: list[tuple[list[Tensor], list[Tensor]]] | None = None
        """Saved values and their buffers, by device and dtype; None if they cannot be copied as lists."""
        self._host_rng = get_host_rng()
        self._uses_host_rng = True
        self._torch_rng: tuple[Tensor, Tensor | None] | None = None

    def save(self, torch_rng: Callable[[], tuple[Tensor, Tensor | None]] | None = None) -> None:
        """Save the state that a step may change, before it begins.

        `torch_rng` returns the states of torch's generators, if the caller has a cheaper way than to copy them.
        """
        # None marks an incomplete save. It is replaced last, after everything that may run out of memory.
        self._torch_rng = None
        if self._uses_host_rng:
            self._host_rng = get_host_rng()
        if not self.is_learned:
            self._all = BufferSnapshot(self._model)
        elif self._volatile:
            self._save_volatile()
        self._torch_rng = torch_rng() if torch_rng is not None else get_torch_rng(self._device)

    @torch.no_grad()
    def _save_volatile(self) -> None:
        """Copy the buffers that steps change, as lists: a ResNet-50 has 159, and on a GPU each copy is a launch."""
        current = [
            (module, name, buffer)
            for module, name in self._volatile
            if (buffer := module._buffers.get(name)) is not None
        ]
        if (
            self._copies is not None
            and len(current) == len(self._saved)
            and all(map(_is_same_buffer, self._saved, current))
        ):
            for values, buffers in self._copies:
                torch._foreach_copy_(values, buffers)
            return
        self._saved, self._copies = [SavedBuffer.of(*one) for one in current], None
        # A sparse or distributed buffer may change more than its values.
        if all(type(saved.buffer) is Tensor and saved.buffer.layout is torch.strided for saved in self._saved):
            groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
            for saved in self._saved:
                values, buffers = groups.setdefault((saved.buffer.device, saved.buffer.dtype), ([], []))
                values.append(saved.values)
                buffers.append(saved.buffer)
            self._copies = list(groups.values())

    @property
    def writes_buffers(self) -> bool:
        """Whether the forward pass is known to change buffers."""
        return bool(self._volatile)

    def learn(self) -> None:
        """Record which buffers and generators the first completed step has changed."""
        if self.is_learned or self._all is None:
            return
        for saved in self._all.saved:
            # Running statistics may be frozen in the first step and updated later.
            if saved.has_changed() or isinstance(saved.module, nn.modules.batchnorm._NormBase):
                self._volatile.append((saved.module, saved.name))
            else:
                self._constant.append(saved)
        self._uses_host_rng = not host_rng_equal(self._host_rng, get_host_rng())
        self.is_learned = True

    @torch.no_grad()
    def restore(self) -> bool:
        """Undo a step that failed before its update. Return False if state that was not saved has changed."""
        if self._torch_rng is None:
            # Memory ran out in `save`, before the step began.
            return True
        set_torch_rng(self._torch_rng, self._device)
        if self._uses_host_rng:
            set_host_rng(self._host_rng)
        elif not host_rng_equal(self._host_rng, get_host_rng()):
            return False
        assert self._all is not None
        if not self.is_learned:
            self._all.restore()
            return True
        for saved in self._saved:
            saved.restore()
        return not self._all.has_new_names() and not any(saved.has_changed() for saved in self._constant)


def _is_same_buffer(saved: SavedBuffer, current: tuple[nn.Module, str, Tensor]) -> bool:
    """Return whether a buffer is the tensor that was saved before, and still has its shape, dtype and device."""
    buffer, values = current[2], saved.values
    is_alike = buffer.shape == values.shape and buffer.dtype == values.dtype and buffer.device == values.device
    return saved.module is current[0] and saved.name == current[1] and saved.buffer is buffer and is_alike


def release_traceback(error: BaseException) -> str:
    """Clear the local variables in the frames of an exception, because they hold activations. Return its first line."""
    for raised in _error_chain(error):
        # Local variables of these frames hold activations, which must be freed before the step is repeated.
        traceback.clear_frames(raised.__traceback__)
        raised.__traceback__ = None
    return (str(error).splitlines() or [type(error).__name__])[0]


def reduce_memory(
    plan: Plan, model: nn.Module, *, num_samples: int, step: int, problem: str, whole_reason: str | None = None
) -> Plan:
    """Return the plan with half the micro-batch size, or with activation checkpointing. Raise if neither is possible.

    `num_samples` is the batch size of the failed step. `whole_reason` is the reason why the batch must not be split
    further, such as BatchNorm statistics; None if it can be split.
    """
    planned = plan.micro_batch
    assert isinstance(planned, int)
    micro = min(planned, num_samples)
    if micro > 1 and whole_reason is None:
        reason = f"micro-batch {planned} ran out of memory at step {step:,}"
        return with_smaller_micro_batch(plan, micro // 2, reason=reason, problem=problem)
    if plan.activation_checkpointing == "off" and find_blocks(model):
        reason = f"micro-batch {micro} ran out of memory at step {step:,}"
        return with_runtime_changes(
            plan,
            {"activation_checkpointing": MeasuredSetting(value="on", reason=reason, evidence={"problem": problem})},
        )
    if micro > 1:
        raise InsufficientMemoryError(
            "a step of this model needs more memory than is available",
            got=f"micro-batch {micro}: {problem}; the batch is not split: {whole_reason}",
            try_="a smaller batch; split_batch=True, if the loss is a mean over samples; or "
            f"micro_batch={micro // 2}, if statistics (e.g. of BatchNorm) may use fewer samples",
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
