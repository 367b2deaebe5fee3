"""Compare a compiled model with its eager code on one micro-batch, before the first step."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from whet.data.batch import MicroBatch
from whet.device.abstract import HALF_TYPES, AbstractDevice
from whet.device.rng import get_host_rng, get_torch_rng, preserve_rng, set_host_rng, set_torch_rng
from whet.step.loss import LossFunction
from whet.step.rollback import BufferSnapshot
from whet.verify.isolation import cast_floating, force_eager, preserve_model, temporary_copy
from whet.verify.start import device_parity
from whet.verify.start.device_parity import MIN_LOSS_SCALE, PARITY_BOUNDS, LossAndGradients
from whet.verify.tolerance import SMALL_TENSOR_SHARE

_COMPILED_NAME_PREFIX = "__compiled_fn"
"""What code that torch's compiler has rewritten calls a graph that it has compiled."""


def num_graphs() -> int:
    """How many graphs were compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def runs_compiled(go: Callable[[], object]) -> bool:
    """Whether `go` comes through a compiled graph, be it one from long ago; True where that cannot be seen."""
    if sys.getprofile() is not None:
        # A profiler of yours is on, and there can be only one.
        return True
    is_found = False

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal is_found
        if event == "call" and not is_found:
            is_found = any(name.startswith(_COMPILED_NAME_PREFIX) for name in frame.f_code.co_names)

    sys.setprofile(look)
    try:
        go()
    finally:
        sys.setprofile(None)
    return is_found


_DRAW_FACTOR = 1.2
"""How many times as far from the first pass as the farthest of others as written the nearest compiled one may lie."""
_MAX_ROUNDS = 6
"""Of one pass as written and one compiled, until none is too far off. All draw alike: of a right model the nearest of 6
compiled passes is beyond the farthest of 6 others in one of 924 cases for each tensor, and a fifth beyond it so rarely
that 1,200 tries had none. A wrong result is in every compiled pass."""
_DRAWS_PER_PASS = 4
"""Of dropout in one pass, added up, where there is any: a tensor's scatter is half of what it is in one."""
_ROUNDING_FACTOR = 2.0
"""The same for rounding: a compiled pass rounds no more than one as written, so both together are at most twice one."""
_PLAUSIBLE_HALF_ROUNDING = 0.5
"""Of a gradient in half precision, where nobody can say: recursive models had 0.2 in bf16."""
_MIN_ELEMENTS = 256
"""Numbers: tensors with fewer scatter most and are not judged where there is dropout; the loss is one number."""
_LOSS_NAME = "the loss"

_Distances = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledParity:
    """A compiled model beside its own code."""

    holds: bool
    worst: str
    """The gradient that is farthest from its bound, or over it; or "the loss"."""
    error: float
    """Of that one, relative; NaN where it is not a number."""
    bound: float
    largest: float
    """Error of all that were judged."""
    drawn: float | None
    """By how much another pass of the model's own code differs; None where that is rounding."""
    compiled: float
    written: float
    """The losses."""
    num_judged: int
    num_gradients: int
    is_compiled: bool = True
    """Whether the compiler made anything of it; where it did not, equal numbers say nothing."""

    @property
    def is_usable(self) -> bool:
        """Whether a run should go on with the compiled model."""
        return self.holds and self.is_compiled

    def __str__(self) -> str:
        if not self.is_compiled:
            return "torch's compiler found nothing to compile here"
        if self.holds:
            if self.drawn is None:
                what, alone = f"loss and {self.num_judged} gradients", ""
            else:
                what, alone = (
                    f"{self.num_judged} of {self.num_gradients} gradients",
                    f", dropout alone {self.drawn:.0e}",
                )
            return f"{what} agree with the model's own code ({self.largest:.0e}{alone})"
        what = self.worst if self.worst == _LOSS_NAME else f"the gradient of {self.worst}"
        return (
            f"{what} differs from the model's own code by {self.error:.1e} (at most {self.bound:.0e}); "
            f"loss {self.compiled:.7g} compiled and {self.written:.7g} as written"
        )


