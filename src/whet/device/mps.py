"""Apple GPUs through MPS. Written from PyTorch's sources and issues; never run on a real Mac."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError, WhetError
from whet.device.abstract import AbstractDevice, Memory
from whet.device.contiguous import make_contiguous
from whet.device.environment import HIGH, before_first_allocation, watermark_note
from whet.device.explaining import explained, refuse_wide
from whet.device.fallbacks import FallbackTimer
from whet.device.handled_warnings import handled_warnings
from whet.device.stderr_watch import StderrWatch

METAL_FAILED = "command buffer exited with error status"
"""All that is heard of a GPU that failed: torch 2.13 never looks at the status itself (MPSStream.mm)."""

_HALF_TYPES = (torch.float16, torch.bfloat16)


@final
class Mps(AbstractDevice):
    kind = "mps"

    def __init__(self) -> None:
        before_first_allocation()
        # The allocator counts its own peak from torch 2.13 on (pytorch#186748); before, marks sample it.
        self._has_peak = torch_release() >= (2, 13)
        self._sampled_peak = 0
        self._watch: StderrWatch | None = None
        self._timer: FallbackTimer | None = None
        note = watermark_note()
        self._news: list[tuple[str, dict[str, Any]]] = [("plan", {"changed": note})] if note else []

    @property
    def place(self) -> torch.device:
        return torch.device("mps")

    @property
    def lr_dtype(self) -> torch.dtype:
        # Metal has no float64.
        return torch.float32

    @property
    def shares_host_memory(self) -> bool:
        return True

    def put(self, tensor: Tensor) -> Tensor:
        refuse_wide(tensor)
        # Never non_blocking: such copies have read memory that was freed (pytorch#139550, #189690).
        return tensor.to(self.place)

    def put_model(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        named = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
        for role, tensors in named.items():
            for name, tensor in tensors:
                cure = "model.float() before the optimizer is made; or --device cpu"
                refuse_wide(tensor, name=f"{role} {name!r}", cure=cure)
        super().put_model(model)
        # conv2d is wrong otherwise (pytorch#192212).
        make_contiguous(model, optimizer)

    def sync(self) -> None:
        torch.mps.synchronize()

    def mark(self) -> torch.mps.Event:
        if not self._has_peak:
            self._sampled_peak = max(self._sampled_peak, torch.mps.current_allocated_memory())
        event = torch.mps.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: torch.mps.Event, end: torch.mps.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def memory(self) -> Memory:
        allocated = torch.mps.current_allocated_memory()
        self._sampled_peak = max(self._sampled_peak, allocated)
        return Memory(
            allocated=allocated,
            reserved=torch.mps.driver_allocated_memory(),
            peak=torch.accelerator.max_memory_allocated(self.place) if self._has_peak else self._sampled_peak,
            limit=torch.mps.recommended_max_memory(),
        )

    def reset_peak(self) -> None:
        self._sampled_peak = 0
        if self._has_peak:
            torch.accelerator.reset_peak_memory_stats(self.place)

    def empty_cache(self) -> None:
        torch.mps.empty_cache()

    def refuse_scaling(self, optimizer: Optimizer) -> None:
        if torch_release() >= (2, 13):
            return
        cure = "precision=bf16, precision=fp32, or torch 2.13"
        if any(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(
                "a fused optimizer ignores the loss scale on MPS before torch 2.13 (pytorch#186360)",
                got=f"fp16 with {type(optimizer).__name__}(fused=True) and torch {torch.__version__}",
                try_=f"fused=False; {cure}",
            )
        if any(p.dtype in _HALF_TYPES for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "loss scaling sets half gradients to zero on MPS before torch 2.13 (pytorch#184286)",
                got=f"fp16 with weights in half precision and torch {torch.__version__}",
                try_=f"model.float(), whose products are still fp16; {cure}",
            )

    def refuse_layout(self, layout: str) -> None:
        if layout != "contiguous":
            raise UsageError(
                "channels_last gives crashes and wrong results on MPS (pytorch#188371, #180992)",
                got=f"layout={layout}",
                try_="layout=contiguous, or --device cpu",
            )

    @contextmanager
    def guard(self, *, has_fallback: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(handled_warnings(has_fallback=has_fallback))
            self._timer = FallbackTimer(sync=self.sync) if has_fallback else None
            self._watch = stack.enter_context(StderrWatch(METAL_FAILED))
            yield

    @contextmanager
    def computing(self, *, is_step: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(explained())
            if is_step and self._timer is not None:
                stack.enter_context(self._timer.during_step())
            yield

    def refuse_failure(self, *, wait: bool = False) -> None:
        if self._watch is not None and self._watch.has_seen(wait=wait):
            raise WhetError(
                "the GPU has failed, and what it computed since is not to be trusted",
                got=f"Metal's {METAL_FAILED!r} on standard error; often that is memory",
                try_=f"a smaller micro_batch, without {HIGH}=0.0; the last checkpoint is from before",
            )

    def news(self) -> Iterator[tuple[str, dict[str, Any]]]:
        found = None if self._timer is None else self._timer.result()
        if found is not None:
            self._timer = None
            self._news.append(("fallback", found))
        news, self._news = self._news, []
        return iter(news)

    def rng_state(self) -> Tensor:
        return torch.mps.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.mps.set_rng_state(state)


def torch_release() -> tuple[int, int]:
    """The installed torch, as (major, minor)."""
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)


def why_not() -> str | None:
    """Why MPS cannot be used in this process; None when it can."""
    if torch.backends.mps.is_available():
        return None
    return "macOS 14 or newer is needed" if torch.backends.mps.is_built() else "this torch is built without MPS"
