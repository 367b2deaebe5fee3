"""Compare training on a device with the CPU: losses, gradients, updates, determinism, precision."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.data.batch import MicroBatch
from whet.device import virtual_mac
from whet.device.abstract import AbstractDevice
from whet.device.open import open_device
from whet.step.loss import LossFunction, clamp_weight, parse_loss
from whet.verify.isolation import disable_dropout, preserve_model_and_rng
from whet.verify.parity.locate import LocateResult, locate
from whet.verify.parity.reproducer import check_overwrite
from whet.verify.parity.training import ParityRow, ReplicaFactory, compare_training
from whet.verify.tolerance import RelativeError, relative_error, relative_errors
from whet.verify.trainable import TrainableSpec

DETERMINISM_STEPS = 3
_WEIGHT = "the weight "
ROUNDING_TOLERANCE = 1e-4
"""Sums that a GPU takes in a changing order differ by less."""


class DeterminismResult(FrozenModel):
    """Two runs of a few steps from the same weights and generators, dropout included."""

    is_same: bool
    steps: int = DETERMINISM_STEPS
    first: str | None = None
    """What differs first."""
    num_different: int = 0
    num_tensors: int
    error: RelativeError = 0.0
    """The largest relative difference in the step that differs first."""
    is_rounding: bool = False
    """Whether it is the rounding of a GPU that adds in a changing order, as CUDA says it does."""

    @property
    def agrees(self) -> bool:
        return self.is_same or self.is_rounding


def run_twice(bench: ReplicaFactory, device: AbstractDevice) -> DeterminismResult:
    """A few real steps, twice; bit by bit."""
    ours, theirs = _history(bench, device), _history(bench, device)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        different = [name for name in one if not _same_bits(one[name], other[name])]
        if different:
            error = _difference(one, other)
            return DeterminismResult(
                is_same=False,
                first=f"{different[0]} in step {number}",
                num_different=len(different),
                num_tensors=len(one),
                error=error,
                is_rounding=device.kind == "cuda" and error <= ROUNDING_TOLERANCE,
            )
    return DeterminismResult(is_same=True, num_tensors=len(ours[0]))


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of loss and gradients; of the weights only if nothing else differs, since an adaptive optimizer makes whole steps
    of the rounding in a gradient that should be zero."""
    errors = relative_errors(other, one)
    passed = [error for name, error in errors.items() if error and not name.startswith(_WEIGHT)]
    return max(passed or errors.values())


