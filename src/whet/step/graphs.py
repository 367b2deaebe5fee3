"""Optimizer steps captured once per shape and replayed as one launch."""

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import WhetError
from whet.data.batch import MicroBatch, Packed
from whet.device.abstract import AbstractDevice, AbstractGraphs, Replay
from whet.step.ema import Ema
from whet.step.graph_safety import (
    CapturedTensors,
    HostSnapshot,
    capture_obstacle,
    hook_obstacle,
    loss_dependencies,
    loss_key,
)
from whet.step.loss import LossFunction, clamp_weight, parse_loss
from whet.step.rollback import BufferSnapshot
from whet.step.step import Outcome, Stepper, WrongReplayError

Signature = tuple[Any, ...]


class StaticInputs:
    """The micro-batches of one step, as copies with addresses of their own."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.micro_batches = [_copied(micro) for micro in micro_batches]
        self._tensors = list(_all_tensors(self.micro_batches))

    @property
    def num_bytes(self) -> int:
        """Of all their tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @torch.no_grad()
    def fill(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Takes other values of the same shapes."""
        torch._foreach_copy_(self._tensors, list(_all_tensors(micro_batches)))


def _copied(micro: MicroBatch) -> MicroBatch:
    return MicroBatch(micro.moved(torch.clone).fields, _UnreadableIds(len(micro)), micro.first_index)  # type: ignore[arg-type]


class _UnreadableIds:
    """Stands for the ids of samples: a captured step would go on reading those it was captured with."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("the loss reads micro.ids, which lie on the host")

    __getattr__ = __getitem__ = __iter__ = __array__ = __eq__ = __add__ = __radd__ = __mod__ = _refuse
    __hash__ = object.__hash__


def signature(micro: MicroBatch) -> Signature:
    """All that the host knows of a micro-batch but for its ids: a step captured with it holds for what has the same."""
    fields = [(name, *_field_shapes(field), *_field_numbers(field)) for name, field in micro.fields.items()]
    return len(micro), micro.first_index, *fields


def _field_numbers(field: Any) -> tuple[int, ...]:
    return (field.max_length, field.num_fillers) if isinstance(field, Packed) else ()


def _field_shapes(field: Any) -> Iterator[Any]:
    for tensor in _field_tensors(field):
        yield tensor.shape
        yield tensor.dtype


def _all_tensors(micro_batches: Sequence[MicroBatch]) -> Iterator[Tensor]:
    for micro in micro_batches:
        for value in micro.fields.values():
            yield from _field_tensors(value)


def _field_tensors(field: Any) -> tuple[Tensor, ...]:
    if isinstance(field, Tensor):
        return (field,)
    return (field.values, field.starts) if isinstance(field, Packed) else (field.values, field.lengths)


MAX_CAPTURED_SHAPES = 16
"""Captured; steps of other shapes run as they are. Each holds its inputs, and a launch of many kernels."""
_MAX_SEEN_SHAPES = 256
_STEPS_TO_REPEAT = 64
"""Steps in which some shape must come again."""
_MAX_RECAPTURES = 3
_CHECK_AT_LEAST_EVERY = 1024
"""Replays; before that at every power of two."""
_TOLERANCE = {"bf16": 5e-3, "fp16": 5e-3}
"""How far a replayed loss may lie from its own, relative: the kernels are the same, but sums have no order."""


@dataclass(slots=True)
class _CapturedStep:
    statics: StaticInputs
    replay: Replay
    outcome: Outcome
    addresses: list[int]
    kept: list[Any]
    is_seen_through: bool = False
    """A replay of it was compared with the loss's own code."""


@dataclass(slots=True)
class _SeenShape:
    """What is known of a shape that is not captured yet."""

    num_steps: int = 0
    waits: list[str] = field(default_factory=list)
    """In its last step."""


class GraphedStepper(Stepper):
    """Makes the steps of a Stepper, from graphs where it can; `refusal` says why it cannot."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: AbstractDevice,
        *,
        graphs: AbstractGraphs,
        is_compiled: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(model, optimizer, device, **how)
        self._graphs = graphs
        self._is_compiled = is_compiled
        self._kinds: set[Hashable] = set()
        """What shapes that are captured have in common: another one of them is captured without running before, which
        would hold as much memory beside the pool as in it."""
        # A compiled model compiles for each shape, and measures kernels meanwhile.
        self._runs_first = is_compiled
        self._owners = CapturedTensors(model, optimizer)
        self._noted: dict[Hashable, _SeenShape] = {}
        self._captured: dict[Hashable, _CapturedStep] = {}
        self._share: Tensor | None = None
        self._num_steps = self._num_renewals = self._num_replays = 0
        self.capture_seconds = 0.0
        """All of it so far: what a run pays for graphs besides running each shape once as it is."""

    @property
    def num_captured(self) -> int:
        """How many shapes are captured."""
        return len(self._captured)

    def __call__(
        self,
        loss: LossFunction,
        micro_batches: Iterable[MicroBatch],
        *,
        num_samples: int,
        step: int,
        is_careful: bool = False,
    ) -> Outcome:
        if self._num_steps == 0 and self.refusal is None:
            self._examine()
        self._set_share(step)
        if is_careful or self.refusal is not None:
            return super().__call__(loss, micro_batches, num_samples=num_samples, step=step, is_careful=is_careful)
        with self.device.computing(is_step=True):
            return self._make(loss, micro_batches, num_samples=num_samples, step=step)

    def release(self, why: str) -> None:
        """Gives back all that was captured; from now on steps run as they are."""
        self.refusal = why
        self._share = None
        self._captured.clear()
        self._noted.clear()

    def _make(self, loss: LossFunction, micro_batches: Iterable[MicroBatch], *, num_samples: int, step: int) -> Outcome:
        mark = self.device.mark
        start = mark()
        read = list(micro_batches)
        loaded = mark()
        made = [micro if micro.is_there else micro.moved(self.device.put) for micro in read]
        moved = mark()
        fetching = ("data", start, loaded), ("transfer", loaded, moved)
        key = (num_samples, *map(signature, made), loss_key(loss), self._owners.modes())
        ready = self._captured_for(key) or self._capture(key, loss, made, num_samples=num_samples)
        if ready is None:
            outcome = self._run(key, loss, made, num_samples=num_samples, step=step)
            return Outcome(loss=outcome.loss, grad_norm=outcome.grad_norm, marks=(*fetching, *outcome.marks))
        self._num_replays += 1
        # Of each shape the first, then as a share of all: with many shapes each would be looked at again and again.
        is_due = not ready.is_seen_through or _is_check_due(self._num_replays)
        expected = self._expected_loss(loss, made, num_samples) if is_due else None
        ready.is_seen_through = True
        ready.statics.fill(made)
        self.is_updating = True
        ready.replay()
        self.is_updating = False
        told, norm = ready.outcome.loss.clone(), ready.outcome.grad_norm
        if expected is not None:
            self._refuse_other_loss(told, expected)
        return Outcome(
            loss=told,
            grad_norm=None if norm is None else norm.clone(),
            marks=(*fetching, ("graph", moved, mark())),
        )

    def _examine(self) -> None:
        """Gives up where it is known beforehand that replays would be wrong."""
        why = capture_obstacle(self.optimizer, self.scaler, self.device.place) or hook_obstacle(
            self.model, self.optimizer
        )
        if why is not None:
            self.release(why)

    # --- as it is -----------------------------------------------------------------------------------------------------

    def _run(
        self, key: Hashable, loss: LossFunction, made: Sequence[MicroBatch], *, num_samples: int, step: int
    ) -> Outcome:
        noted = self._noted.get(key)
        if noted is None and len(self._noted) < _MAX_SEEN_SHAPES:
            noted = self._noted[key] = _SeenShape()
        with self._graphs.warm_up() as waits:
            outcome = self._step(loss, made, num_samples=num_samples, step=step)
        # As after a replay, whose gradients lie in the pool.
        self.optimizer.zero_grad(set_to_none=True)
        self._num_steps += 1
        if noted is not None:
            noted.num_steps += 1
            noted.waits = waits
            if waits and noted.num_steps > 1:
                self.release(f"the step waits for the device, at {waits[0]}")
        if not self._captured and self._num_steps >= _STEPS_TO_REPEAT and self.refusal is None:
            self.release(f"no shape came again in {self._num_steps} steps")
        return outcome

    def _average(self, ema: Ema, step: int) -> None:
        if self._share is None:
            super()._average(ema, step)
        else:
            ema.take_in(self._share)

    def _set_share(self, step: int) -> None:
        """In place, as the learning rate is: a captured step reads what it finds there."""
        if self.ema is None or self.refusal is not None:
            return
        if self._share is None:
            self._share = torch.zeros((), dtype=torch.float64, device=self.device.place)
        self._share.fill_(self.ema.share(step))

    # --- captured -----------------------------------------------------------------------------------------------------

    def _captured_for(self, key: Hashable) -> _CapturedStep | None:
        """What can be replayed; whatever was captured is void if weights or state lie elsewhere now."""
        ready = self._captured.get(key)
        if ready is None or ready.addresses == self._addresses():
            return ready
        self._num_renewals += 1
        self._captured.clear()
        if self._num_renewals > _MAX_RECAPTURES:
            self.release("weights, buffers or the optimizer's state are replaced again and again")
        return None

    def _capture(
        self, key: Hashable, loss: LossFunction, made: Sequence[MicroBatch], *, num_samples: int
    ) -> _CapturedStep | None:
        noted, kind = self._noted.get(key), (len(made), loss_key(loss), self._owners.modes())
        has_run = noted is not None and not noted.waits
        is_known = noted is None and kind in self._kinds
        if self.refusal is not None or not (has_run or is_known) or len(self._captured) >= MAX_CAPTURED_SHAPES:
            return None
        self._examine()
        if self.refusal is not None:
            return None
        start = time.perf_counter()
        before, statics = HostSnapshot(self.model), StaticInputs(made)
        if all(statics.num_bytes > ready.statics.num_bytes for ready in self._captured.values()):
            # What smaller steps gave back is in pieces too small for this one, and all of them fit into what it takes.
            self._captured.clear()
            self._graphs.forget()
        try:
            replay, outcome = self._graphs.capture(
                lambda: self._step(loss, statics.micro_batches, num_samples=num_samples, step=0, mark=lambda: None)
            )
            why = before.change()
        except WhetError:
            raise
        except Exception as error:
            # The error itself would keep alive what the step had computed.
            why = f"capturing failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        # Its gradients lie in the pool, where the next capture can have them.
        self.forget()
        self.capture_seconds += time.perf_counter() - start
        if why is not None:
            before.put_back()
            # A failure ends what was captured before.
            self._captured.clear()
            self._kinds.clear()
            if has_run:
                self.release(why)
            else:
                self._runs_first = True
            return None
        if not self._runs_first:
            self._kinds.add(kind)
        self._captured[key] = ready = _CapturedStep(
            statics=statics,
            replay=replay,
            outcome=outcome,
            addresses=self._addresses(),
            kept=[loss, *loss_dependencies(loss)],
        )
        return ready

    def _addresses(self) -> list[int]:
        others = [] if self.ema is None else list(self.ema.average.values())
        if self.scaler.is_enabled():
            others += [t for t in (self.scaler._scale, self.scaler._growth_tracker) if t is not None]
        return [*self._owners.addresses(), *(tensor.data_ptr() for tensor in others)]

    # --- looked at now and then ---------------------------------------------------------------------------------------

    def _expected_loss(self, loss: LossFunction, made: Sequence[MicroBatch], num_samples: int) -> Tensor:
        """The loss of this step as its code says now; whatever the forward pass changes is put back."""
        buffers, host, own = BufferSnapshot(self.model), torch.get_rng_state(), self.device.rng_state()
        total: Tensor | None = None
        weights: Tensor | float | None = None
        # Not where it would have to be compiled once more, for passes without gradients.
        with self._graphs.warm_up(), torch.set_grad_enabled(self._is_compiled):
            for micro in made:
                with self.device.autocast(self._precision):
                    part, weight = parse_loss(loss(micro))
                share = part.detach() * (len(micro) / num_samples) if weight is None else part.detach()
                total = share if total is None else total + share
                if weight is not None:
                    weights = weight if weights is None else weights + weight
        assert total is not None
        buffers.put_back()
        torch.set_rng_state(host)
        if own is not None:
            self.device.set_rng_state(own)
        return total if weights is None else total / clamp_weight(weights)

    def _refuse_other_loss(self, told: Tensor, expected: Tensor) -> None:
        """Waits for the device. What is not finite is for others to judge."""
        ours, theirs = float(told), float(expected)
        most = _TOLERANCE.get(self._precision, 1e-4) * max(abs(theirs), 1e-3)
        if abs(ours - theirs) > most:
            what = f"the replayed loss is {ours:.6g}, the loss function's own {theirs:.6g}"
            self.release(f"{what}: it depends on something that a graph does not see")
            raise WrongReplayError(what)


def _is_check_due(num_replays: int) -> bool:
    return num_replays & (num_replays - 1) == 0 or num_replays % _CHECK_AT_LEAST_EVERY == 0
