"""Compare training on a device with training on the CPU: losses, gradients, updates, determinism and precision."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import UsageError, WhetError, first_line
from whet.base.model import FrozenModel
from whet.device.abstract import AbstractDevice
from whet.device.open import open_device
from whet.verify.draws import UnrepeatableDrawError
from whet.verify.parity.locate import LocateResult, locate
from whet.verify.parity.precision import GRADIENT_BOUNDS, PrecisionResult, compare_precision
from whet.verify.parity.reproducer import check_overwrite
from whet.verify.parity.training import ParityRow, ReplicaFactory, TrainingParity, Verdict, compare_training
from whet.verify.tolerance import RelativeError, relative_errors
from whet.verify.trainable import TrainableSpec
from whet.verify.value_bytes import same_bits

# --- determinism ------------------------------------------------------------------------------------------------------

DETERMINISM_STEPS = 3
# Maximum relative difference between two runs on a GPU that counts as rounding, due to the varying order of sums.
ROUNDING_TOLERANCE = 1e-4
_WEIGHT = "the weight "
# Minimum error of a wrong operator if the loss, gradients and updates agree. Rounding is far below this, whereas the
# bounds of single operators are too close to rounding to decide alone.
OPERATOR_BOUND = 1e-3


class DeterminismResult(FrozenModel):
    """The result of comparing two short runs with the same weights and seeds. Dropout is active."""

    is_same: bool
    steps: int = DETERMINISM_STEPS
    first: str | None = None
    """First tensor that differs, or None if all are the same."""
    num_different: int = 0
    num_tensors: int
    error: RelativeError = 0.0
    """Largest relative difference in the first step that differs."""
    is_rounding: bool = False
    """Whether the difference is small enough to be due to nondeterministic sums, which CUDA documents."""

    @property
    def agrees(self) -> bool:
        return self.is_same or self.is_rounding


def run_twice(replicas: ReplicaFactory, device: AbstractDevice) -> DeterminismResult:
    """Run DETERMINISM_STEPS steps twice, and compare every bit."""
    first_run, second_run = _record_steps(replicas, device), _record_steps(replicas, device)
    for number, (first, second) in enumerate(zip(first_run, second_run, strict=True), start=1):
        different = [name for name in first if not same_bits(first[name], second[name])]
        if different:
            error = _difference(first, second)
            return DeterminismResult(
                is_same=False,
                first=f"{different[0]} in step {number}",
                num_different=len(different),
                num_tensors=len(first),
                error=error,
                is_rounding=device.adds_in_any_order and error <= ROUNDING_TOLERANCE,
            )
    return DeterminismResult(is_same=True, num_tensors=len(first_run[0]))


def _difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference in the loss and gradients, or in the weights if nothing else differs.

    Weights are a poor measure, because an adaptive optimizer amplifies rounding in an almost zero gradient to a full
    step.
    """
    errors = relative_errors(second, first)
    not_weights = [error for name, error in errors.items() if error and not name.startswith(_WEIGHT)]
    return max(not_weights or errors.values())


