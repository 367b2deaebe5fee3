"""One optimizer step: forward, backward, clip, update, EMA.

Nothing here waits for the device or reads a tensor's value, so that a step can be captured and replayed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import WhetError
from whet.data.batch import MicroBatch
from whet.device.abstract import AbstractDevice, Mark
from whet.distributed.strategies import ParallelStrategy
from whet.step.ema import Ema
from whet.step.loss import LossFunction, clamp_weight, parse_loss

_FOREACH_DEVICES = ("cpu", "cuda")
"""Where torch computes many tensors in one call; elsewhere it takes them one by one."""


def can_clip_foreach(parameters: Sequence[Tensor]) -> bool:
    """Whether these are plain, of one dtype and on one device that computes many tensors in one call."""
    first = parameters[0]
    are_plain = all(type(p) in (nn.Parameter, Tensor) for p in parameters)
    are_alike = all((p.device, p.dtype) == (first.device, first.dtype) for p in parameters)
    return are_plain and are_alike and first.device.type in _FOREACH_DEVICES


@torch.no_grad()
def clip_foreach(parameters: Sequence[Tensor], most: float) -> Tensor:
    """Makes all gradients smaller by one factor if their norm is over `most`; the norm before."""
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    if not gradients:
        return torch.tensor(0.0)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    torch._foreach_mul_(gradients, torch.clamp(most / (norm + 1e-6), max=1.0))
    return norm


NORM_EVERY = 16
"""Without clipping the norm of the gradient is taken in one step of so many: in every step it cost 3 to 5 % of small
steps on a CPU. Not in a captured one (step 0), which would take it in every replay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a step left behind; tensors stay on the device until somebody reads them."""

    loss: Tensor
    grad_norm: Tensor | None
    marks: tuple[tuple[str, Mark, Mark], ...]
    """Phases with their start and end, for those who want to know where the time went."""


class NonFiniteError(Exception):
    """A step whose loss or gradient is not finite, noticed before its update."""


class WrongReplayError(Exception):
    """A step that was replayed has computed something else than its code says; the weights have changed."""


class Stepper:
    """Makes optimizer steps with one model, one optimizer and one device."""

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
        joining: ParallelStrategy | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.scaler = device.scaler(loss_scaling)
        self.ema = ema
        self.joining = joining or ParallelStrategy()
        self.is_updating = False
        """Whether weights may have changed although the step is not done."""
        self.refusal: str | None = None
        """Why steps are not captured although that was planned, in words."""
        self._has_gradients = self._clips_at_once = False
        self._precision = precision
        self._clip = clip
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(
        self,
        loss: LossFunction,
        micro_batches: Iterable[MicroBatch],
        *,
        num_samples: int,
        step: int,
        is_careful: bool = False,
    ) -> Outcome:
        """Makes step number `step` (counted from 1) from all micro-batches of one global batch.

        A careful step waits for the device and looks at the numbers before they change any weight.
        """
        with self.device.computing(is_step=True):
            return self._step(loss, micro_batches, num_samples=num_samples, step=step, is_careful=is_careful)

    def _step(
        self,
        loss: LossFunction,
        micro_batches: Iterable[MicroBatch],
        *,
        num_samples: int,
        step: int,
        is_careful: bool = False,
        mark: Callable[[], Mark] | None = None,
    ) -> Outcome:
        mark, marks = mark or self.device.mark, []
        self._drop_gradients()

        loss_sum: Tensor | None = None
        weight_sum: Tensor | float | None = None
        is_whole = True
        start = mark()
        for made, is_last in zip(micro_batches, repeat(True)) if self.joining.is_alone else mark_last(micro_batches):
            loaded = mark()
            micro = made if made.is_there else made.moved(self.device.put)
            moved = mark()
            # Of several processes none can divide by the weights of all.
            is_whole = len(micro) == num_samples and self.joining.is_alone
            with self.joining.computing(is_last=is_last):
                with self.device.autocast(self._precision):
                    total, weight = parse_loss(self.joining.call(loss, micro))
                if weight is None:
                    # A mean over the micro-batch: its share of the global batch is known beforehand.
                    part = total if is_whole else total * (micro.counts * len(micro) / num_samples)
                elif is_whole:
                    part = total / clamp_weight(weight)
                else:
                    # A sum: over the samples for now, over all weights once they are known.
                    part, weight = (total / num_samples, weight) if micro.counts else (total * 0.0, weight * 0.0)
                    weight_sum = weight if weight_sum is None else weight_sum + weight
                forwarded = mark()
                scaled = self.scaler.scale(part)
                scaled.backward(self.joining.seed(scaled))
            loss_sum = part.detach() if loss_sum is None else loss_sum + part.detach()
            done = mark()
            marks += [
                ("data", start, loaded),
                ("transfer", loaded, moved),
                ("forward", moved, forwarded),
                ("backward", forwarded, done),
            ]
            start = done
        assert loss_sum is not None, "a global batch has at least one micro-batch"

        loss_sum, weight_sum = self.joining.totals(loss_sum, weight_sum)
        if not self._has_gradients:
            self._refuse_no_gradients()
            self._clips_at_once = can_clip_foreach(self._parameters)
        self.scaler.unscale_(self.optimizer)
        if weight_sum is not None:
            correction = loss_sum.new_full((), num_samples) / clamp_weight(weight_sum)
            self._scale_gradients(correction)
            loss_sum = loss_sum * correction
        grad_norm = None
        if self._clip is not None:
            grad_norm = self._clip_gradients(self._clip)
        elif step and step % NORM_EVERY == 0:
            grad_norm = self._norm()
        if is_careful:
            self._refuse_nonfinite(loss_sum)
        self.is_updating = True
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self._average(self.ema, step)
        self.is_updating = False
        marks.append(("optimizer", start, mark()))
        return Outcome(loss=loss_sum, grad_norm=grad_norm, marks=tuple(marks))

    def _average(self, ema: Ema, step: int) -> None:
        ema.update(step)

    def use_precision(self, precision: str, *, loss_scaling: str) -> None:
        """Another number format for the steps to come; only before the first one."""
        self._precision = precision
        self.scaler = self.device.scaler(loss_scaling)
        self.device.use_precision(precision)

    def has_finite_weights(self) -> bool:
        """Whether all weights that are trained are numbers; waits for the device, once."""
        verdicts = [parameter.detach().isfinite().all() for parameter in self._parameters]
        return bool(self.joining.whole(torch.stack(verdicts).all()))

    def forget(self) -> None:
        """Lets go of what a step that was not finished left behind; the weights are the caller's to put back."""
        self.is_updating = False
        self._drop_gradients()
        if self.scaler.is_enabled():
            # It would say that this step's gradients are unscaled already; only update() empties it otherwise.
            self.scaler._per_optimizer_states.clear()

    def release(self, why: str) -> None:
        """Gives back what is kept between steps besides weights and the optimizer's state."""

    def _refuse_no_gradients(self) -> None:
        """At the first step: a loss that reaches no parameter would train nothing, without a word."""
        if all(parameter.grad is None for parameter in self._parameters):
            raise WhetError(
                "the loss reaches no parameter of the optimizer",
                got="no gradient after the backward pass",
                try_="a loss computed from this model's output, without detach()",
            )
        self._has_gradients = True

    def _refuse_nonfinite(self, loss: Tensor) -> None:
        if not bool(loss.isfinite()):
            raise NonFiniteError(f"the loss is {float(loss)}")
        if not bool(self._norm().isfinite()):
            raise NonFiniteError(f"the loss is {float(loss):.4g}, and the gradient is not finite")

    def _drop_gradients(self) -> None:
        """As the optimizer's own zero_grad does, which tells the profiler first: 12 us."""
        if getattr(self.optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none=True)
            return
        # Not of those at the start: a gradient that nobody drops would add up from step to step.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _clip_gradients(self, most: float) -> Tensor:
        clip = clip_foreach if self._clips_at_once else nn.utils.clip_grad_norm_
        return self.joining.whole(clip(self._parameters, most))

    def _norm(self) -> Tensor:
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        return self.joining.whole(norm)

    @torch.no_grad()
    def _scale_gradients(self, factor: Tensor) -> None:
        gradients = [self.joining.local(p.grad) for p in self._parameters if p.grad is not None]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for dtype, same in by_dtype.items():
            torch._foreach_mul_(same, factor.to(dtype))


def mark_last(micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    """Each with whether it is the last, which shows only behind it."""
    ahead: MicroBatch | None = None
    for micro in micro_batches:
        if ahead is not None:
            yield ahead, False
        ahead = micro
    if ahead is not None:
        yield ahead, True