def compare_compiled_with_eager(
    model: nn.Module, device: AbstractDevice, loss: LossFunction, micro: MicroBatch, *, precision: str
) -> CompiledParity:
    """The model as it is called now, and as it is written; nobody can tell afterwards.

    What a loss keeps in Python objects of its own is not put back.
    """
    with preserve_model(model), preserve_rng(device):
        before = num_graphs()
        comparison = _Comparison(model, device, loss, micro, precision)
        agreement = comparison.agreement()
        # An earlier training in this process may have had all of it compiled already.
        if num_graphs() > before or comparison.runs_compiled():
            return agreement
        return replace(agreement, is_compiled=False)


class _Comparison:
    def __init__(
        self, model: nn.Module, device: AbstractDevice, loss: LossFunction, micro: MicroBatch, precision: str
    ) -> None:
        self._model = model
        self._device = device
        self._loss = loss
        self._micro = micro
        self._precision = precision
        self._format = device_parity.compute_precision(model, precision)
        self._buffers = BufferSnapshot(model)
        self._generators = get_torch_rng(device), get_host_rng()
        self._num_draws = 1
        self._first = self._as_written()
        if not bool(self._first.loss.isfinite()):
            raise ArithmeticError(f"its loss is {float(self._first.loss)}")

    def agreement(self) -> CompiledParity:
        drawn = _distances(self._as_written(), self._first)
        if not self._is_quiet(drawn):
            return self._with_draws()
        agreement = self._without_draws(drawn)
        # Two passes are few: what is drawn rarely, or done in every fifth call of a loss, may be in the third alone.
        return agreement if agreement.holds else self._with_draws(seemed=agreement)

    def runs_compiled(self) -> bool:
        return runs_compiled(self._as_called)

    def _with_draws(self, *, seemed: CompiledParity | None = None) -> CompiledParity:
        """The nearest of the compiled passes beside the farthest as written; `seemed`, if none of these differ."""
        self._draw_more()
        found: _Distances | None = None
        drawn: _Distances = {}
        for _ in range(_MAX_ROUNDS):
            drawn = _each(max, drawn, _distances(self._as_written(), self._first))
            now, loss = self._as_called()
            found = now if found is None else _each(min, found, now)
            is_quiet = seemed is not None and self._is_quiet(drawn)
            agreement = self._judge(found, drawn, loss, is_quiet=is_quiet)
            if agreement.holds:
                break
        return seemed if seemed is not None and is_quiet and not agreement.holds else agreement

    def _without_draws(self, drawn: _Distances) -> CompiledParity:
        """Only rounding differs; where that is more than usual, finer numbers say how much the first pass has of it."""
        self._draw_again()
        found, loss = self._as_called()
        agreement = self._judge(found, drawn, loss, is_quiet=True)
        if agreement.holds:
            return agreement
        try:
            rounded = _distances(self._in_finer_numbers(), self._first)
        except Exception:
            # Not every model can be computed in another type, and there may be no memory for it.
            if self._format in HALF_TYPES and agreement.error <= _PLAUSIBLE_HALF_ROUNDING:
                raise
            return agreement
        return self._judge(found, _each(max, drawn, rounded), loss, is_quiet=True, times=_ROUNDING_FACTOR)

    def _draw_more(self) -> None:
        """From now on several draws are one pass: then dropout scatters less, and what is wrong stands out."""
        self._num_draws = _DRAWS_PER_PASS
        del self._first
        self._first = self._as_written()

    def _is_quiet(self, drawn: _Distances) -> bool:
        """Whether nothing but rounding tells two passes as written apart."""
        return all(error <= self._bound(name) for name, error in drawn.items() if math.isfinite(error))

    def _bound(self, name: str) -> float:
        of_loss, of_gradient = PARITY_BOUNDS[self._format]
        return of_loss if name == _LOSS_NAME else of_gradient

    def _judge(
        self, found: _Distances, drawn: _Distances, loss: float, *, is_quiet: bool, times: float = _DRAW_FACTOR
    ) -> CompiledParity:
        sizes = {name: parameter.numel() for name, parameter in self._model.named_parameters()}
        found = {**dict.fromkeys(drawn, 0.0), **found}
        limits: _Distances = {}
        for name, error in found.items():
            own = drawn.get(name, 0.0)
            is_judged = is_quiet or sizes.get(name, 1) >= _MIN_ELEMENTS or math.isnan(error)
            # Where the model's own code gives no numbers, nothing can be said.
            if is_judged and math.isfinite(own):
                limits[name] = math.hypot(self._bound(name), times * own)
        worst = max(limits, key=lambda name: _as_order(found[name] / limits[name]), default=_LOSS_NAME)
        return CompiledParity(
            # `<=`: a NaN is over every bound.
            holds=all(found[name] <= limit for name, limit in limits.items()),
            worst=worst,
            error=found[worst],
            bound=limits.get(worst, 0.0),
            largest=max((found[name] for name in limits), default=0.0),
            drawn=None if is_quiet else max((drawn.get(name, 0.0) for name in limits), default=0.0),
            compiled=loss,
            written=float(self._first.loss),
            num_judged=sum(name != _LOSS_NAME for name in limits),
            num_gradients=len(self._first.gradients),
        )

    # --- one pass -----------------------------------------------------------------------------------------------------

    def _as_written(self) -> LossAndGradients:
        with force_eager():
            return self._pass(self._micro, self._precision)

    def _as_called(self) -> tuple[_Distances, float]:
        """How far the compiled model is off, and its loss."""
        found = self._pass(self._micro, self._precision)
        return _distances(found, self._first), float(found.loss)

    def _in_finer_numbers(self) -> LossAndGradients:
        """The first pass once more: how far off it is itself by rounding."""
        self._draw_again()
        # What passes in half precision gave back is in pieces too small for this one.
        self._device.empty_cache()
        dtype = torch.float32 if self._format in HALF_TYPES else torch.float64
        with force_eager(), temporary_copy(self._model, self._device.place, dtype):
            return self._pass(self._micro.moved(lambda tensor: cast_floating(tensor, dtype)), "fp32")

    def _pass(self, micro: MicroBatch, precision: str) -> LossAndGradients:
        model, scale = self._model, device_parity.FP16_LOSS_SCALE if self._format == "fp16" else 1.0
        losses: list[Tensor] = []
        try:
            for _ in range(self._num_draws):
                mean = device_parity.forward_backward(self._device, self._loss, micro, precision=precision, scale=scale)
                losses.append(mean)
                # Every pass begins with the same.
                self._buffers.put_back()
            return LossAndGradients(torch.stack(losses).mean(), device_parity.dense_gradients(model))
        finally:
            device_parity.clear_gradients(model)

    def _draw_again(self) -> None:
        torchs, hosts = self._generators
        set_torch_rng(torchs, self._device)
        set_host_rng(hosts)


