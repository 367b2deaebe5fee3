"""Optimizer steps that are captured once per shape and then replayed with a single launch.

This module runs, captures or replays the step of `step.py`. A shape runs eagerly the first time and is captured the
second time. No extra step is run for a capture, and a failed capture changes nothing. Steps that cannot be
captured run eagerly; `graph_obstacle` holds the reason.
"""

import statistics
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import WhetError
from whet.base.units import format_percent
from whet.data.batch import MicroBatch
from whet.device.abstract import AbstractDevice, AbstractGraphs, Replay
from whet.device.rng import get_torch_rng, set_torch_rng
from whet.step.ema import Ema
from whet.step.graph_safety import (
    CapturedGroups,
    CapturedTensors,
    HostSnapshot,
    capture_obstacle,
    hook_obstacle,
    loss_dependencies,
    loss_key,
    may_update_outside,
)
from whet.step.loss import MicroLoss, clamp_weight, parse_loss
from whet.step.rollback import BufferSnapshot
from whet.step.static_inputs import StaticInputs, signature
from whet.step.step import Outcome, Stepper, WrongReplayError

MAX_CAPTURED_SHAPES = 16
"""Maximum number of captured shapes; other shapes run eagerly. Each capture uses memory for its inputs and its graph.
"""
_MAX_SEEN_SHAPES = 256
_STEPS_TO_REPEAT = 64
"""If no shape repeats within this many steps, capturing is given up."""
_MAX_RECAPTURES = 3
_TIMED_STEPS = 3
_LAUNCH_BOUND_SHARE = 0.75
"""A step is launch-bound if launching its kernels takes at least this share of its time."""
_MAX_REPLAY_RATIO = 1.05
"""Graphs are given up if replays take more than this many times as long as eager steps.

Smaller differences may be timing noise. A capture may select other kernels: those of a ViT on an H200 took 1.85 times
as long.
"""
_CHECK_AT_LEAST_EVERY = 1024
"""Maximum number of replays between two checks against eager execution. A check also happens at every power of two."""
_TOLERANCE = {"bf16": 5e-3, "fp16": 5e-3}
"""Maximum relative difference between replayed and eager loss: the kernels are the same, the order of sums is not."""


@dataclass(slots=True)
class _CapturedStep:
    inputs: "StaticInputs"
    replay: Replay
    outcome: Outcome
    addresses: list[int]
    kept: list[Any]
    """Objects that the loss refers to. They are kept alive so that their ids are not reused."""
    gradients: list[Tensor | None] | None
    """The gradients that a replay computes for an update outside the graph; None if the update is captured too."""
    is_verified: bool = False
    """Whether a replay has been compared with eager execution."""


@dataclass(slots=True)
class _SeenShape:
    """Statistics of a shape that has only been run eagerly."""

    num_steps: int = 0
    """Number of eager steps with this shape."""
    syncs: list[str] = field(default_factory=list)
    """Source lines that made the host wait for the device in the last step."""


