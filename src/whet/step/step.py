"""One optimizer step: forward, backward, normalize, clip, NaN guard, update, EMA.

Nothing here waits for the device or reads the value of a tensor, so that a step can be captured and replayed. The
exception is a checked step, which verifies the loss and the gradient before the update.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import WhetError
from whet.data.batch import MicroBatch
from whet.device.abstract import HALF_TYPES, AbstractDevice, Mark
from whet.distributed.strategies import ParallelStrategy
from whet.step.ema import Ema
from whet.step.loss import MicroLoss, clamp_weight, loss_scalars, parse_loss
from whet.step.optimizer_kernels import gradient_obstacle, update

NORM_EVERY = 16
"""Number of steps between two computations of the gradient norm if gradients are not clipped.

Computing it in every step would take 3 to 5 % of a small step on a CPU. A captured step (number 0) never computes it,
because every replay would compute it too.
"""

_FOREACH_DEVICES = ("cpu", "cuda")
"""Devices on which torch's foreach functions process many tensors in one call."""

Phase = tuple[str, Mark, Mark]
"""The name of a phase of a step, with its start and end on the device's clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a step. Tensors stay on the device until they are read."""

    loss: Tensor
    grad_norm: Tensor | None
    marks: tuple[Phase, ...]
    is_skipped: bool = False
    """Whether the NaN guard skipped the step. The loss is then NaN."""
    is_manual: bool = False
    """Whether the user's own code performed the step (`session.manual`)."""
    has_loss: bool = True
    """False for a manual step without `session.log_loss`. The loss is then NaN and is not logged."""
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    """Other scalars that the loss function returned, which are logged with the step."""


class NonFiniteError(Exception):
    """Raised before the update if the loss or the gradient of a checked step is NaN or Inf."""


class WrongReplayError(Exception):
    """Raised if a replayed step differs from eager execution. The weights have changed."""


