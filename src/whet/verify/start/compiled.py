"""Compare a compiled model with its eager code on one micro-batch, before the first step.

The compiled pass has the shape of the training batches, because another shape would be compiled again. Dropout remains
enabled for the same reason, and compiled code draws different random numbers. A compiled pass may therefore differ from
an eager pass as much as eager passes differ from each other, plus rounding.

Eager code needs more than twice the memory of compiled code (22 GiB instead of 10 for GPT-2). It therefore runs on
slices of the micro-batch, one after the other, and accumulates their gradients. A batch that must not be split, for
example because of BatchNorm, is computed with activation checkpointing. If neither agrees or applies, eager code runs
unchanged, and that comparison decides. The gradients of the first pass are kept on the host.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from whet.data.batch import MicroBatch
from whet.data.split import slice_micro_batch
from whet.device.abstract import HALF_TYPES, AbstractDevice
from whet.device.rng import get_host_rng, get_torch_rng, preserve_rng, set_host_rng, set_torch_rng
from whet.step.compilation import num_graphs
from whet.step.loss import MicroLoss, clamp_weight, parse_loss
from whet.step.model_contexts import checkpoint_activations, find_blocks
from whet.step.rollback import BufferSnapshot
from whet.verify.isolation import cast_floating, force_eager, preserve_model, temporary_copy
from whet.verify.start.device_parity import (
    FP16_LOSS_SCALE,
    MIN_LOSS_SCALE,
    PARITY_BOUNDS,
    LossAndGradients,
    clear_gradients,
    compute_precision,
    dense_gradients,
    forward_backward,
)
from whet.verify.tolerance import SMALL_TENSOR_SHARE

# Maximum distance of the nearest compiled pass from the first eager pass, as a multiple of that of the farthest eager
# pass.
_DRAW_FACTOR = 1.2
# Maximum number of rounds, each with one eager and one compiled pass. For a correct model, all passes have the same
# distribution. The nearest of 6 compiled passes is then farther than the farthest of 6 eager passes in one of 924 cases
# per tensor, and it was never 20 % farther in 1,200 trials. A wrong result appears in every compiled pass.
_MAX_ROUNDS = 6
# Number of dropout draws to accumulate in one pass, which halves the relative spread of a tensor.
_DRAWS_PER_PASS = 4
# The same factor for rounding. Compiled code has no larger rounding error than eager code, so they differ by at most
# twice that error.
_ROUNDING_FACTOR = 2.0
# Maximum half-precision error that is plausible as rounding if rounding cannot be measured. Recursive models had errors
# of 0.2 in bf16.
_PLAUSIBLE_HALF_ROUNDING = 0.5
# Minimum size of compared gradients under dropout, because smaller tensors vary most.
_MIN_ELEMENTS = 256
_LOSS_NAME = "the loss"
# Number of slices in which eager code runs the micro-batch, so that it needs less memory than compiled code.
_NUM_SLICES = 4

_Distances = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledParity:
    """The result of comparing a compiled model with its eager code."""

    agrees: bool
    worst: str
    """Name of the gradient, or "the loss", with the largest error relative to its bound."""
    error: float
    """Relative error of the worst tensor, which may be NaN."""
    bound: float
    largest: float
    """Largest error of all compared tensors."""
    dropout_error: float | None
    """Largest difference between eager passes, or None if they differ only by rounding."""
    compiled_loss: float
    eager_loss: float
    num_compared: int
    num_gradients: int
    is_compiled: bool = True
    """Whether the compiler produced a graph. Without one, equal results prove nothing."""

    @property
    def is_usable(self) -> bool:
        """Whether the run should use the compiled model."""
        return self.agrees and self.is_compiled

    def __str__(self) -> str:
        if not self.is_compiled:
            return "torch.compile produced no graph for this model"
        if self.agrees:
            if self.dropout_error is None:
                what, dropout = f"loss and {self.num_compared} gradients", ""
            else:
                what = f"{self.num_compared} of {self.num_gradients} gradients"
                dropout = f", dropout alone {self.dropout_error:.0e}"
            return f"{what} agree with the eager model ({self.largest:.0e}{dropout})"
        what = self.worst if self.worst == _LOSS_NAME else f"the gradient of {self.worst}"
        return (
            f"{what} differs from the eager model by {self.error:.1e} (at most {self.bound:.0e}); "
            f"loss {self.compiled_loss:.7g} compiled and {self.eager_loss:.7g} eager"
        )


def compare_compiled_with_eager(
    model: nn.Module,
    device: AbstractDevice,
    loss: MicroLoss,
    micro: MicroBatch,
    *,
    precision: str,
    may_slice: bool = True,
) -> CompiledParity:
    """Compare the compiled model with its eager code. The model and all random generators are restored.

    `may_slice` is False if the loss of a batch is known to differ from that of its parts. State that a loss function
    keeps in Python objects is not restored.
    """
    with preserve_model(model), preserve_rng(device):
        num_before = num_graphs()
        slices = slice_micro_batch(micro, _NUM_SLICES) if may_slice else None
        make = partial(_Comparison, model, device, loss, micro, precision)
        # Agreement in any of these ways is proof, but a difference may also be due to slicing or recomputation.
        result = _run(make, slices=slices) if slices is not None else None
        if result is None and _can_recompute(model):
            result = _run(make, is_recomputed=True)
        if result is None:
            comparison = make()
            result = comparison, comparison.run()
        comparison, parity = result
        # An earlier run in this process may have compiled everything already.
        if num_graphs() > num_before or comparison.runs_compiled():
            return parity
        return replace(parity, is_compiled=False)


def compare_with_reference(
    model: nn.Module,
    device: AbstractDevice,
    loss: MicroLoss,
    micro: MicroBatch,
    *,
    precision: str,
    reference: Callable[[], AbstractContextManager[object]],
) -> CompiledParity:
    """Compare passes of the model with passes inside the context `reference`, such as the model without a change to it.

    Dropout is disabled, because it would hide small differences and nothing is compiled here.
    """
    with preserve_model(model), preserve_rng(device):
        for module in model.modules():
            # Do not call eval(), because an override may do more than `preserve_model` restores.
            module.training = False
        return _Comparison(model, device, loss, micro, precision, reference=reference).run()


def _run(make: Callable[..., "_Comparison"], **options: Any) -> "tuple[_Comparison, CompiledParity] | None":
    """Compare with eager passes that need less memory. Return None if they fail or disagree."""
    try:
        comparison = make(**options)
        parity = comparison.run()
    except Exception:
        # A model may keep state for the rows of a batch. Any other failure will occur again without these options.
        return None
    return (comparison, parity) if parity.agrees else None


def _can_recompute(model: nn.Module) -> bool:
    blocks = find_blocks(model)
    # If a block has its own `forward` attribute, its activations are already recomputed, or the user has replaced it.
    return bool(blocks) and not any("forward" in vars(block) for block in blocks)


class _Comparison:
    def __init__(
        self,
        model: nn.Module,
        device: AbstractDevice,
        loss: MicroLoss,
        micro: MicroBatch,
        precision: str,
        *,
        slices: Sequence[MicroBatch] | None = None,
        is_recomputed: bool = False,
        reference: Callable[[], AbstractContextManager[object]] = force_eager,
    ) -> None:
        self._model = model
        self._device = device
        self._loss = loss
        self._micro = micro
        self._slices = slices or (micro,)
        self._is_recomputed = is_recomputed
        self._reference = reference
        self._total_weight: Tensor | float | None = None
        """Sum of the weights of all slices, or None until it is known."""
        self._precision = precision
        self._compute_precision = compute_precision(model, precision)
        self._buffers = BufferSnapshot(model)
        self._generators = get_torch_rng(device), get_host_rng()
        self._num_draws = 1
        self._first = self._first_pass()
        if not bool(self._first.loss.isfinite()):
            raise ArithmeticError(f"its loss is {float(self._first.loss)}")

    def run(self) -> CompiledParity:
        eager = _distances(self._eager_pass(), self._first)
        if not self._is_rounding(eager):
            return self._compare_with_dropout()
        parity = self._compare_without_dropout(eager)
        # Two eager passes may appear deterministic by chance, because a rare draw may occur only in the third pass.
        return parity if parity.agrees else self._compare_with_dropout(fallback=parity)

    def runs_compiled(self) -> bool:
        return runs_compiled(self._compiled_pass)

    def _compare_with_dropout(self, *, fallback: CompiledParity | None = None) -> CompiledParity:
        """Compare the nearest compiled pass with the farthest eager pass.

        Return `fallback` if the passes disagree and the eager passes still differ only by rounding.
        """
        self._use_several_draws()
        nearest: _Distances | None = None
        farthest: _Distances = {}
        for _ in range(_MAX_ROUNDS):
            farthest = _combine(max, farthest, _distances(self._eager_pass(), self._first))
            distances, loss = self._compiled_pass()
            nearest = distances if nearest is None else _combine(min, nearest, distances)
            is_rounding = fallback is not None and self._is_rounding(farthest)
            parity = self._judge(nearest, farthest, loss, is_rounding=is_rounding)
            if parity.agrees:
                break
        return fallback if fallback is not None and is_rounding and not parity.agrees else parity

    def _compare_without_dropout(self, eager: _Distances) -> CompiledParity:
        """Compare passes that differ only by rounding. If they disagree, measure the rounding error of eager code."""
        self._restore_generators()
        compiled, loss = self._compiled_pass()
        parity = self._judge(compiled, eager, loss, is_rounding=True)
        if parity.agrees:
            return parity
        try:
            rounding = _distances(self._higher_precision_pass(), self._first)
        except Exception:
            # Not every model runs in another dtype, and the memory may be insufficient.
            if self._compute_precision in HALF_TYPES and parity.error <= _PLAUSIBLE_HALF_ROUNDING:
                raise
            return parity
        farthest = _combine(max, eager, rounding)
        return self._judge(compiled, farthest, loss, is_rounding=True, factor=_ROUNDING_FACTOR)

    def _use_several_draws(self) -> None:
        """Average several draws per pass from now on, which reduces the spread of dropout and reveals wrong results."""
        self._num_draws = _DRAWS_PER_PASS
        self._first = self._first_pass()

    def _is_rounding(self, eager: _Distances) -> bool:
        """Return whether eager passes with these distances differ only by rounding."""
        return all(error <= self._bound(name) for name, error in eager.items() if math.isfinite(error))

    def _bound(self, name: str) -> float:
        loss_bound, gradient_bound = PARITY_BOUNDS[self._compute_precision]
        return loss_bound if name == _LOSS_NAME else gradient_bound

    def _judge(
        self, compiled: _Distances, eager: _Distances, loss: float, *, is_rounding: bool, factor: float = _DRAW_FACTOR
    ) -> CompiledParity:
        sizes = {name: parameter.numel() for name, parameter in self._model.named_parameters()}
        compiled = {**dict.fromkeys(eager, 0.0), **compiled}
        bounds: _Distances = {}
        for name, error in compiled.items():
            own = eager.get(name, 0.0)
            is_compared = is_rounding or sizes.get(name, 1) >= _MIN_ELEMENTS or math.isnan(error)
            # A tensor cannot be compared if the eager result is not finite.
            if is_compared and math.isfinite(own):
                bounds[name] = math.hypot(self._bound(name), factor * own)
        worst = max(bounds, key=lambda name: _nan_as_inf(compiled[name] / bounds[name]), default=_LOSS_NAME)
        return CompiledParity(
            # Use `<=`, so that NaN exceeds every bound.
            agrees=all(compiled[name] <= bound for name, bound in bounds.items()),
            worst=worst,
            error=compiled[worst],
            bound=bounds.get(worst, 0.0),
            largest=max((compiled[name] for name in bounds), default=0.0),
            dropout_error=None if is_rounding else max((eager.get(name, 0.0) for name in bounds), default=0.0),
            compiled_loss=loss,
            eager_loss=float(self._first.loss),
            num_compared=sum(name != _LOSS_NAME for name in bounds),
            num_gradients=len(self._first.gradients),
        )

    # --- running a pass -----------------------------------------------------------------------------------------------

    def _first_pass(self) -> LossAndGradients:
        """Run an eager pass, and move its gradients to the host, so that the device has memory for another pass."""
        result = self._eager_pass()
        return LossAndGradients(result.loss, {name: gradient.cpu() for name, gradient in result.gradients.items()})

    def _eager_pass(self) -> LossAndGradients:
        with self._as_written():
            return self._pass(self._slices, self._precision)

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        """Run the eager code of the model in the context, with activation checkpointing if requested."""
        with self._reference(), checkpoint_activations(self._model) if self._is_recomputed else nullcontext():
            yield

    def _compiled_pass(self) -> tuple[_Distances, float]:
        """Run a compiled pass. Return its distances from the first eager pass, and its loss."""
        result = self._pass((self._micro,), self._precision)
        return _distances(result, self._first), float(result.loss)

    def _higher_precision_pass(self) -> LossAndGradients:
        """Repeat the first pass in a wider dtype, to measure its rounding error."""
        self._restore_generators()
        # Cached memory blocks of half-precision passes are too small for this pass.
        self._device.memory.empty_cache()
        dtype = torch.float32 if self._compute_precision in HALF_TYPES else torch.float64
        with self._as_written(), temporary_copy(self._model, self._device.torch_device, dtype):
            wider = [part.map_tensors(lambda tensor: cast_floating(tensor, dtype)) for part in self._slices]
            return self._pass(wider, "fp32")

    def _pass(self, parts: Sequence[MicroBatch], precision: str) -> LossAndGradients:
        scale = FP16_LOSS_SCALE if self._compute_precision == "fp16" else 1.0
        losses: list[Tensor] = []
        try:
            for _ in range(self._num_draws):
                if len(parts) == 1:
                    loss = forward_backward(self._device, self._loss, parts[0], precision=precision, scale=scale)
                else:
                    loss = self._sum_of_parts(parts, precision, scale)
                losses.append(loss)
                # Every pass must start from the same buffers.
                self._buffers.restore()
            return LossAndGradients(torch.stack(losses).mean(), dense_gradients(self._model))
        finally:
            clear_gradients(self._model)

    def _sum_of_parts(self, parts: Sequence[MicroBatch], precision: str, scale: float) -> Tensor:
        """Compute the loss of several parts as if they were one batch, and accumulate its gradients."""
        device, total_weight = self._device, self._total_weight
        divisor, losses, weights = total_weight, [], []
        for part in parts:
            with device.compute_context(), torch.enable_grad():
                with device.autocast(precision):
                    total, weight = parse_loss(self._loss(part.map_tensors(device.put)))
                if weight is None:
                    total, weight = total * len(part), float(len(part))
                if divisor is None:
                    # Estimate the total weight, because fp16 needs gradients of about the final size. It is corrected
                    # below, once the weights of all parts are known.
                    divisor = torch.as_tensor(weight) * len(parts)
                    divisor = torch.where(divisor > 0, divisor, torch.ones_like(divisor))
                (total / divisor * scale).backward()
            losses.append(total.detach())
            weights.append(torch.as_tensor(weight).detach())
        if total_weight is None:
            self._total_weight = total_weight = clamp_weight(torch.stack(weights).sum())
            assert divisor is not None, "there is at least one part"
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(divisor / total_weight)
        return torch.stack(losses).sum() / total_weight

    def _restore_generators(self) -> None:
        torch_state, host_state = self._generators
        set_torch_rng(torch_state, self._device)
        set_host_rng(host_state)


def _distances(result: LossAndGradients, first: LossAndGradients) -> _Distances:
    """Return the L2 distances of the loss and gradients from the first pass, relative to its norms."""
    zero = first.loss.new_zeros((), dtype=torch.float32)
    names = [*first.gradients, *(name for name in result.gradients if name not in first.gradients)]
    pairs = []
    for name in names:
        ours, theirs = result.gradients.get(name), first.gradients.get(name)
        # Keep only one gradient of the first pass on the device at a time.
        theirs = None if theirs is None else theirs.to(zero.device if ours is None else ours.device)
        pairs.append((_norm(theirs, zero), _norm(_difference(ours, theirs), zero)))
    norms = torch.stack([zero, *(norm for norm, _ in pairs)])
    distances = torch.stack([zero, *(distance for _, distance in pairs)])
    floor = SMALL_TENSOR_SHARE * norms.nan_to_num(posinf=0.0).max()
    norms[0], distances[0] = first.loss.abs().clamp(min=MIN_LOSS_SCALE), (result.loss - first.loss).abs()
    floors = floor.repeat(len(norms))
    floors[0] = MIN_LOSS_SCALE
    errors = distances / torch.maximum(norms, floors).clamp(min=1e-30)
    return dict(zip([_LOSS_NAME, *names], errors.tolist(), strict=True))


def _norm(tensor: Tensor | None, zero: Tensor) -> Tensor:
    if tensor is None or tensor.numel() == 0:
        return zero
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    dtype = torch.float64 if plain.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(plain, dtype=dtype).float()


def _difference(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """Return the difference of two gradients. A missing gradient counts as zero."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return ours - theirs


def _combine(pick: Callable[[float, float], float], one: Mapping[str, float], other: Mapping[str, float]) -> _Distances:
    """Return the minimum or maximum for every name. The distance of a missing gradient is 0, and NaN is preserved."""
    names = {**one, **other}
    pairs = {name: (one.get(name, 0.0), other.get(name, 0.0)) for name in names}
    return {name: math.nan if math.isnan(a + b) else pick(a, b) for name, (a, b) in pairs.items()}


def _nan_as_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value


# --- compiled graphs --------------------------------------------------------------------------------------------------

# Prefix of the names of compiled graphs in the bytecode that torch.compile rewrites.
_COMPILED_NAME_PREFIX = "__compiled_fn"


def runs_compiled(function: Callable[[], object]) -> bool:
    """Return whether `function` executes a compiled graph, even one compiled earlier. True if unknown.

    This check is necessary because torch.compile silently runs code eagerly if it cannot trace it.
    """
    if sys.getprofile() is not None:
        # Another profiler is active, and Python supports only one at a time.
        return True
    is_compiled = False

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal is_compiled
        if event == "call" and not is_compiled:
            is_compiled = any(name.startswith(_COMPILED_NAME_PREFIX) for name in frame.f_code.co_names)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return is_compiled
