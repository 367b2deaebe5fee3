"""Estimate the memory of a training step with fake tensors. The device is not needed.

The estimate runs the code of a real step, from zeroing the gradients to the update, on tensors that have shapes but no
memory. The live bytes at each operator are linear in the number of samples, so two batch sizes determine all others.

If a size depends on data, the largest plausible one is used. For example, indexing with a mask selects all elements.

The estimate does not include cuDNN's workspaces for convolutions, the CUDA context, or fragmentation. The memory that
recurrent layers save on a GPU is an assumption (see `kernels.py`). On the CPU, it is that of a loop over time steps.
"""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, final

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer

from whet.base.errors import UsageError, WhetError
from whet.data.batch import MicroBatch
from whet.device.tracing import StandInDevice, trace_as
from whet.machine.device_figures import DEVICE_FIGURES
from whet.step.ema import named_tensors
from whet.step.model_contexts import checkpoint_activations
from whet.step.optimizers import build_optimizer
from whet.step.step import Outcome, Stepper
from whet.verify.fake_tensors import DATA_DEPENDENT_ERRORS, FakeExecutor, fake_mode
from whet.verify.memory.kernels import DeviceKernels, autocast
from whet.verify.memory.lifetimes import LiveBytes, StorageTracker, scratch_function
from whet.verify.trainable import Trainable, TrainableSpec

PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryEstimate:
    """Estimated memory of a training step, as a linear function of the micro-batch size."""

    name: str
    device: str
    precision: str
    is_checkpointed: bool
    batch_size: int
    """Number of samples in a normal step."""
    phases: tuple[str, ...]
    """Phase of each operator."""
    fixed: Mapping[str, np.ndarray] = field(repr=False)
    """Live bytes at each operator that do not depend on the number of samples, by part."""
    per_sample: Mapping[str, np.ndarray] = field(repr=False)
    """Live bytes at each operator that each sample adds, by part."""

    def bytes_at(self, size: int, *, is_split: bool = False) -> int:
        """Return the peak memory in bytes for a micro-batch of `size` samples.

        If `is_split`, a step consists of several micro-batches.
        """
        return int(self._total(size, is_split).max())

    def parts_at(self, size: int, *, is_split: bool = False) -> dict[str, int]:
        """Return the bytes of each part of PARTS at the peak."""
        peak = int(self._total(size, is_split).argmax())
        return {part: round(float(row[peak])) for part, row in self._rows(size, is_split).items()}

    def phase_at(self, size: int, *, is_split: bool = False) -> str:
        """Return the phase in which the peak occurs: transfer, forward, backward or optimizer."""
        return self.phases[int(self._total(size, is_split).argmax())]

    def _total(self, size: int, is_split: bool) -> np.ndarray:
        return np.sum(list(self._rows(size, is_split).values()), axis=0)

    def _rows(self, size: int, is_split: bool) -> dict[str, np.ndarray]:
        rows = {part: self.fixed[part] + size * self.per_sample[part] for part in PARTS}
        if is_split:
            # From the second micro-batch on, all gradients exist. Each new gradient exists until it is accumulated.
            new = np.diff(rows["gradients"], prepend=0).clip(min=0)
            rows["gradients"] = rows["gradients"].max() + new
        return rows


def estimate_memory(
    spec: TrainableSpec,
    *,
    sizes: tuple[int, int] | None = None,
    device: str = "cuda",
    activation_checkpointing: bool = False,
    precision: str = "fp32",
    kernels: str = "fused",
    clip: float | None = 1.0,
) -> MemoryEstimate:
    """Estimate the memory of a training step on a type of device, with fake tensors.

    Nothing is computed or allocated. `sizes` are the two batch sizes to trace. Raise WhetError if the step depends on
    data.
    """
    if device not in DEVICE_FIGURES:
        known = " or ".join(DEVICE_FIGURES)
        raise UsageError("memory cannot be estimated for this device", got=device, try_=known)

    def attempt(*, is_one_size: bool, condition: bool) -> MemoryEstimate:
        with fake_mode() as mode:
            trainable = spec.make()
            return estimate_trainable(
                replace(trainable, is_scalable=False) if is_one_size else trainable,
                name=spec.name,
                sizes=sizes,
                device=device,
                activation_checkpointing=activation_checkpointing,
                precision=precision,
                kernels=kernels,
                clip=clip,
                executor=FakeExecutor(mode, condition=condition),
            )

    # Some models accept only one batch size, and some models fail for one result of a condition on data. Try all
    # combinations, and report the error of the last one.
    *others, last = product((False, True) if sizes is None else (False,), (False, True))
    for is_one_size, condition in others:
        with suppress(Exception):
            return attempt(is_one_size=is_one_size, condition=condition)
    try:
        return attempt(is_one_size=last[0], condition=last[1])
    except DATA_DEPENDENT_ERRORS as error:
        raise WhetError(
            "the step depends on data, so its memory cannot be estimated without computing it",
            got=f"{type(error).__name__}: {error}"[:200],
            try_="a run, which measures it; or a model without masks as indices",
        ) from None