class Stepper:
    """Runs the optimizer steps of one model on one device."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: AbstractDevice,
        *,
        precision: str = "fp32",
        loss_scaling: str = "off",
        clip: float | None = None,
        ema: Ema | None = None,
        strategy: ParallelStrategy | None = None,
        other_parameters: Sequence[nn.Parameter] = (),
    ) -> None:
        """Create a stepper for `optimizer`. `other_parameters` belong to other optimizers and get no gradient."""
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.scaler = _make_scaler(device, loss_scaling)
        self._scales_loss = self.scaler.is_enabled()
        self.ema = ema
        self.strategy = strategy or ParallelStrategy()
        self.is_updating = False
        """Whether an update is in progress, in which case some of the weights may have changed."""
        self.graph_obstacle: str | None = None
        """The reason why steps are not captured despite graph=on; None if there is none."""
        self.is_launch_bound: bool | None = None
        """Whether launching kernels takes most of a step; None if that is not known yet."""
        self.launch_share: float | None = None
        """The fraction of a step that launching its kernels took; None if it was not timed."""
        self.restore_kernels: Callable[[], None] | None = None
        """Restores the kernels of the user's optimizer; None if the plan has not selected other kernels."""
        self.kernel_obstacle: str | None = None
        """The reason why the optimizer has its own kernels again despite the plan; None if there is none."""
        self._precision = precision
        self._clip = clip
        self._follow_groups()
        self._other_parameters = tuple(other_parameters)
        # The first backward pass determines both.
        self._has_gradients = self._can_clip_foreach = False
        self._has_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
        """Whether gradients may be sparse, as with nn.Embedding(sparse=True)."""

    def __call__(
        self,
        loss: MicroLoss,
        micro_batches: Iterable[MicroBatch],
        *,
        num_samples: int,
        step: int,
        is_checked: bool = False,
    ) -> Outcome:
        """Run step number `step` (counted from 1) on all micro-batches of one global batch of `num_samples`.

        A checked step waits for the device and raises NonFiniteError before a NaN or Inf can reach the weights.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len(parameters) != len(self._in_groups) or not all(map(operator.is_, parameters, self._in_groups)):
            self._follow_groups()
        with self.device.compute_context(is_step=True), self._freeze_others():
            return self._step(loss, micro_batches, num_samples=num_samples, step=step, is_checked=is_checked)

    def _follow_groups(self) -> None:
        """Read the optimizer's parameters again: a resume or the user (weight_norm) may have replaced them."""
        self._in_groups = [p for group in self.optimizer.param_groups for p in group["params"]]
        # Use the order of the model, as loops that clip model.parameters() do: it affects how the sum of the norm is
        # rounded.
        positions = {parameter: position for position, parameter in enumerate(self.model.parameters())}
        self._parameters = sorted(self._in_groups, key=lambda p: positions.get(p, len(positions)))

    def _freeze_others(self) -> AbstractContextManager[object]:
        """Return a context manager that sets requires_grad=False on the parameters of other optimizers."""
        return _frozen(self._other_parameters) if self._other_parameters else _NOTHING

    def _step(
        self,
        loss: MicroLoss,
        micro_batches: Iterable[MicroBatch],
        *,
        num_samples: int,
        step: int,
        is_checked: bool = False,
        has_update: bool = True,
        mark: Callable[[], Mark] | None = None,
    ) -> Outcome:
        """Run a step. Without `has_update`, only compute the loss and the clipped gradients."""
        mark = mark or self.device.mark
        self.zero_grad()
        # 1. Accumulate the gradients of all micro-batches in .grad.
        scalars: dict[str, Tensor] = {}
        loss_sum, weight_sum, marks = self._forward_backward(
            loss, micro_batches, num_samples=num_samples, mark=mark, scalars=scalars
        )
        # 2. Sum loss and weight over all ranks. The last backward pass has already summed the gradients.
        if not self.strategy.is_single_process:
            loss_sum, weight_sum = self.strategy.totals(loss_sum, weight_sum)
        if not self._has_gradients:
            self._check_has_gradients(step)
        # 3. Undo the loss scaling before the gradients are read.
        if self._scales_loss:
            self.scaler.unscale_(self.optimizer)
        if weight_sum is not None:
            # The total weight of all micro-batches is not known earlier.
            correction = loss_sum.new_full((), num_samples) / clamp_weight(weight_sum)
            self._scale_gradients(correction)
            loss_sum = loss_sum * correction
        # 4. Clip, or compute the norm every NORM_EVERY steps.
        grad_norm = self._clip_gradients(step)
        # 5. Check the loss before any weight changes. This waits for the device, so only some steps are checked.
        if is_checked:
            self._check_finite(loss_sum)
        # 6. Update. If a step fails from here on, only a checkpoint can restore the weights.
        if has_update:
            self._update(step)
            marks.append(("optimizer", marks[-1][2], mark()))
        return Outcome(loss=loss_sum, grad_norm=grad_norm, marks=tuple(marks), scalars=scalars)

    def _update(self, step: int) -> None:
        """Update the weights with the optimizer, then their moving average."""
        self.is_updating = True
        if self._scales_loss:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            update(self.optimizer)
        if self.ema is not None:
            self._update_ema(self.ema, step)
        self.is_updating = False

    def _forward_backward(
        self,
        loss: MicroLoss,
        micro_batches: Iterable[MicroBatch],
        *,
        num_samples: int,
        mark: Callable[[], Mark],
        scalars: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | float | None, list[Phase]]:
        """Accumulate the gradients of all micro-batches, and add the other scalars that the loss returns to `scalars`.

        Return the loss, the sum of weights (None if it is not needed) and the phases.
        """
        strategy, marks = self.strategy, []
        loss_sum: Tensor | None = None
        weight_sum: Tensor | float | None = None
        start = mark()
        # Only a run with several ranks needs to know the last micro-batch in advance: it triggers the gradient
        # exchange.
        for loaded_micro, is_last in (
            zip(micro_batches, repeat(True)) if strategy.is_single_process else mark_last(micro_batches)
        ):
            moved = loaded = mark()
            micro = loaded_micro
            marks.append(("data", start, loaded))
            if not micro.is_on_device:
                micro = micro.map_tensors(self.device.put)
                moved = mark()
                marks.append(("transfer", loaded, moved))
            # With several ranks, the total weight is not known yet.
            is_whole = len(micro.ids) == num_samples and strategy.is_single_process
            with strategy.micro_batch_context(is_last=is_last):
                if self._precision in HALF_TYPES:
                    with self.device.autocast(self._precision):
                        returned = strategy.call(loss, micro)
                else:
                    returned = strategy.call(loss, micro)
                total, weight = parse_loss(returned)
                if weight is None:
                    # A mean over the micro-batch, weighted by its share of the global batch.
                    part = total if is_whole else total * (micro.is_counted * len(micro) / num_samples)
                elif is_whole:
                    part = total / clamp_weight(weight)
                else:
                    # A sum: divide it by the number of samples now, and correct it by the total weight later.
                    part, weight = (total / num_samples, weight) if micro.is_counted else (total * 0.0, weight * 0.0)
                    weight_sum = weight if weight_sum is None else weight_sum + weight
                forwarded = mark()
                scaled = self.scaler.scale(part) if self._scales_loss else part
                scaled.backward(strategy.seed(scaled))
            loss_sum = part.detach() if loss_sum is None else loss_sum + part.detach()
            if strategy.is_single_process and not isinstance(returned, Tensor):
                _add_scalars(scalars, returned, share=len(micro) / num_samples)
            done = mark()
            marks += [("forward", moved, forwarded), ("backward", forwarded, done)]
            start = done
        assert loss_sum is not None, "a global batch has at least one micro-batch"
        return loss_sum, weight_sum, marks

    # --- between steps -----------------------------------------------------------------------------------------------

    def use_precision(self, precision: str, *, loss_scaling: str) -> None:
        """Change the precision of forward and backward. Call this only before the first step."""
        self._precision = precision
        self.scaler = _make_scaler(self.device, loss_scaling)
        self._scales_loss = self.scaler.is_enabled()
        self.device.use_precision(precision)

    def has_finite_weights(self) -> bool:
        """Return whether all trained weights are finite. Waits for the device once."""
        finite = [parameter.detach().isfinite().all() for parameter in self._parameters]
        return bool(self.strategy.full(torch.stack(finite).all()))

    def abort(self) -> None:
        """Discard the gradients and scaler state of an unfinished step. The caller restores the weights."""
        self.is_updating = False
        self.zero_grad()
        if self._scales_loss:
            # The scaler records that the gradients are unscaled, and only update() resets that.
            self.scaler._per_optimizer_states.clear()

    def release_graphs(self, reason: str) -> None:
        """Free captured graphs and run eagerly from now on. Does nothing for steps that are always eager."""

    def use_own_kernels(self, reason: str) -> None:
        """Restore the kernels that the user's optimizer had before the session."""
        if self.restore_kernels is not None:
            self.restore_kernels()
            self.restore_kernels, self.kernel_obstacle = None, reason

    # --- gradients ---------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Clear the gradients like Optimizer.zero_grad, but without its profiler hooks, which take 12 us."""
        if getattr(self.optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none=True)
            return
        # Read the current groups: gradients of a group that was added later must not accumulate either.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _check_has_gradients(self, step: int) -> None:
        """Raise after the first backward pass if the loss reaches no parameter: training would have no effect."""
        if all(parameter.grad is None for parameter in self._parameters):
            raise WhetError(
                "the loss does not depend on any parameter of the optimizer",
                got="no gradient after the backward pass",
                try_="a loss computed from this model's output, without detach()",
            )
        self._has_gradients = True
        self._has_sparse = self._has_sparse or any(p.grad is not None and p.grad.is_sparse for p in self._parameters)
        self._can_clip_foreach = can_clip_foreach(self._parameters)
        if self.restore_kernels is not None:
            obstacle = gradient_obstacle(self.optimizer, self._parameters, is_resumed=step > 1)
            if obstacle is not None:
                self.use_own_kernels(obstacle)

    @torch.no_grad()
    def _scale_gradients(self, factor: Tensor) -> None:
        gradients = [self.strategy.local(p.grad) for p in self._parameters if p.grad is not None]
        gradients = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for dtype, same in by_dtype.items():
            torch._foreach_mul_(same, factor.to(dtype))

    def _clip_gradients(self, step: int) -> Tensor | None:
        """Clip the gradients if configured. Return the gradient norm; None if it was not computed."""
        if self._clip is not None and self._has_sparse:
            return self._clip_sparse(self._clip)
        if self._clip is not None:
            clip = clip_foreach if self._can_clip_foreach else nn.utils.clip_grad_norm_
            return self.strategy.full(clip(self._parameters, self._clip))
        return self._grad_norm() if step and step % NORM_EVERY == 0 else None

    def _grad_norm(self) -> Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._has_sparse:
            # torch has no norm for sparse tensors. Rows that occur twice count as their sum.
            gradients = [gradient.coalesce()._values() if gradient.is_sparse else gradient for gradient in gradients]
        return self.strategy.full(nn.utils.get_total_norm(gradients))

    @torch.no_grad()
    def _clip_sparse(self, max_norm: float) -> Tensor:
        """Clip sparse gradients, which clip_grad_norm_ does not support, by the same rule."""
        norm = self._grad_norm()
        self._scale_gradients(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def _check_finite(self, loss: Tensor) -> None:
        if not bool(loss.isfinite()):
            raise NonFiniteError(f"the loss is {float(loss)}")
        if not bool(self._grad_norm().isfinite()):
            raise NonFiniteError(f"the loss is {float(loss):.4g}, and the gradient is not finite")

    def _update_ema(self, ema: Ema, step: int) -> None:
        ema.update(step)


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Set requires_grad=False on these parameters inside the `with` block.

    backward(inputs=...) is no alternative: it would lose gradients with reentrant checkpointing.
    """
    changed = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in changed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)


_NOTHING = nullcontext()


def _add_scalars(scalars: dict[str, Tensor], returned: Any, *, share: float) -> None:
    """Add the scalars that a loss returned, weighted by `share`, to their means over the micro-batches of a step."""
    for name, value in loss_scalars(returned).items():
        scalars[name] = value * share if name not in scalars else scalars[name] + value * share


def _make_scaler(device: AbstractDevice, loss_scaling: str) -> torch.amp.GradScaler:
    """Return the loss scaler, which is disabled if loss scaling is off."""
    return torch.amp.GradScaler(device.torch_device.type, enabled=loss_scaling == "dynamic")


def mark_last(micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    """Yield each micro-batch with a flag that is True for the last one."""
    ahead: MicroBatch | None = None
    for micro in micro_batches:
        if ahead is not None:
            yield ahead, False
        ahead = micro
    if ahead is not None:
        yield ahead, True


def can_clip_foreach(parameters: Sequence[Tensor]) -> bool:
    """Return whether all parameters are plain tensors of one dtype on one device with foreach kernels."""
    first = parameters[0]
    are_plain = all(type(p) in (nn.Parameter, Tensor) for p in parameters)
    are_alike = all((p.device, p.dtype) == (first.device, first.dtype) for p in parameters)
    return are_plain and are_alike and first.device.type in _FOREACH_DEVICES


def clip_foreach(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip gradients with bitwise the same result as clip_grad_norm_, but without regrouping them in every step."""
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    if not gradients:
        return torch.tensor(0.0)
    is_recording = torch.is_grad_enabled()
    # The decorator torch.no_grad makes nine calls of Python code.
    torch.set_grad_enabled(False)
    try:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    finally:
        torch.set_grad_enabled(is_recording)
    return norm
