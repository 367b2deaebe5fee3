"""Optimizer steps that are captured once for each shape of their micro-batches, and replayed as one launch.

The step itself stays the one of `step.py`: here it is run, captured or replayed. A shape is run as it is when it first
comes, and captured when it comes again; so no step is made for capturing alone, and a capture that fails has changed
nothing. Whatever cannot be captured is run as it is, and the reason is kept.
"""

import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import WhetError
from whet.data.batch import Micro
from whet.device.abstract import AbstractDevice
from whet.device.graphs import AbstractGraphs, Replay
from whet.step.baked import HostState, Owners, hooked, loss_key, taken_from_outside, unfit
from whet.step.buffers import Buffers
from whet.step.ema import Ema
from whet.step.loss import LossFunction, at_least_tiny, split_loss
from whet.step.static import StaticMicros, signature
from whet.step.step import Outcome, Stepper, WrongReplayError

MOST_SHAPES = 16
"""Captured; steps of other shapes run as they are. Each holds its inputs, and a launch of many kernels."""
_MOST_NOTED = 256
_PATIENCE = 64
"""Steps in which some shape must come again."""
_MOST_RENEWALS = 3
_CHECK_AT_LEAST_EVERY = 1024
"""Replays; before that at every power of two."""
_AGREES = {"bf16": 5e-3, "fp16": 5e-3}
"""How far a replayed loss may lie from its own, relative: the kernels are the same, but sums have no order."""


@dataclass(slots=True)
class _Captured:
    statics: StaticMicros
    replay: Replay
    outcome: Outcome
    addresses: list[int]
    kept: list[Any]
    is_seen_through: bool = False
    """A replay of it was compared with the loss's own code."""


@dataclass(slots=True)
class _Noted:
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
        self._owners = Owners(model, optimizer)
        self._noted: dict[Hashable, _Noted] = {}
        self._captured: dict[Hashable, _Captured] = {}
        self._share: Tensor | None = None
        self._num_steps = self._num_renewals = self._num_replays = 0
        self.capture_seconds = 0.0
        """All of it so far: what a run pays for graphs besides running each shape once as it is."""

    @property
    def num_captured(self) -> int:
        """How many shapes are captured."""
        return len(self._captured)

    def __call__(
        self, loss: LossFunction, micros: Iterable[Micro], *, num_samples: int, step: int, is_careful: bool = False
    ) -> Outcome:
        if self._num_steps == 0 and self.refusal is None:
            self._examine()
        self._set_share(step)
        if is_careful or self.refusal is not None:
            return super().__call__(loss, micros, num_samples=num_samples, step=step, is_careful=is_careful)
        with self.device.computing(is_step=True):
            return self._make(loss, micros, num_samples=num_samples, step=step)

    def release(self, why: str) -> None:
        """Gives back all that was captured; from now on steps run as they are."""
        self.refusal = why
        self._share = None
        self._captured.clear()
        self._noted.clear()

    def _make(self, loss: LossFunction, micros: Iterable[Micro], *, num_samples: int, step: int) -> Outcome:
        mark = self.device.mark
        start = mark()
        read = list(micros)
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
        is_due = not ready.is_seen_through or _is_due(self._num_replays)
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
        why = unfit(self.optimizer, self.scaler, self.device.place) or hooked(self.model, self.optimizer)
        if why is not None:
            self.release(why)

    # --- as it is -----------------------------------------------------------------------------------------------------

    def _run(self, key: Hashable, loss: LossFunction, made: Sequence[Micro], *, num_samples: int, step: int) -> Outcome:
        noted = self._noted.get(key)
        if noted is None and len(self._noted) < _MOST_NOTED:
            noted = self._noted[key] = _Noted()
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
        if not self._captured and self._num_steps >= _PATIENCE and self.refusal is None:
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

    def _captured_for(self, key: Hashable) -> _Captured | None:
        """What can be replayed; whatever was captured is void if weights or state lie elsewhere now."""
        ready = self._captured.get(key)
        if ready is None or ready.addresses == self._addresses():
            return ready
        self._num_renewals += 1
        self._captured.clear()
        if self._num_renewals > _MOST_RENEWALS:
            self.release("weights, buffers or the optimizer's state are replaced again and again")
        return None

    def _capture(
        self, key: Hashable, loss: LossFunction, made: Sequence[Micro], *, num_samples: int
    ) -> _Captured | None:
        noted, kind = self._noted.get(key), (len(made), loss_key(loss), self._owners.modes())
        has_run = noted is not None and not noted.waits
        is_known = noted is None and kind in self._kinds
        if self.refusal is not None or not (has_run or is_known) or len(self._captured) >= MOST_SHAPES:
            return None
        self._examine()
        if self.refusal is not None:
            return None
        start = time.perf_counter()
        before, statics = HostState(self.model), StaticMicros(made)
        if all(statics.num_bytes > ready.statics.num_bytes for ready in self._captured.values()):
            # What smaller steps gave back is in pieces too small for this one, and all of them fit into what it takes.
            self._captured.clear()
            self._graphs.forget()
        try:
            replay, outcome = self._graphs.capture(
                lambda: self._step(loss, statics.micros, num_samples=num_samples, step=0, mark=lambda: None)
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
        self._captured[key] = ready = _Captured(
            statics=statics,
            replay=replay,
            outcome=outcome,
            addresses=self._addresses(),
            kept=[loss, *taken_from_outside(loss)],
        )
        return ready

    def _addresses(self) -> list[int]:
        others = [] if self.ema is None else list(self.ema.average.values())
        if self.scaler.is_enabled():
            others += [t for t in (self.scaler._scale, self.scaler._growth_tracker) if t is not None]
        return [*self._owners.addresses(), *(tensor.data_ptr() for tensor in others)]

    # --- looked at now and then ---------------------------------------------------------------------------------------

    def _expected_loss(self, loss: LossFunction, made: Sequence[Micro], num_samples: int) -> Tensor:
        """The loss of this step as its code says now; whatever the forward pass changes is put back."""
        buffers, host, own = Buffers(self.model), torch.get_rng_state(), self.device.rng_state()
        total: Tensor | None = None
        weights: Tensor | float | None = None
        # Not where it would have to be compiled once more, for passes without gradients.
        with self._graphs.warm_up(), torch.set_grad_enabled(self._is_compiled):
            for micro in made:
                with self.device.autocast(self._precision):
                    part, weight = split_loss(loss(micro))
                share = part.detach() * (len(micro) / num_samples) if weight is None else part.detach()
                total = share if total is None else total + share
                if weight is not None:
                    weights = weight if weights is None else weights + weight
        assert total is not None
        buffers.put_back()
        torch.set_rng_state(host)
        if own is not None:
            self.device.set_rng_state(own)
        return total if weights is None else total / at_least_tiny(weights)

    def _refuse_other_loss(self, told: Tensor, expected: Tensor) -> None:
        """Waits for the device. What is not finite is for others to judge."""
        ours, theirs = float(told), float(expected)
        most = _AGREES.get(self._precision, 1e-4) * max(abs(theirs), 1e-3)
        if abs(ours - theirs) > most:
            what = f"the replayed loss is {ours:.6g}, the loss function's own {theirs:.6g}"
            self.release(f"{what}: it depends on something that a graph does not see")
            raise WrongReplayError(what)


def _is_due(num_replays: int) -> bool:
    return num_replays & (num_replays - 1) == 0 or num_replays % _CHECK_AT_LEAST_EVERY == 0
