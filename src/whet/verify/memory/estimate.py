"""How much memory will a training step take on a device that need not be here? Followed among fake tensors.

The step is the real one: the same code, from zeroed gradients to the update, with tensors that have shapes but no
memory. What is alive at each operator is a straight line in the number of samples, so two sizes tell all others.

What depends on numbers gets a plausible answer, as large as it can be: an index by a mask takes every place.

Not known, and not counted: what cuDNN takes as workspace for convolutions, the CUDA context, what fragmentation wastes.
A recurrent layer's reserve is assumed (`fused.py`); on the CPU it is told as if it were written out step by step.
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
from whet.step.ema import named_tensors
from whet.step.model_contexts import checkpoint_activations
from whet.step.optimizers import build_optimizer
from whet.step.step import Outcome, Stepper
from whet.verify.fake_tensors import DATA_DEPENDENT_ERRORS, FakeExecutor, fake_mode
from whet.verify.memory.kernels import DeviceKernels, autocast
from whet.verify.memory.lifetimes import FIXED_SCRATCH_BYTES, LiveBytes, StorageTracker, scratch_function
from whet.verify.trainable import Trainable, TrainableSpec

PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")
_ALLOCATION_GRANULARITY = {"cuda": 512, "mps": 16_384, "cpu": 64}
"""What the allocators round up to: CUDACachingAllocator's blocks, Metal's pages, the CPU's alignment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryEstimate:
    """What a step needs at its peak, for any number of samples at once."""

    name: str
    device: str
    precision: str
    is_checkpointed: bool
    usual_size: int
    """The number of samples that a usual step of the subject has."""
    phases: tuple[str, ...]
    """The phase of each operator."""
    fixed: Mapping[str, np.ndarray] = field(repr=False)
    """Bytes at each operator that do not depend on the number of samples, by part."""
    per_sample: Mapping[str, np.ndarray] = field(repr=False)

    def bytes_at(self, size: int, *, is_cut: bool = False) -> int:
        """The peak with so many samples at once; cut if a step has several such micro-batches."""
        return int(self._total(size, is_cut).max())

    def parts_at(self, size: int, *, is_cut: bool = False) -> dict[str, int]:
        """What the peak is made of."""
        moment = int(self._total(size, is_cut).argmax())
        return {part: round(float(row[moment])) for part, row in self._rows(size, is_cut).items()}

    def phase_at(self, size: int, *, is_cut: bool = False) -> str:
        """In which phase of the step the peak is: transfer, forward, backward or optimizer."""
        return self.phases[int(self._total(size, is_cut).argmax())]

    @property
    def fixed_bytes(self) -> int:
        """What the peak of a usual step would have left without samples."""
        return self.bytes_at(self.usual_size) - self.usual_size * self.per_sample_bytes

    @property
    def per_sample_bytes(self) -> int:
        """What one more sample adds to a usual step."""
        moment = int(self._total(self.usual_size, False).argmax())
        return round(sum(float(line[moment]) for line in self.per_sample.values()))

    def _total(self, size: int, is_cut: bool) -> np.ndarray:
        return np.sum(list(self._rows(size, is_cut).values()), axis=0)

    def _rows(self, size: int, is_cut: bool) -> dict[str, np.ndarray]:
        rows = {part: self.fixed[part] + size * self.per_sample[part] for part in PARTS}
        if is_cut:
            # From the second micro-batch on all gradients are there, and each new one until it is added to the first.
            born = np.diff(rows["gradients"], prepend=0).clip(min=0)
            rows["gradients"] = rows["gradients"].max() + born
        return rows


def estimate_memory(
    subject: TrainableSpec,
    *,
    sizes: tuple[int, int] | None = None,
    device: str = "cuda",
    activation_checkpointing: bool = False,
    precision: str = "fp32",
    kernels: str = "fused",
    clip: float | None = 1.0,
) -> MemoryEstimate:
    """The memory of the subject's training step on a device of this kind; nothing is computed, nothing allocated.

    `sizes` are the two numbers of samples that are followed.
    """
    if device not in _ALLOCATION_GRANULARITY:
        raise UsageError(
            "memory is not estimated for this device", got=device, try_=" or ".join(_ALLOCATION_GRANULARITY)
        )

    def attempt(*, is_one_size: bool, truth: bool) -> MemoryEstimate:
        with fake_mode() as mode:
            specimen = subject.make()
            return estimate_trainable(
                replace(specimen, is_scalable=False) if is_one_size else specimen,
                name=subject.name,
                sizes=sizes,
                device=device,
                activation_checkpointing=activation_checkpointing,
                precision=precision,
                kernels=kernels,
                clip=clip,
                answers=FakeExecutor(mode, truth=truth),
            )

    # Some models know their inputs' size, and some conditions on numbers lead to an error one way and not the other.
    *others, last = product((False, True) if sizes is None else (False,), (False, True))
    for is_one_size, truth in others:
        with suppress(Exception):
            return attempt(is_one_size=is_one_size, truth=truth)
    try:
        return attempt(is_one_size=last[0], truth=last[1])
    except DATA_DEPENDENT_ERRORS as error:
        raise WhetError(
            "the step looks at numbers, so its memory cannot be told without computing it",
            got=f"{type(error).__name__}: {error}"[:200],
            try_="a run, which measures it; or a model without masks as indices",
        ) from None