def _distances(found: LossAndGradients, first: LossAndGradients) -> _Distances:
    """In L2, relative to the size of each gradient in the first pass; waits for the device, once."""
    zero = first.loss.new_zeros((), dtype=torch.float32)
    names = [*first.gradients, *(name for name in found.gradients if name not in first.gradients)]
    ours = [found.gradients.get(name) for name in names]
    theirs = [first.gradients.get(name) for name in names]
    sizes = torch.stack([zero, *(_size(tensor, zero) for tensor in theirs)])
    apart = torch.stack([zero, *(_size(_difference(a, b), zero) for a, b in zip(ours, theirs, strict=True))])
    floor = SMALL_TENSOR_SHARE * sizes.nan_to_num(posinf=0.0).max()
    sizes[0], apart[0] = first.loss.abs().clamp(min=MIN_LOSS_SCALE), (found.loss - first.loss).abs()
    floors = floor.repeat(len(sizes))
    floors[0] = MIN_LOSS_SCALE
    errors = apart / torch.maximum(sizes, floors).clamp(min=1e-30)
    return dict(zip([_LOSS_NAME, *names], errors.tolist(), strict=True))


def _size(tensor: Tensor | None, zero: Tensor) -> Tensor:
    if tensor is None or tensor.numel() == 0:
        return zero
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = torch.float64 if plain.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(plain, dtype=wide).float()


def _difference(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """No gradient is as good as one of zeros."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return ours - theirs


def _each(pick: Callable[[float, float], float], one: Mapping[str, float], other: Mapping[str, float]) -> _Distances:
    """For every name; what has no gradient in one of them has none to differ, and a NaN stays."""
    names = {**one, **other}
    pairs = {name: (one.get(name, 0.0), other.get(name, 0.0)) for name in names}
    return {name: math.nan if math.isnan(a + b) else pick(a, b) for name, (a, b) in pairs.items()}


def _as_order(share: float) -> float:
    return math.inf if math.isnan(share) else share
