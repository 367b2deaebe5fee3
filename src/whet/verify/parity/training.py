"""Train identical replicas of a model on two devices, and compare the results."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError, first_line
from whet.base.model import FrozenModel
from whet.data.batch import MicroBatch
from whet.device.abstract import AbstractDevice
from whet.device.cpu import CpuDevice
from whet.device.rng import preserve_rng, seed_everything
from whet.step.optimizers import build_optimizer
from whet.step.step import Outcome, Stepper
from whet.verify.draws import RecordedDraws, UnrepeatableDrawError
from whet.verify.isolation import disable_dropout, force_eager, perturb_zero_weights
from whet.verify.tolerance import CPU_ERROR_FACTOR, RelativeError, error_bound, relative_error, relative_errors
from whet.verify.trainable import Trainable, TrainableSpec

# Minimum bounds. Errors up to these count as agreement, even if the CPU is more accurate.
MIN_BOUNDS = {"loss": 1e-4, "gradients": 1e-4, "draws": 1e-4, "buffers": 1e-4, "update": 1e-4, "trajectory": 1e-2}
# Bounds if the reference is float32, in which case the error of the CPU is unknown.
BOUNDS_WITHOUT_FLOAT64 = {
    "loss": 1e-4, "gradients": 1e-3, "draws": 1e-4, "buffers": 1e-4, "update": 1e-2, "trajectory": 5e-2
}  # fmt: skip
# Maximum useful bounds. A wider bound would hide an error of 1 %, so nothing is concluded from it. The bound of the
# trajectory is wider, because the other rows detect an operator that is wrong from the start.
MAX_BOUNDS = {"loss": 5e-3, "gradients": 5e-3, "draws": 5e-3, "buffers": 5e-3, "update": 1e-2, "trajectory": 5e-2}
_SEED = 0
# Default limit of the batch size. A few samples are enough to detect a wrong operator.
_MAX_DEFAULT_SAMPLES = 32

# --- replicas ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A fresh copy of the model on a device, with its batch."""

    trainable: Trainable
    micro: MicroBatch
    device: AbstractDevice
    draws: RecordedDraws | None = None
    """Random draws that every step repeats, or None if each step makes its own."""

    @property
    def model(self) -> nn.Module:
        return self.trainable.model

    def optimizer(self) -> Optimizer:
        """Create the optimizer that training on this device would use."""
        return build_optimizer(self.trainable.optimizer, self.model, self.device)

    def stepper(self, optimizer: Optimizer) -> Stepper:
        return Stepper(self.model, optimizer, self.device)

    def step(self, stepper: Stepper, number: int = 1) -> Outcome:
        """Run one optimizer step on the whole batch."""
        with nullcontext() if self.draws is None else self.draws.record_or_repeat():
            return stepper(self.trainable.loss, [self.micro], num_samples=len(self.micro), step=number)