def _history(bench: ReplicaFactory, device: AbstractDevice) -> list[dict[str, Tensor]]:
    """Loss, gradients in the order of the backward pass, and weights after each step."""
    with bench.at(device, dropout=True) as placed:
        stepper = placed.stepper(placed.optimizer())
        steps = []
        for number in range(1, DETERMINISM_STEPS + 1):
            found = {"the loss": placed.step(stepper, number).loss}
            named = list(placed.model.named_parameters())
            found |= {f"the gradient of {name}": p.grad for name, p in reversed(named) if p.grad is not None}
            found |= {f"{_WEIGHT}{name}": p for name, p in named}
            steps.append({name: tensor.detach().cpu().clone() for name, tensor in found.items()})
        return steps


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """NaNs of the same bits are the same."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


LOSS_BOUNDS = {"bf16": 2e-2, "fp16": 5e-3, "tf32": 5e-3}
GRADIENT_BOUNDS = {"bf16": 2e-1, "fp16": 1e-1, "tf32": 1e-1}
"""The largest relative errors that count as agreement. bf16 keeps 8 bits of a number, fp16 and tf32 keep 11; sound
transformers show 0.06 and 0.002, convnets with max-pooling 0.1 and 0.06, since rounding decides what is pooled."""
_LOSS_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)
"""A loss scaler finds the largest that does not overflow; so do we."""


class PrecisionResult(FrozenModel):
    """What a precision does to one pass of a model, dropout off."""

    precision: str
    loss_error: RelativeError
    loss_bound: RelativeError
    gradient_error: RelativeError
    """Of the worst gradient."""
    bound: RelativeError
    """For the gradients."""
    worst: str | None = None
    by_module: dict[str, RelativeError] = Field(default_factory=dict)
    """The worst gradient of each module that has weights of its own."""

    @property
    def agrees(self) -> bool:
        return self.loss_error <= self.loss_bound and self.gradient_error <= self.bound


def compare_precision(
    model: nn.Module, loss: LossFunction, micro: MicroBatch, device: AbstractDevice, precision: str
) -> PrecisionResult:
    """One pass in `precision` (bf16, fp16 or tf32) and one in fp32, on the device where the model is.

    Weights, buffers, gradients, modes and generators are as before afterwards.
    """
    if precision not in GRADIENT_BOUNDS:
        raise UsageError("no such precision to compare", got=precision, try_=" or ".join(GRADIENT_BOUNDS))
    moved = micro.moved(device.put)
    with preserve_model_and_rng(model, device):
        expected_loss, expected = _loss_and_gradients(model, loss, moved, device, "fp32")
    with preserve_model_and_rng(model, device):
        found_loss, found = _loss_and_gradients(model, loss, moved, device, precision)
    errors = relative_errors(found, expected)
    worst = max(errors, key=lambda name: errors[name], default=None)
    by_module: dict[str, float] = {}
    for name, error in errors.items():
        module = name.rpartition(".")[0]
        by_module[module] = max(error, by_module.get(module, 0.0))
    return PrecisionResult(
        precision=precision,
        loss_error=relative_error(found_loss, expected_loss),
        loss_bound=LOSS_BOUNDS[precision],
        gradient_error=0.0 if worst is None else errors[worst],
        bound=GRADIENT_BOUNDS[precision],
        worst=worst,
        by_module=by_module,
    )


def _loss_and_gradients(
    model: nn.Module, loss: LossFunction, micro: MicroBatch, device: AbstractDevice, precision: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and every gradient, on the CPU, in training mode and without dropout. Only inside `preserve_model_and_rng`."""
    model.train()
    with device.keeping_precision(), disable_dropout(model):
        device.use_precision(precision)
        with device.computing(), device.autocast(precision):
            total, weight = parse_loss(loss(micro))
        total = total if weight is None else total / clamp_weight(weight)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for scale in _LOSS_SCALES if precision == "fp16" else (1.0,):
            gradients = torch.autograd.grad(total * scale, list(named.values()), retain_graph=True, allow_unused=True)
            found = {n: g.detach().cpu() / scale for n, g in zip(named, gradients, strict=True) if g is not None}
            if all(bool(gradient.isfinite().all()) for gradient in found.values()):
                break
    return total.detach().cpu(), found


class ParityResult(FrozenModel):
    """A device against the CPU."""

    name: str
    device: str
    reference: str
    """cpu float64, or cpu float32 for a model that does not run in float64"""
    size: int
    """samples in the batch"""
    steps: int
    rows: tuple[ParityRow, ...]
    determinism: DeterminismResult
    precisions: tuple[PrecisionResult, ...] = ()
    located: LocateResult | None = None
    """Where it goes wrong; looked for only if something differs."""
    notes: tuple[str, ...] = ()
    is_virtual: bool = False
    """Whether the device is simulated."""
    asked_precision: bool = False

    @property
    def agrees(self) -> bool:
        """Whether nothing differs. A precision counts only if it was asked for."""
        is_coarse = self.asked_precision and not all(one.agrees for one in self.precisions)
        return all(row.agrees for row in self.rows) and self.determinism.agrees and not is_coarse

    def as_json(self) -> dict[str, Any]:
        return {"agrees": self.agrees, **super().as_json()}


def validate_compare_options(
    *,
    devices: Sequence[str],
    steps: int,
    size: int | None,
    precisions: Sequence[str] | None,
    out: Path | None,
) -> None:
    """What cannot be meant is refused before anything is loaded."""
    for word, number in (("--steps", steps), ("--size", 1 if size is None else size)):
        if number < 1:
            raise UsageError(f"{word} must be at least 1", got=str(number), try_=f"{word} 20")
    device = choose_device(devices)
    if "tf32" in choose_precisions(precisions) and device.kind != "cuda":
        raise UsageError("only CUDA rounds products to tf32", got=f"--precision tf32 on {device.kind}", try_="bf16")
    if out is not None:
        check_overwrite(out)


