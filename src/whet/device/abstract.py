"""The interface of a device. The base class does nothing; a device overrides what it needs."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.device.errors import is_out_of_memory
from whet.device.kernels.switches import prefer_sdpa_kernel, use_own_attention, use_own_norms, use_torch_kernels

Made = TypeVar("Made")

Replay = Callable[[], None]
"""Does captured work again, on the same memory; Python is not asked again."""


class AbstractGraphs(ABC):
    """Captures work. Everything captured by one of these shares a pool of memory, so two are never replayed at once.

    Capturing computes nothing: no tensor that was there before and no generator of the device has changed afterwards.
    What Python did meanwhile stays done.
    """

    @abstractmethod
    def warm_up(self) -> AbstractContextManager[list[str]]:
        """Where work runs before it is captured; the list tells what in it waited for the device, with its line."""

    @abstractmethod
    def capture(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        """How to do the work again, and what it made: tensors that each replay fills anew.

        Raises what the work raised. Then nothing captured before may be replayed any more, and the device computes on.
        """

    @abstractmethod
    def forget(self) -> None:
        """Nothing captured so far will be replayed any more: what comes next has a pool of its own."""


HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Mark = Any
"""A moment on the device's clock; only the device that made it can read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUsage:
    """Bytes, read from counters without waiting for the device; None where there is no counter."""

    allocated: int | None = None
    """Live tensors."""
    reserved: int | None = None
    """Taken from the system, caches included."""
    peak: int | None = None
    """The most that live tensors took."""
    limit: int | None = None
    """What the device recommends as the most."""


class AbstractDevice(ABC):
    """A place where tensors live and kernels run."""

    kind: str

    @property
    @abstractmethod
    def place(self) -> torch.device:
        """The device as torch names it."""

    @property
    def lr_dtype(self) -> torch.dtype:
        """The widest number format a learning rate can have here."""
        return torch.float64

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on this device; complete when this returns, as far as later kernels can tell."""
        return tensor.to(self.place)

    def put_model(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:  # noqa: ARG002
        """Moves a model here, in the form that this device computes rightly with; every object stays the same."""
        model.to(self.place)

    def send(self, tensor: Tensor) -> Tensor:
        """A small tensor from the host, without waiting for what the device is doing."""
        return self.put(tensor)

    @property
    def shares_host_memory(self) -> bool:
        """Whether the device's memory is the host's, so that a copy on the host takes from what training has."""
        return False

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Bytes on the host that the device can copy to fast."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def sync(self) -> None:
        """Waits until everything asked for is done."""

    def mark(self) -> Mark:
        """This moment, for measuring what lies between two of them."""
        return time.perf_counter()

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        """The time between two marks; waits until the device has passed them."""
        return float(end - start)

    def memory(self) -> MemoryUsage:
        """What the counters say now."""
        return MemoryUsage()

    def reset_peak(self) -> None:
        """Begins to look for the peak anew, where there is a counter."""

    def freed_memory(self, what: str) -> AbstractContextManager[object]:  # noqa: ARG002
        """While entered with "kept", what tensors free stays with this process, where that is not so anyway."""
        return contextlib.nullcontext()

    def empty_cache(self) -> None:
        """Gives cached memory back; it waits for the device, so never in a step."""

    def is_oom(self, error: BaseException) -> bool:
        """Whether an error means that memory ran out."""
        return is_out_of_memory(error)

    def use_precision(self, precision: str) -> None:
        """Sets what holds for the whole process: whether float32 products may be rounded to tf32."""

    def keeping_precision(self) -> AbstractContextManager[object]:
        """Puts back afterwards what `use_precision` changes."""
        return contextlib.nullcontext()

    def autocast(self, precision: str) -> AbstractContextManager[object]:
        """The context in which the forward pass runs."""
        half = HALF_TYPES.get(precision)
        return torch.autocast(self.place.type, dtype=half) if half else contextlib.nullcontext()

    def scaler(self, loss_scaling: str) -> torch.amp.GradScaler:
        """The loss scaler; one that does nothing where none is needed."""
        return torch.amp.GradScaler(self.place.type, enabled=loss_scaling == "dynamic")

    def refuse_scaling(self, optimizer: Optimizer) -> None:
        """Refuses an optimizer that loss scaling would go wrong with."""

    def refuse_layout(self, layout: str) -> None:
        """Refuses a layout of weights that this device computes wrongly with."""

    attention_kernels: tuple[str, ...] = ()
    """What torch's attention can be told to take here."""

    def attention(self, kernel: str) -> AbstractContextManager[object]:
        """While entered, torch's attention takes this kernel first; "torch" leaves the choice to it.

        "own": models that have a place for whet's own kernels use them, all others torch's choice.
        """
        self.refuse_attention(kernel)
        if kernel == "own":
            return use_own_attention()
        return use_torch_kernels("attention") if kernel == "torch" else prefer_sdpa_kernel(kernel)

    def refuse_attention(self, kernel: str) -> None:
        """Refuses an attention kernel that this device does not have."""
        if kernel not in ("torch", *self.attention_kernels):
            has = ", ".join(self.attention_kernels)
            raise UsageError(
                f"{self.kind} has no such attention kernel"
                if has
                else f"{self.kind} has no choice of attention kernels",
                got=f"attention={kernel}",
                try_="attention=" + " or ".join(("torch", *self.attention_kernels)),
            )

    has_own_norms = False
    """Whether whet's own norms can be told to be taken here."""

    def norms(self, kernels: str) -> AbstractContextManager[object]:
        """While entered with "own", models that have a place for whet's own norms use them."""
        self.refuse_norms(kernels)
        return use_own_norms() if kernels == "own" else use_torch_kernels("norms")

    def refuse_norms(self, kernels: str) -> None:
        """Refuses kernels of norms that this device does not have."""
        if kernels == "own" and not self.has_own_norms:
            raise UsageError(f"{self.kind} has no norms of whet's own", got="norms=own", try_="norms=torch")

    def guard(self, *, has_fallback: bool = False) -> AbstractContextManager[object]:  # noqa: ARG002
        """What holds while a run trains here, e.g. a look-out for failures that raise nothing."""
        return contextlib.nullcontext()

    def computing(self, *, is_step: bool = False) -> AbstractContextManager[object]:  # noqa: ARG002
        """The context in which your model computes: errors that only this device has are told in three lines."""
        return contextlib.nullcontext()

    def refuse_failure(self, *, wait: bool = False) -> None:
        """Raises if the device has failed without an error; with `wait`, everything so far is looked at first."""

    def news(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What a run should write down about its device since it was last asked: kinds of events, with their fields."""
        return iter(())

    def graphs(self) -> AbstractGraphs | None:
        """What captures steps here, with a pool of memory of its own; None where nothing can."""
        return None

    def rng_state(self) -> Tensor | None:
        """The state of the device's own generator; None where the CPU's is the only one."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Puts the generator back to a saved state."""