class ReplicaFactory:
    """Creates replicas that have the same weights, batch and random draws, and differ only in device and dtype."""

    def __init__(self, spec: TrainableSpec, *, batch_size: int | None = None) -> None:
        self._spec = spec
        with preserve_rng(CpuDevice()):
            seed_everything(_SEED)
            first = spec.make()
        if batch_size is not None and batch_size != first.batch_size and not first.is_scalable:
            raise UsageError(
                "this model's inputs cannot be resized",
                got=f"--size {batch_size}",
                try_=f"--size {first.batch_size}",
            )
        default = min(first.batch_size, _MAX_DEFAULT_SAMPLES) if first.is_scalable else first.batch_size
        self.micro = first.make_batch(batch_size or default)
        # The dataset may contain fewer samples than requested.
        self.batch_size = len(self.micro)
        if not any(parameter.requires_grad for parameter in first.model.parameters()):
            raise UsageError(
                "the model has no trainable parameters",
                got="no trainable parameter",
                try_="a model with trainable weights",
            )
        # Zero weights would hide the errors of all earlier layers.
        perturb_zero_weights(first.model)
        self.dtypes = {p.dtype for p in first.model.parameters() if p.is_floating_point()}
        self._weights = {name: tensor.detach().clone() for name, tensor in _named_tensors(first.model)}
        self.draws: RecordedDraws | None = RecordedDraws()
        """Random draws that all steps repeat, or None if they cannot be repeated."""
        self.obstacle = self._record_draws()
        """The reason why computations of this model cannot be compared, or None if they can."""

    def _record_draws(self) -> str | None:
        """Record the random draws of a step on the CPU, and repeat the step.

        Return None if the loss and gradients are the same, otherwise the reason why the model cannot be compared.
        """
        passes: list[dict[str, Tensor]] = []
        try:
            for _ in range(2):
                with self.on(CpuDevice()) as replica:
                    outcome = replica.step(replica.stepper(torch.optim.SGD(replica.model.parameters(), lr=0.0)))
                    named = replica.model.named_parameters()
                    tensors = {name: _copy(p.grad) for name, p in named if p.grad is not None}
                    passes.append({"the loss": _copy(outcome.loss), **tensors})
        except UnrepeatableDrawError as error:
            self.draws = None
            return f"its random numbers cannot be repeated: {error}"
        if not bool(passes[0]["the loss"].isfinite()):
            return f"its loss on the CPU is {float(passes[0]['the loss'])}"
        difference = max(relative_errors(passes[1], passes[0]).values())
        if difference <= MIN_BOUNDS["loss"]:
            return None
        # The number of draws may also depend on the part that is not repeated.
        self.draws = None
        return (
            f"two passes on the CPU differ by {difference:.1e}, from the same weights, samples and draws: "
            "it draws from a generator that torch does not know, or keeps state of its own"
        )

    @contextmanager
    def on(self, device: AbstractDevice, *, float64: bool = False, dropout: bool = False) -> Iterator[Replica]:
        """Yield a replica on a device, in its original dtypes or in float64.

        TF32 is disabled inside the context. Random generators are restored on exit. With `dropout`, every step makes
        its own draws. Otherwise, every step repeats the recorded draws, and dropout inside the kernels of attention and
        recurrent layers is disabled, because its draws cannot be recorded.
        """
        with ExitStack() as stack:
            stack.enter_context(preserve_rng(device))
            stack.enter_context(force_eager())
            stack.enter_context(device.preserve_precision())
            device.use_precision("fp32")
            seed_everything(_SEED)
            trainable = self._spec.make()
            with torch.no_grad():
                for name, tensor in _named_tensors(trainable.model):
                    tensor.copy_(self._weights[name])
            if float64:
                trainable.model.double()
                # Tensors that the model creates must be float64 too.
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            device.put_model(trainable.model)
            trainable.model.train()
            if not dropout:
                stack.enter_context(disable_dropout(trainable.model, only_fused=True))
            seed_everything(_SEED)

            def put(tensor: Tensor) -> Tensor:
                return device.put(tensor.double() if float64 and tensor.is_floating_point() else tensor)

            def loss(micro: MicroBatch) -> Any:
                # Clone the inputs, because a model may write to them, and real training has new inputs in every step.
                return own_loss(micro.map_tensors(torch.clone))

            own_loss, trainable = trainable.loss, replace(trainable, loss=loss)
            draws = None if dropout else self.draws
            yield Replica(trainable=trainable, micro=self.micro.map_tensors(put), device=device, draws=draws)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


# --- comparison -------------------------------------------------------------------------------------------------------


Verdict = Literal["agrees", "differs", "cannot judge"]