def _record_steps(replicas: ReplicaFactory, device: AbstractDevice) -> list[dict[str, Tensor]]:
    """Run a few steps. Return the loss, the gradients in backward order, and the weights of each step."""
    with replicas.on(device, dropout=True) as replica:
        stepper = replica.stepper(replica.optimizer())
        steps = []
        for number in range(1, DETERMINISM_STEPS + 1):
            tensors = {"the loss": replica.step(stepper, number).loss}
            named = list(replica.model.named_parameters())
            tensors |= {f"the gradient of {name}": p.grad for name, p in reversed(named) if p.grad is not None}
            tensors |= {f"{_WEIGHT}{name}": p for name, p in named}
            steps.append({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
        return steps


# --- comparison -------------------------------------------------------------------------------------------------------


class ParityResult(FrozenModel):
    """The result of comparing a device with the CPU."""

    name: str
    device: str
    reference: str
    """The reference: "cpu float64", or "cpu float32" if the model does not run in float64."""
    size: int
    """Number of samples in the batch."""
    steps: int
    num_draws: int = 0
    """Number of random draws of a step. All sides use the same random numbers."""
    rows: tuple[ParityRow, ...]
    """The compared quantities. Empty if nothing could be compared."""
    determinism: DeterminismResult
    precisions: tuple[PrecisionResult, ...] = ()
    located: LocateResult | None = None
    """The result of the search for a wrong operator, or None if nothing differs and everything could be judged."""
    obstacles: tuple[str, ...] = ()
    """Reasons why agreement cannot be judged. Empty if it can."""
    notes: tuple[str, ...] = ()
    is_virtual: bool = False
    """Whether the device is simulated."""
    is_precision_required: bool = False
    """Whether the user requested the precisions. Only then do they count for the verdict."""

    @property
    def verdict(self) -> Verdict:
        """The overall verdict.

        It is "differs" if an operator is wrong, even if there are obstacles. Otherwise, obstacles preclude a verdict.
        """
        if any(row.verdict == "differs" for row in self.rows) or (self.located and self.located.culprit):
            return "differs"
        if self.obstacles:
            return "cannot judge"
        is_too_coarse = self.is_precision_required and not all(one.agrees for one in self.precisions)
        return "differs" if is_too_coarse or not self.determinism.agrees else "agrees"

    @property
    def agrees(self) -> bool:
        return self.verdict == "agrees"

    def as_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "agrees": self.agrees, **super().as_json()}


def validate_compare_options(
    *,
    devices: Sequence[str],
    steps: int,
    size: int | None,
    precisions: Sequence[str] | None,
    out: Path | None,
) -> None:
    """Raise UsageError for invalid options. Call this before the model is loaded."""
    for option, number in (("--steps", steps), ("--size", 1 if size is None else size)):
        if number < 1:
            raise UsageError(f"{option} must be at least 1", got=str(number), try_=f"{option} 20")
    device = choose_device(devices)
    if "tf32" in choose_precisions(precisions) and not device.has_tf32:
        raise UsageError("only CUDA has tf32", got=f"--precision tf32 on {device.kind}", try_="bf16")
    if out is not None:
        check_overwrite(out)


def choose_device(names: Sequence[str]) -> AbstractDevice:
    """Open the device to compare with the CPU, or the CPU itself if there is no other. Raise UsageError for several."""
    if len(set(names)) < len(names):
        raise UsageError("a device is named twice", got=",".join(names), try_="--devices cpu,mps")
    others = [name for name in names if name != "cpu"]
    if len(others) > 1:
        raise UsageError(
            "only one device is compared with the CPU", got=",".join(names), try_=f"--devices cpu,{others[0]}"
        )
    return open_device(others[0] if others else "cpu" if names else "auto").device


def choose_precisions(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the requested precisions, or bf16 by default. Raise UsageError for an unknown precision."""
    for name in names or ():
        if name not in GRADIENT_BOUNDS:
            raise UsageError("unknown precision", got=name, try_=" or ".join(GRADIENT_BOUNDS))
    return ("bf16",) if names is None else tuple(dict.fromkeys(names))


def compare_devices(
    spec: TrainableSpec,
    *,
    devices: Sequence[str] = (),
    steps: int = 20,
    size: int | None = None,
    precisions: Sequence[str] | None = None,
    out: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ParityResult:
    """Train the same weights with the same batch and random draws on the CPU and on a device. Compare the results.

    docs/compare.md describes the comparison.
    """
    validate_compare_options(devices=devices, steps=steps, size=size, precisions=precisions, out=out)
    wanted, device = choose_precisions(precisions), choose_device(devices)
    replicas = ReplicaFactory(spec, batch_size=size)
    if device.is_cpu and replicas.dtypes - {torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in replicas.dtypes))
        raise UsageError(
            "on the CPU alone only a float32 model can be compared, with float64",
            got=f"weights in {names}",
            try_="--devices cpu,mps or cpu,cuda; or the model in float32",
        )
    parity, obstacles = _compare_training(replicas, device, steps=steps, progress=progress)
    progress(f"{device.kind}, the same steps twice ...")
    determinism = run_twice(replicas, device)
    results, notes = _compare_precisions(
        replicas, device, wanted, is_required=precisions is not None, progress=progress
    )
    wrong = [row.what for row in parity.rows if row.verdict == "differs"]
    differ = f"{', '.join(wrong)} differ: " if wrong else ""
    progress(f"{differ}checking every operator on {device.kind} ...")
    located = locate(
        replicas,
        device,
        # A wrong forward or backward pass is visible in the first step. The compared update consists of two steps.
        steps={"update": 2, "trajectory": steps}.get(wrong[0], 1) if wrong else 1,
        # If nothing else differs, an operator counts as wrong only if its error is far above rounding.
        least=0.0 if wrong else OPERATOR_BOUND,
        out=out,
    )
    if parity.why_not_float64 is not None:
        notes.append(f"the model does not run in float64: {parity.why_not_float64}")
    is_shown = bool(wrong or located.culprit or obstacles)
    if is_shown and located.unknown:
        notes.append(f"not checked, the CPU has no such operator: {', '.join(located.unknown)}")
    return ParityResult(
        name=spec.name,
        device=str(device.torch_device),
        reference=parity.reference,
        size=replicas.batch_size,
        steps=steps,
        num_draws=0 if replicas.draws is None else len(replicas.draws.drawn),
        rows=parity.rows,
        determinism=determinism,
        precisions=results,
        located=located if is_shown else None,
        obstacles=obstacles,
        notes=tuple(notes),
        is_virtual=device.is_virtual,
        is_precision_required=precisions is not None,
    )


def _compare_training(
    replicas: ReplicaFactory, device: AbstractDevice, *, steps: int, progress: Callable[[str], None]
) -> tuple[TrainingParity, tuple[str, ...]]:
    """Compare training with the CPU. Return the result, and the reasons why agreement cannot be judged."""
    obstacle = replicas.obstacle
    if obstacle is None:
        try:
            parity = compare_training(replicas, device, steps=steps, progress=progress)
        except UnrepeatableDrawError as error:
            replicas.draws = None
            obstacle = f"its random numbers cannot be repeated: {error}"
    if obstacle is not None:
        return TrainingParity(rows=(), reference="cpu float32"), (obstacle,)
    if not parity.rows:
        return parity, ("float32 was not compared with anything: no other device, no float64",)
    return parity, tuple(
        f"rounding alone changes {row.what} by {row.own_error:.1e} on the CPU: "
        f"a bound of {row.bound:.1e} would hide an error of 1 %"
        for row in parity.rows
        if row.verdict == "cannot judge"
    )


def _compare_precisions(
    replicas: ReplicaFactory,
    device: AbstractDevice,
    precisions: Sequence[str],
    *,
    is_required: bool,
    progress: Callable[[str], None],
) -> tuple[tuple[PrecisionResult, ...], list[str]]:
    results, notes = [], []
    for precision in precisions:
        progress(f"{precision} on {device.kind} ...")
        try:
            with replicas.on(device) as replica:
                loss, micro = replica.trainable.loss, replica.micro
                results.append(compare_precision(replica.model, loss, micro, device, precision))
        except UnrepeatableDrawError as error:
            notes.append(f"{precision} was not compared, the random numbers cannot be repeated: {error}")
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if is_required:
                what = f"the model does not run in {precision} on {device.kind}"
                raise WhetError(what, got=first_line(error)) from error
            notes.append(f"the model does not run in {precision} on {device.kind}")
    return tuple(results), notes