def estimate_trainable(
    trainable: Trainable,
    *,
    name: str,
    sizes: tuple[int, int] | None = None,
    device: str,
    activation_checkpointing: bool = False,
    precision: str = "fp32",
    kernels: str = "fused",
    clip: float | None = 1.0,
    executor: FakeExecutor | None = None,
) -> MemoryEstimate:
    """Estimate the memory of an existing trainable: a fake one with `executor`, or a real one, which this trains."""
    executor = executor or FakeExecutor(None)
    small, large = sizes or (2, max(4, trainable.batch_size))
    traced_sizes = (small, large) if trainable.is_scalable else (trainable.batch_size, trainable.batch_size)
    granularity = DEVICE_FIGURES[device].allocation_bytes
    tracker = StorageTracker(granularity=granularity, scratch=scratch_function(device), executor=executor)
    stand_in = _CountingDevice(device, tracker)
    micro_batches = [_make_batch(trainable, size) for size in traced_sizes]
    with ExitStack() as stack:
        if activation_checkpointing:
            stack.enter_context(checkpoint_activations(trainable.model))
        stack.enter_context(executor.read_function_mode())
        stack.enter_context(trace_as(device))
        stack.enter_context(DeviceKernels(device))
        stack.enter_context(tracker)
        tracker.follow((tensor for _, tensor in named_tensors(trainable.model)), label="weights")
        optimizer = build_optimizer(trainable.optimizer, trainable.model, stand_in, kernels=kernels)
        stepper = Stepper(trainable.model, optimizer, stand_in, precision=precision, clip=clip)
        steps = [_trace_step(stepper, trainable, micro, tracker, optimizer) for micro in micro_batches]
    fixed, per_sample = _fit_rows(*steps, sizes=[len(micro) for micro in micro_batches])
    fixed["temporary"] = fixed["temporary"] + DEVICE_FIGURES[device].scratch_bytes
    return MemoryEstimate(
        name=name,
        device=device,
        precision=precision,
        is_checkpointed=activation_checkpointing,
        batch_size=trainable.batch_size,
        phases=steps[1].phases,
        fixed=fixed,
        per_sample=per_sample,
    )


@final
class _CountingDevice(StandInDevice):
    """A stand-in device whose time marks are operator counts."""

    def __init__(self, kind: str, tracker: StorageTracker) -> None:
        super().__init__(kind)
        self._tracker = tracker

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def mark(self) -> int:
        return self._tracker.now

    def autocast(self, precision: str, *, keeps_weights: bool = True) -> Any:  # noqa: ARG002
        return autocast(precision)


def _make_batch(trainable: Trainable, size: int) -> MicroBatch:
    """Create a batch, outside the fake mode if possible, because reading real data fails in the mode."""
    with unset_fake_temporarily(), suppress(Exception):
        return trainable.make_batch(size)
    return trainable.make_batch(size)


@dataclass(frozen=True, slots=True)
class _TracedStep:
    """Live bytes at each operator of one step, and the phases of the operators."""

    live: LiveBytes
    phases: tuple[str, ...]

    @property
    def num_before_update(self) -> int:
        return self.phases.index("optimizer")


def _trace_step(
    stepper: Stepper, trainable: Trainable, micro: MicroBatch, tracker: StorageTracker, optimizer: Optimizer
) -> _TracedStep:
    start = tracker.now
    tracker.label = "activations"

    def loss(moved: MicroBatch) -> Any:
        returned = trainable.loss(moved)
        # Memory that is allocated after the forward pass is freed within the step, unless it is relabeled below.
        tracker.label = "temporary"
        return returned

    outcome = stepper(loss, [micro], num_samples=len(micro), step=1)
    gradients = (p.grad for p in trainable.model.parameters() if p.grad is not None)
    tracker.follow(gradients, label="gradients")
    state = (value for slot in optimizer.state.values() for value in slot.values() if isinstance(value, Tensor))
    tracker.follow(state, label="optimizer")
    return _TracedStep(tracker.live_bytes(start, tracker.now), _phases(outcome, start, tracker.now))


def _phases(outcome: Outcome, start: int, end: int) -> tuple[str, ...]:
    phases = ["transfer"] * (end - start)
    for phase, begin, until in outcome.marks:
        phases[begin - start : until - start] = [phase] * (until - begin)
    return tuple(phases)


MemoryRows = dict[str, np.ndarray]


def _fit_rows(small: _TracedStep, large: _TracedStep, *, sizes: list[int]) -> tuple[MemoryRows, MemoryRows]:
    """Fit a line through the live bytes of both batch sizes for each part and operator. Return intercepts and slopes.

    The memory of the optimizer state and of the update does not depend on the number of samples.
    """
    few, many = sizes
    rows = {part: large.live.row(part) for part in PARTS}
    slopes = {part: np.zeros_like(rows[part]) for part in PARTS}
    end = large.num_before_update
    for part in ("activations", "temporary"):
        if few == many:
            # Only one size is known. Assume that activations are proportional to it.
            slopes[part][:end] = rows[part][:end] / many if part == "activations" else 0
        elif small.num_before_update == end:
            slopes[part][:end] = (rows[part] - small.live.row(part)[: len(rows[part])])[:end] / (many - few)
        else:
            # The number of operators depends on the batch size, so only the peaks can be compared.
            slopes[part][:end] = (_bytes_at_peak(large, part) - _bytes_at_peak(small, part)) / (many - few)
    return {part: rows[part] - many * slopes[part] for part in PARTS}, slopes


def _bytes_at_peak(step: _TracedStep, part: str) -> float:
    """Return the bytes of one part at the peak before the update."""
    end = step.num_before_update
    total = np.sum([step.live.row(each)[:end] for each in PARTS], axis=0)
    return float(step.live.row(part)[total.argmax()])