class ParityRow(FrozenModel):
    """The comparison of one quantity, such as the loss or all gradients, with its error and bound."""

    what: str
    error: RelativeError
    bound: RelativeError
    own_error: RelativeError | None = None
    """Error of the CPU in the dtype of the device, compared with float64, or None if unknown."""
    worst: str | None = None
    """Tensor with the largest error, or None if there is only one."""
    num_tensors: int = 1
    steps: int | None = None
    """Number of compared steps. Later ones are excluded because of rounding errors. None except for the trajectory."""

    @property
    def verdict(self) -> Verdict:
        # NaN exceeds every bound.
        if not math.isfinite(self.error):
            return "differs"
        if not self.bound <= MAX_BOUNDS[self.what]:
            return "cannot judge"
        return "agrees" if self.error <= self.bound else "differs"

    @property
    def agrees(self) -> bool:
        return self.verdict == "agrees"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTrace:
    """All compared quantities of one device, copied to the CPU."""

    parts: dict[str, dict[str, Tensor]]
    """Named tensors by quantity: the loss, gradients, parameters of random draws, buffers, and the update."""
    trajectory: Tensor
    """Losses of several steps, (steps,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParity:
    """The comparisons of all quantities, and the reference that was used."""

    rows: tuple[ParityRow, ...]
    reference: str
    why_not_float64: str | None = None
    """The reason why the model does not run in float64, or None if it does."""


def compare_training(
    replicas: ReplicaFactory, device: AbstractDevice, *, steps: int, progress: Callable[[str], None] = lambda _: None
) -> TrainingParity:
    """Compare a device with the CPU in float64, or in float32 if the model does not run in float64."""
    cpu, why_not = CpuDevice(), None
    progress("float64 on the CPU ...")
    try:
        reference = record_training(replicas, cpu, steps=steps, float64=True)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        why_not = first_line(error)
    progress("float32 on the CPU ...")
    float32 = record_training(replicas, cpu, steps=steps, gradients=None if why_not else reference.parts["gradients"])
    scale = 1.0
    if why_not is not None:
        reference = float32
    else:
        scale = _weight_scale(float32, reference)
        if scale < 1:
            for one, float64 in ((reference, True), (float32, False)):
                gradients = reference.parts["gradients"]
                one.parts["update"] = record_update(replicas, cpu, gradients, float64=float64, scale=scale)
    if device.is_cpu:
        rows = () if why_not else _rows(float32, reference, cpu_float32=None)
    else:
        progress(f"{device.kind} ...")
        gradients = reference.parts["gradients"]
        actual = record_training(replicas, device, steps=steps, gradients=gradients, scale=scale)
        rows = _rows(actual, reference, cpu_float32=None if why_not else float32)
    return TrainingParity(rows=rows, reference="cpu float32" if why_not else "cpu float64", why_not_float64=why_not)


def _weight_scale(float32: TrainingTrace, reference: TrainingTrace) -> float:
    """Return a factor, a power of two, by which to multiply the weights before the compared update.

    With a small learning rate, an update is hardly larger than the rounding error of the weights, which would hide
    errors. Smaller weights have smaller rounding errors.
    """
    error = max(relative_errors(float32.parts["update"], reference.parts["update"]).values(), default=0.0)
    if not math.isfinite(error) or error_bound(0.0, error) <= MAX_BOUNDS["update"]:
        return 1.0
    return 2.0 ** -math.ceil(math.log2(CPU_ERROR_FACTOR * error / MIN_BOUNDS["update"]))


def record_training(
    replicas: ReplicaFactory,
    device: AbstractDevice,
    *,
    steps: int,
    float64: bool = False,
    gradients: Mapping[str, Tensor] | None = None,
    scale: float = 1.0,
) -> TrainingTrace:
    """Record all compared quantities on one device. The update uses `gradients`, or by default the replica's own."""
    with replicas.on(device, float64=float64) as replica:
        # With a learning rate of 0, the code of real training runs only a forward and backward pass.
        stepper = replica.stepper(torch.optim.SGD(replica.model.parameters(), lr=0.0))
        loss = {"loss": _copy(replica.step(stepper).loss)}
        own = {name: _copy(p.grad) for name, p in replica.model.named_parameters() if p.grad is not None}
        buffers = {name: _copy(b) for name, b in replica.model.named_buffers() if b.is_floating_point()}
        draws = {} if replicas.draws is None else replicas.draws.parameters
    update = record_update(replicas, device, gradients or own, float64=float64, scale=scale)
    losses: list[Tensor] = []
    with replicas.on(device, float64=float64) as replica:
        stepper = replica.stepper(replica.optimizer())
        for number in range(1, steps + 1):
            try:
                losses.append(_copy(replica.step(stepper, number).loss))
            except UnrepeatableDrawError:
                # The draws differ between steps. Only the steps before this one are compared.
                if number == 1:
                    raise
                break
    parts = {"loss": loss, "gradients": own, "draws": draws, "buffers": buffers, "update": update}
    return TrainingTrace(parts=parts, trajectory=torch.stack(losses))