class GraphedStepper(Stepper):
    """A Stepper that replays captured graphs if possible. Otherwise, `graph_obstacle` holds the reason."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: AbstractDevice,
        *,
        graphs: AbstractGraphs,
        is_compiled: bool = False,
        only_if_launch_bound: bool = False,
        **options: Any,
    ) -> None:
        """Create a stepper that captures its steps.

        With `only_if_launch_bound`, the first steps determine whether capturing is worthwhile.
        """
        super().__init__(model, optimizer, device, **options)
        self._graphs = graphs
        self.is_launch_bound = None if only_if_launch_bound else True
        self._launch_shares: list[float] = []
        self._eager_seconds: dict[Hashable, list[float]] = {}
        """Durations of the first eager steps, by their key."""
        self._replay_seconds: list[float] | None = [] if only_if_launch_bound else None
        """Durations of the first replays, to be compared with those of eager steps; None if they are not compared."""
        self._is_compiled = is_compiled
        self._captured_kinds: set[Hashable] = set()
        """Combinations of loss, modes and number of micro-batches that have been captured.

        A new shape of a known combination is captured without a preceding eager step, which would allocate the same
        memory a second time outside the graph's pool.
        """
        # A compiled model compiles for each new shape and may benchmark kernels; neither may happen during a capture.
        self._runs_eagerly_first = is_compiled
        self._tensors = CapturedTensors(model, optimizer)
        self._groups = CapturedGroups(optimizer, device.torch_device, dtype=device.lr_dtype)
        self._constants = self._groups.constants()
        self._captures_update = True
        """False if the update cannot be captured, or hyperparameters keep changing, such as betas with OneCycleLR."""
        self._seen: dict[Hashable, _SeenShape] = {}
        self._captured: dict[Hashable, _CapturedStep] = {}
        self._ema_share: Tensor | None = None
        self._syncs: list[str] = []
        self._num_compute_syncs = 0
        """Number of waits in the forward and backward pass of the last eager step."""
        self._num_eager_steps = self._num_recaptures = self._num_replays = self._num_constant_changes = 0
        self.capture_seconds = 0.0
        """Total seconds spent on captures."""
        self.checks_replays = True
        """Whether replays after the first one of a shape are compared with eager execution from time to time."""

    @property
    def num_captured(self) -> int:
        """The number of captured shapes."""
        return len(self._captured)

    @property
    def num_replays(self) -> int:
        """The number of steps that were replayed."""
        return self._num_replays

    def __call__(
        self,
        loss: MicroLoss,
        micro_batches: Iterable[MicroBatch],
        *,
        num_samples: int,
        step: int,
        is_checked: bool = False,
    ) -> Outcome:
        if self._num_eager_steps == 0 and self.graph_obstacle is None:
            self._find_obstacle()
        self._set_ema_share(step)
        if is_checked or self.graph_obstacle is not None:
            return super().__call__(loss, micro_batches, num_samples=num_samples, step=step, is_checked=is_checked)
        with self.device.compute_context(is_step=True), self._freeze_others():
            return self._replay_or_run(loss, micro_batches, num_samples=num_samples, step=step)

    def release_graphs(self, reason: str) -> None:
        self.graph_obstacle = reason
        self._ema_share = None
        self._captured.clear()
        self._seen.clear()

    def _replay_or_run(
        self, loss: MicroLoss, micro_batches: Iterable[MicroBatch], *, num_samples: int, step: int
    ) -> Outcome:
        mark = self.device.mark
        start = mark()
        read = list(micro_batches)
        loaded = mark()
        made = [micro if micro.is_on_device else micro.map_tensors(self.device.put) for micro in read]
        moved, began = mark(), time.perf_counter()
        fetching = ("data", start, loaded), ("transfer", loaded, moved)
        # A graph is valid only for these shapes, this loss and these modes.
        key = (num_samples, *map(signature, made), loss_key(loss), self._tensors.modes())
        self._watch_constants()
        captured = self._valid_capture(key) or self._capture(key, loss, made, num_samples=num_samples)
        if captured is None:
            outcome = self._run_eagerly(key, loss, made, num_samples=num_samples, step=step)
            return replace(outcome, marks=(*fetching, *outcome.marks))
        self._num_replays += 1
        # Check the first replay of each shape, and then a fraction of all replays, however many shapes there are.
        is_due = not captured.is_verified or (self.checks_replays and _is_check_due(self._num_replays))
        expected = self._eager_loss(loss, made, num_samples) if is_due else None
        captured.is_verified = True
        # A replay reads its inputs from fixed addresses.
        captured.inputs.fill(made)
        self._groups.fill_rates()
        self.is_updating = captured.gradients is None
        captured.replay()
        self.is_updating = False
        if captured.gradients is not None:
            for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
                parameter.grad = gradient
            self._update(step)
            self.zero_grad()
        # Clone these tensors, because the next replay overwrites them.
        replayed, norm = captured.outcome.loss.clone(), captured.outcome.grad_norm
        if expected is not None:
            self._check_loss(replayed, expected)
        outcome = Outcome(
            loss=replayed,
            grad_norm=None if norm is None else norm.clone(),
            marks=(*fetching, ("graph", moved, mark())),
            scalars={name: value.clone() for name, value in captured.outcome.scalars.items()},
        )
        if self._replay_seconds is not None and expected is None and key in self._eager_seconds:
            self._time_replay(key, began)
        return outcome

    def _find_obstacle(self) -> None:
        """Stop capturing if a hook or the optimizer would make replays wrong, or leave the update out of the graph."""
        obstacle = hook_obstacle(self.model, self.optimizer)
        if obstacle is None and self._captures_update:
            obstacle = capture_obstacle(self.optimizer, self.scaler, self.device.torch_device)
            if obstacle is not None and may_update_outside(self.optimizer, self.scaler):
                obstacle, self._captures_update = None, False
        if obstacle is not None:
            self.release_graphs(obstacle)

    def _watch_constants(self) -> None:
        """Discard all captures if a hyperparameter has changed. After the second change, capture without the update."""
        constants = self._groups.constants()
        if constants == self._constants:
            return
        self._constants = constants
        if not self._captures_update or not self._captured:
            return
        self._captured.clear()
        self._num_constant_changes += 1
        if self._num_constant_changes > 1:
            self._captures_update = False
            if self.scaler.is_enabled():
                self.release_graphs("loss scaling with hyperparameters that change repeatedly cannot be captured")

    # --- eager steps --------------------------------------------------------------------------------------------------

    def _run_eagerly(
        self, key: Hashable, loss: MicroLoss, made: Sequence[MicroBatch], *, num_samples: int, step: int
    ) -> Outcome:
        seen = self._seen.get(key)
        if seen is None and len(self._seen) < _MAX_SEEN_SHAPES:
            seen = self._seen[key] = _SeenShape()
        start = time.perf_counter()
        with self._graphs.warm_up() as self._syncs:
            outcome = self._step(loss, made, num_samples=num_samples, step=step)
        # An update outside the graph may wait for the device.
        syncs = self._syncs if self._captures_update else self._syncs[: self._num_compute_syncs]
        if self.is_launch_bound is None:
            self._time_launches(key, start)
        # Clear the gradients, as a replay does: its gradients are in the graph's pool.
        self.optimizer.zero_grad(set_to_none=True)
        self._num_eager_steps += 1
        if seen is not None:
            seen.num_steps += 1
            seen.syncs = syncs
            if syncs and seen.num_steps > 1:
                self.release_graphs(f"the step waits for the device, at {syncs[0]}")
        if not self._captured and self._num_eager_steps >= _STEPS_TO_REPEAT and self.graph_obstacle is None:
            self.release_graphs(f"no shape repeated in {self._num_eager_steps} steps")
        return outcome

    def _time_launches(self, key: Hashable, start: float) -> None:
        """Decide from the first steps whether they are launch-bound; otherwise, capturing does not pay off."""
        launched = time.perf_counter()
        self.device.sync()
        # The first step allocates memory and loads kernels.
        if self._num_eager_steps:
            seconds = max(time.perf_counter() - start, 1e-9)
            self._eager_seconds.setdefault(key, []).append(seconds)
            self._launch_shares.append((launched - start) / seconds)
        if len(self._launch_shares) < _TIMED_STEPS:
            return
        self.launch_share = share = statistics.median(self._launch_shares)
        self.is_launch_bound = share >= _LAUNCH_BOUND_SHARE
        if not self.is_launch_bound:
            taken = format_percent(share)
            self.release_graphs(f"launching kernels takes {taken} of a step: the device is busy without a capture")

    def _time_replay(self, key: Hashable, began: float) -> None:
        """Give up capturing if the first replays take longer than the eager steps did."""
        assert self._replay_seconds is not None
        self.device.sync()
        self._replay_seconds.append(time.perf_counter() - began)
        if len(self._replay_seconds) < _TIMED_STEPS:
            return
        replay, eager = statistics.median(self._replay_seconds), statistics.median(self._eager_seconds[key])
        self._replay_seconds = None
        if replay > _MAX_REPLAY_RATIO * eager:
            self.release_graphs(f"a replayed step takes {replay / eager:.2f} times as long as an eager one")

    def _update(self, step: int) -> None:
        self._num_compute_syncs = len(self._syncs)
        super()._update(step)

    def _update_ema(self, ema: Ema, step: int) -> None:
        if self._ema_share is None:
            super()._update_ema(ema, step)
        else:
            ema.update_by(self._ema_share)

    def _set_ema_share(self, step: int) -> None:
        """Write the EMA share of this step to the tensor from which a captured step reads it."""
        if self.ema is None or self.graph_obstacle is not None:
            return
        if self._ema_share is None:
            self._ema_share = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        self._ema_share.fill_(self.ema.share(step))

    # --- capturing ----------------------------------------------------------------------------------------------------

    def _valid_capture(self, key: Hashable) -> _CapturedStep | None:
        """Return the captured step for a key, or None. If addresses have changed, discard all captures."""
        captured = self._captured.get(key)
        if captured is None or captured.addresses == self._addresses():
            return captured
        self._num_recaptures += 1
        self._captured.clear()
        if self._num_recaptures > _MAX_RECAPTURES:
            self.release_graphs("weights, buffers or optimizer state are replaced repeatedly")
        return None

    def _capture(
        self, key: Hashable, loss: MicroLoss, made: Sequence[MicroBatch], *, num_samples: int
    ) -> _CapturedStep | None:
        seen, kind = self._seen.get(key), (len(made), loss_key(loss), self._tensors.modes())
        has_run = seen is not None and not seen.syncs
        is_known_kind = seen is None and kind in self._captured_kinds
        if (
            self.graph_obstacle is not None
            or self.is_launch_bound is None
            or not (has_run or is_known_kind)
            or len(self._captured) >= MAX_CAPTURED_SHAPES
        ):
            return None
        self._find_obstacle()
        if self.graph_obstacle is not None:
            return None
        start = time.perf_counter()
        # Python code runs during the capture but not during a replay, so it must have no side effects.
        before, inputs = HostSnapshot(self.model), StaticInputs(made)
        if all(inputs.num_bytes > captured.inputs.num_bytes for captured in self._captured.values()):
            # Capture the largest graph first. The memory of smaller graphs is too fragmented for it, but they fit into
            # its memory, so they are captured again afterward.
            self._captured.clear()
            self._graphs.forget()
        gradients: list[Tensor | None] | None = None
        try:
            with self._groups.rates_on_device():
                replay, outcome = self._graphs.capture(
                    lambda: self._step(
                        loss,
                        inputs.micro_batches,
                        num_samples=num_samples,
                        step=0,
                        has_update=self._captures_update,
                        mark=lambda: None,
                    )
                )
            problem = before.change()
            if not self._captures_update:
                gradients = [parameter.grad for parameter in self._parameters]
        except WhetError:
            raise
        except Exception as error:
            # Keep only the text: the exception itself would keep the activations of the step alive.
            problem = f"capturing failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        # Return the gradients to the pool for the next capture.
        self.abort()
        self.capture_seconds += time.perf_counter() - start
        if problem is not None:
            before.restore()
            # A failed capture invalidates the earlier ones.
            self._captured.clear()
            self._captured_kinds.clear()
            if has_run:
                self.release_graphs(problem)
            else:
                self._runs_eagerly_first = True
            return None
        if not self._runs_eagerly_first:
            self._captured_kinds.add(kind)
        self._captured[key] = captured = _CapturedStep(
            inputs=inputs,
            replay=replay,
            outcome=outcome,
            addresses=self._addresses(),
            kept=[loss, *loss_dependencies(loss)],
            gradients=gradients,
        )
        return captured

    def _addresses(self) -> list[int]:
        others = [] if self.ema is None else list(self.ema.average.values())
        if self.scaler.is_enabled():
            others += [t for t in (self.scaler._scale, self.scaler._growth_tracker) if t is not None]
        addresses = self._tensors.addresses(has_update=self._captures_update)
        return [*addresses, *(tensor.data_ptr() for tensor in others)]

    # --- periodic checks ----------------------------------------------------------------------------------------------

    def _eager_loss(self, loss: MicroLoss, made: Sequence[MicroBatch], num_samples: int) -> Tensor:
        """Compute the loss of this step eagerly, then restore the buffers and generators that it changed."""
        buffers, rng = BufferSnapshot(self.model), get_torch_rng(self.device)
        total: Tensor | None = None
        weights: Tensor | float | None = None
        # Keep gradients enabled for a compiled model, which would otherwise be compiled again.
        with self._graphs.warm_up(), torch.set_grad_enabled(self._is_compiled):
            for micro in made:
                with self.device.autocast(self._precision):
                    part, weight = parse_loss(loss(micro))
                share = part.detach() * (len(micro) / num_samples) if weight is None else part.detach()
                total = share if total is None else total + share
                if weight is not None:
                    weights = weight if weights is None else weights + weight
        assert total is not None
        buffers.restore()
        set_torch_rng(rng, self.device)
        return total if weights is None else total / clamp_weight(weights)

    def _check_loss(self, replayed: Tensor, expected: Tensor) -> None:
        """Raise WrongReplayError if the losses differ; this waits for the device. NaN and Inf are left to the guard."""
        ours, theirs = float(replayed), float(expected)
        tolerance = _TOLERANCE.get(self._precision, 1e-4) * max(abs(theirs), 1e-3)
        if abs(ours - theirs) > tolerance:
            what = f"the replayed loss is {ours:.6g}, the loss function's own {theirs:.6g}"
            self.release_graphs(f"{what}: it depends on something that a graph does not see")
            raise WrongReplayError(what)


def _is_check_due(num_replays: int) -> bool:
    return num_replays & (num_replays - 1) == 0 or num_replays % _CHECK_AT_LEAST_EVERY == 0