def estimate_trainable(
    specimen: Trainable,
    *,
    name: str,
    sizes: tuple[int, int] | None = None,
    device: str,
    activation_checkpointing: bool = False,
    precision: str = "fp32",
    kernels: str = "fused",
    clip: float | None = 1.0,
    answers: FakeExecutor | None = None,
) -> MemoryEstimate:
    """The same for a specimen that was made: a fake one with `answers`, or a real one, whose steps are really made."""
    answers = answers or FakeExecutor(None)
    small, large = sizes or (2, max(4, specimen.size))
    asked = (small, large) if specimen.is_scalable else (specimen.size, specimen.size)
    lifetimes = StorageTracker(
        granule=_ALLOCATION_GRANULARITY[device], scratch=scratch_function(device), answers=answers
    )
    stand_in = _CountingDevice(device, lifetimes)
    micro_batches = [_micro(specimen, size) for size in asked]
    with ExitStack() as stack:
        if activation_checkpointing:
            stack.enter_context(checkpoint_activations(specimen.model))
        stack.enter_context(answers.to_readers())
        stack.enter_context(trace_as(device))
        stack.enter_context(DeviceKernels(device))
        stack.enter_context(lifetimes)
        lifetimes.follow((tensor for _, tensor in named_tensors(specimen.model)), label="weights")
        optimizer = build_optimizer(specimen.optimizer, specimen.model, stand_in, kernels=kernels)
        stepper = Stepper(specimen.model, optimizer, stand_in, precision=precision, clip=clip)
        seen = [_step(stepper, specimen, micro, lifetimes, optimizer) for micro in micro_batches]
    fixed, per_sample = _fit_rows(*seen, sizes=[len(micro) for micro in micro_batches])
    fixed["temporary"] = fixed["temporary"] + FIXED_SCRATCH_BYTES[device]
    return MemoryEstimate(
        name=name,
        device=device,
        precision=precision,
        is_checkpointed=activation_checkpointing,
        usual_size=specimen.size,
        phases=seen[1].phases,
        fixed=fixed,
        per_sample=per_sample,
    )


@final
class _CountingDevice(StandInDevice):
    """One whose clock counts operators."""

    def __init__(self, kind: str, lifetimes: StorageTracker) -> None:
        super().__init__(kind)
        self._lifetimes = lifetimes

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def mark(self) -> int:
        return self._lifetimes.now

    def autocast(self, precision: str) -> Any:
        return autocast(precision)


def _micro(specimen: Trainable, size: int) -> MicroBatch:
    """Made from real data where there is some: lengths are looked at. A fake specimen's own inputs need their mode."""
    with unset_fake_temporarily(), suppress(Exception):
        return specimen.micro(size)
    return specimen.micro(size)


@dataclass(frozen=True, slots=True)
class _TracedStep:
    """One step: what was alive at each operator, and in which phase it was."""

    window: LiveBytes
    phases: tuple[str, ...]

    @property
    def num_before_update(self) -> int:
        return self.phases.index("optimizer")


def _step(
    stepper: Stepper, specimen: Trainable, micro: MicroBatch, lifetimes: StorageTracker, optimizer: Optimizer
) -> _TracedStep:
    start = lifetimes.now
    lifetimes.label = "activations"

    def loss(moved: MicroBatch) -> Any:
        returned = specimen.loss(moved)
        lifetimes.label = "temporary"
        return returned

    outcome = stepper(loss, [micro], num_samples=len(micro), step=1)
    gradients = (p.grad for p in specimen.model.parameters() if p.grad is not None)
    lifetimes.follow(gradients, label="gradients")
    state = (value for slot in optimizer.state.values() for value in slot.values() if isinstance(value, Tensor))
    lifetimes.follow(state, label="optimizer")
    return _TracedStep(lifetimes.window(start, lifetimes.now), _phases(outcome, start, lifetimes.now))


def _phases(outcome: Outcome, start: int, end: int) -> tuple[str, ...]:
    phases = ["transfer"] * (end - start)
    for phase, begin, until in outcome.marks:
        phases[begin - start : until - start] = [phase] * (until - begin)
    return tuple(phases)


MemoryRows = dict[str, np.ndarray]


def _fit_rows(small: _TracedStep, large: _TracedStep, *, sizes: list[int]) -> tuple[MemoryRows, MemoryRows]:
    """For each operator and part the line through what was alive with few samples and with many.

    The optimizer's state is born in the first step and does not depend on samples, like all that the update takes.
    """
    few, many = sizes
    rows = {part: large.window.row(part) for part in PARTS}
    grows = {part: np.zeros_like(rows[part]) for part in PARTS}
    moments = large.num_before_update
    for part in ("activations", "temporary"):
        if few == many:
            # One size is all there is: activations are taken to grow with the samples, from nothing.
            grows[part][:moments] = rows[part][:moments] / many if part == "activations" else 0
        elif small.num_before_update == moments:
            grows[part][:moments] = (rows[part] - small.window.row(part)[: len(rows[part])])[:moments] / (many - few)
        else:
            # Another number of operators for another number of samples: only the peaks can be compared.
            grows[part][:moments] = (_peak_of(large, part) - _peak_of(small, part)) / (many - few)
    return {part: rows[part] - many * grows[part] for part in PARTS}, grows


def _peak_of(seen: _TracedStep, part: str) -> float:
    """What one part has at the peak before the update."""
    moments = seen.num_before_update
    total = np.sum([seen.window.row(each)[:moments] for each in PARTS], axis=0)
    return float(seen.window.row(part)[total.argmax()])