def record_update(
    replicas: ReplicaFactory,
    device: AbstractDevice,
    gradients: Mapping[str, Tensor],
    *,
    float64: bool = False,
    scale: float = 1.0,
) -> dict[str, Tensor]:
    """Run two optimizer steps with the given gradients, and return the change of the weights in float64.

    The weights are first multiplied by `scale`. All devices use the same gradients, because an adaptive optimizer
    amplifies rounding in an almost zero gradient to a full step.
    """
    with replicas.on(device, float64=float64) as replica:
        optimizer = replica.optimizer()
        named = {name: p for name, p in replica.model.named_parameters() if name in gradients}
        with torch.no_grad():
            for parameter in named.values():
                parameter.mul_(scale)
        before = {name: _copy(p) for name, p in named.items()}
        for name, parameter in named.items():
            parameter.grad = device.put(gradients[name].float().to(parameter.dtype))
        with device.compute_context(is_step=True):
            for _ in range(2):
                optimizer.step()
        return {name: _copy(p).double() - before[name].double() for name, p in named.items()}


def _rows(
    actual: TrainingTrace, reference: TrainingTrace, *, cpu_float32: TrainingTrace | None
) -> tuple[ParityRow, ...]:
    minimums = BOUNDS_WITHOUT_FLOAT64 if cpu_float32 is None else MIN_BOUNDS
    rows = []
    for what, expected in reference.parts.items():
        if not expected and not actual.parts[what]:
            continue
        errors = relative_errors(actual.parts[what], expected)
        own_error = None
        if cpu_float32 is not None:
            own_error = max(relative_errors(cpu_float32.parts[what], expected).values(), default=0.0)
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        rows.append(
            ParityRow(
                what=what,
                error=errors[worst],
                bound=error_bound(minimums[what], own_error),
                own_error=own_error,
                worst=worst if len(errors) > 1 else None,
                num_tensors=len(errors),
            )
        )
    return (*rows, _trajectory_row(actual, reference, cpu_float32, minimums["trajectory"]))


def _trajectory_row(
    actual: TrainingTrace, reference: TrainingTrace, cpu_float32: TrainingTrace | None, minimum: float
) -> ParityRow:
    """Compare the losses of several steps, until rounding on the CPU, which training amplifies, is too large."""
    traces = [trace.trajectory for trace in (actual, reference, cpu_float32) if trace is not None]
    count, own_error = min(len(trace) for trace in traces), None
    if cpu_float32 is not None:
        errors = [relative_error(cpu_float32.trajectory[:n], reference.trajectory[:n]) for n in range(1, count + 1)]
        count = sum(error_bound(minimum, max(errors[:n])) <= MAX_BOUNDS["trajectory"] for n in range(1, count + 1)) or 1
        own_error = max(errors[:count])
    return ParityRow(
        what="trajectory",
        error=relative_error(actual.trajectory[:count], reference.trajectory[:count]),
        bound=error_bound(minimum, own_error),
        own_error=own_error,
        steps=count,
    )


def _copy(tensor: Tensor) -> Tensor:
    # Clone, because .cpu() of a CPU tensor returns the tensor itself, which later steps modify.
    return tensor.detach().cpu().clone()