def choose_device(names: Sequence[str]) -> AbstractDevice:
    """The device that is compared with the CPU; the CPU itself where there is no other."""
    if len(set(names)) < len(names):
        raise UsageError("a device is named twice", got=",".join(names), try_="--devices cpu,mps")
    others = [name for name in names if name != "cpu"]
    if len(others) > 1:
        raise UsageError("one device is compared with the CPU", got=",".join(names), try_=f"--devices cpu,{others[0]}")
    return open_device(others[0] if others else "cpu" if names else "auto").device


def choose_precisions(names: Sequence[str] | None) -> tuple[str, ...]:
    """Those that were asked for; bf16 where nobody asked."""
    for name in names or ():
        if name not in GRADIENT_BOUNDS:
            raise UsageError("no such precision to compare", got=name, try_=" or ".join(GRADIENT_BOUNDS))
    return ("bf16",) if names is None else tuple(dict.fromkeys(names))


def compare_devices(
    subject: TrainableSpec,
    *,
    devices: Sequence[str] = (),
    steps: int = 20,
    size: int | None = None,
    precisions: Sequence[str] | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> ParityResult:
    """The same weights and the same batch on the CPU and on a device: see docs/compare.md."""
    validate_compare_options(devices=devices, steps=steps, size=size, precisions=precisions, out=out)
    wanted, device = choose_precisions(precisions), choose_device(devices)
    bench = ReplicaFactory(subject, size=size)
    if device.kind == "cpu" and bench.number_formats - {torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in bench.number_formats))
        raise UsageError(
            "on the CPU alone a model in float32 is compared with float64",
            got=f"weights in {names}",
            try_="--devices cpu,mps or cpu,cuda; or the model in float32",
        )
    parity = compare_training(bench, device, steps=steps, say=say)
    say(f"{device.kind}, the same steps twice ...")
    determinism = run_twice(bench, device)
    found, notes = _precisions(bench, device, wanted, is_asked=precisions is not None, say=say)
    located = None
    wrong = [row.what for row in parity.rows if not row.agrees]
    if wrong:
        say(f"{', '.join(wrong)} differ: looking at every operator on {device.kind} ...")
        # What is wrong in the first pass shows in its first step; the update of the check makes two.
        located = locate(bench, device, steps={"update": 2, "trajectory": steps}.get(wrong[0], 1), out=out)
    if parity.why_not_wide is not None:
        notes.append(f"the model does not run in float64: {parity.why_not_wide}")
    if located is not None and located.draws:
        notes.append(f"random numbers differ between devices: {', '.join(located.draws)} cannot be compared")
    if located is not None and located.unknown:
        notes.append(f"not judged, since the CPU has no such operator: {', '.join(located.unknown)}")
    return ParityResult(
        name=subject.name,
        device=str(device.place),
        reference=parity.reference,
        size=bench.size,
        steps=steps,
        rows=parity.rows,
        determinism=determinism,
        precisions=found,
        located=located,
        notes=tuple(notes),
        is_virtual=device.kind == "mps" and virtual_mac.installed() is not None,
        asked_precision=precisions is not None,
    )


def _precisions(
    bench: ReplicaFactory, device: AbstractDevice, wanted: Sequence[str], *, is_asked: bool, say: Callable[[str], None]
) -> tuple[tuple[PrecisionResult, ...], list[str]]:
    found, notes = [], []
    for precision in wanted:
        say(f"{precision} on {device.kind} ...")
        try:
            with bench.at(device) as placed:
                found.append(compare_precision(placed.model, placed.specimen.loss, placed.micro, device, precision))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if is_asked:
                got = str(error).splitlines()[0][:200]
                raise WhetError(f"the model does not run in {precision} on {device.kind}", got=got) from error
            notes.append(f"the model does not run in {precision} on {device.kind}")
    return tuple(found), notes
