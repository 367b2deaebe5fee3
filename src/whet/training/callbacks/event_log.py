"""Record steps and events. Losses are read late and in bulk, so that no step waits for the device."""

import contextlib
import errno
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.base.origin import format_traceback
from whet.data.batch import GlobalBatch
from whet.device.abstract import AbstractDevice, Mark
from whet.run import durable
from whet.run.event import SUPERSEDED_KINDS
from whet.run.events import EventLog
from whet.step.ema import named_tensors
from whet.step.non_finite_guard import NonFiniteGuard
from whet.step.step import Outcome, Stepper
from whet.training.callback import Action, Callback
from whet.training.progress import State

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

# Outcomes are read after half a second or 256 steps. Until then their tensors stay on the device.
_READ_EVERY_SECONDS = 0.5
_READ_EVERY_STEPS = 256
_MAX_SAMPLE_IDS = 64

EventHandler = Callable[[str, dict[str, Any]], None]
"""A function that is called with the kind and the fields of every event. It cannot influence the run."""

StepTimesHandler = Callable[[list[tuple[int, float]]], None]
"""A function that is called with lists of (step, seconds), where seconds is computing time on the device's clock."""


def emit_event(on_event: EventHandler | None, kind: str, fields: dict[str, Any]) -> None:
    """Pass an event to `on_event` before the log exists. Output errors (full disk, closed pipe) are ignored."""
    if on_event is not None:
        with contextlib.suppress(OSError):
            on_event(kind, fields)


_PendingStep = tuple[dict[str, Any], np.ndarray, Outcome, Mark]
"""The facts of a step, the ids of its samples, its outcome, and a mark that the device reaches after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepNumbers:
    """The values of the tensors of a step, and its seconds by phase."""

    loss: float | None
    norm: float | None
    scalars: dict[str, float]
    seconds: dict[str, float]


class Recorder(Callback):
    """A callback that collects the outcomes of steps and writes them as events to the run folder and to `on_event`."""

    def __init__(
        self,
        log: EventLog | None,
        device: AbstractDevice,
        *,
        guard: NonFiniteGuard | None = None,
        on_event: EventHandler | None = None,
    ) -> None:
        self._log = log
        self._device = device
        self._guard = guard or NonFiniteGuard(has_scaler=False)
        self._on_event = on_event
        self._run: RunContext | None = None
        self._reader = device.reader()
        self._pending: list[_PendingStep] = []
        self._num_left = 0
        """How many of the pending steps the last read left, because the device had not finished them."""
        self._read_at = time.monotonic()
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._extra_seconds: dict[str, float] = {}
        self._is_log_failing = False
        self._is_emitting = False
        self._signal_events: list[tuple[str, dict[str, Any]]] = []
        self._epoch_began = time.monotonic()
        self.overhead_seconds = 0.0
        """Total seconds spent outside steps and data loading, such as evaluations and saves."""
        self.is_idle = False
        """Whether the run had already finished before this session, in which case its start and end are not logged."""
        self.on_step_times: StepTimesHandler | None = None
        self.repeat_until = -1
        """Steps up to this one are already in the log.

        They are repeated to verify a resume and are not written again.
        """
        self.repeated: dict[int, float | None] = {}
        """The losses of the repeated steps, by step."""

    # --- callback ----------------------------------------------------------------------------------------------------

    def on_start(self, run: "RunContext") -> None:
        self._run = run
        self._epoch_began = time.monotonic()

    def after_step(self, state: State, outcome: Outcome) -> Action:
        """Queue the outcome of a step. Its tensors are read later."""
        if not outcome.is_skipped:
            assert state.batch is not None
            epoch = state.position.epoch - state.batch.is_last_of_epoch
            facts = {"step": state.step, "epoch": epoch, "samples": state.samples, "lr": state.lr}
            mark = None if self._reader is None else self._device.mark()
            self._pending.append((facts, state.batch.ids, outcome, mark))
            num_new = len(self._pending) - self._num_left
            if num_new >= _READ_EVERY_STEPS or time.monotonic() - self._read_at > _READ_EVERY_SECONDS:
                self._read_finished()
        return Action.NONE

    def on_epoch_end(self, state: State) -> Action:
        """Log the epoch, including values that are too expensive to collect in every step."""
        assert self._run is not None
        now = time.monotonic()
        self.event(
            "epoch",
            step=state.step,
            epoch=state.epoch,
            epoch_seconds=now - self._epoch_began,
            memory=asdict(self._device.memory.usage()),
            state_bytes=held_memory(*self._run.steppers.values()),
            num_shapes=len(self._run.executor.splitting.shapes),
        )
        self._epoch_began = now
        return Action.NONE

    def end(self, state: State, error: BaseException | None, *, reason: str) -> None:
        """Log the end of a session: the reason, the traceback if it failed, and the time since the last step."""
        self.read()
        outcome = "done" if state.is_finished and error is None else "stopped"
        fields: dict[str, Any] = {"state": "failed" if isinstance(error, Exception) else outcome, "reason": reason}
        if isinstance(error, Exception) and (cause := _unexpected(error)) is not None:
            fields["traceback"] = format_traceback(cause)
        rest, self._extra_seconds = self._extra_seconds, {}
        if self.is_idle:
            self.notify("end", step=state.step, **fields)
        else:
            self._write("end", step=state.step, **fields, **({"seconds": rest} if rest else {}))

    def open(self, log: EventLog) -> None:
        """Open the event log of the run folder. Events are written to it from now on."""
        self._log = log

    # --- logging -----------------------------------------------------------------------------------------------------

    def event(self, kind: str, *, step: int, **fields: Any) -> None:
        """Log an event, after the events of all pending steps."""
        self.read()
        self._write(kind, step=step, **fields)

    def defer(self, kind: str, *, step: int, **fields: Any) -> None:
        """Log an event later, once the steps before it have been read. Does not wait for the device."""
        self._waiting.append((kind, {"step": step, **fields}))

    def warn(self, step: int, what: str, error: WhetError, *, path: Path, retry: str) -> None:
        """Log a disk error that does not stop training."""
        self.event("warning", step=step, **_disk_error(what, error, path=path, retry=retry))

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add seconds spent on evaluation or saving to the record of the oldest step that is not yet written."""
        self._extra_seconds[phase] = self._extra_seconds.get(phase, 0.0) + seconds
        self.overhead_seconds += seconds

    def timed(self, batches: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        """Yield the batches, and record the time spent waiting for them as data time."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self._extra_seconds["data"] = self._extra_seconds.get("data", 0.0) + (time.perf_counter() - start)
            if batch is None:
                return
            yield batch

    def notify(self, kind: str, **fields: Any) -> None:
        """Call `on_event` without writing to the run folder. If the handler raises, it is not called again."""
        if self._on_event is None:
            return
        try:
            self._emit(kind, fields)
        except Exception as error:
            self._on_event = None
            reason = f"on_event failed and is not called any more: {type(error).__name__}: {error}"
            self._append("warning", step=fields.get("step", 0), reason=reason, retry="never")
        self._emit_signal_events()

    def notify_from_signal(self, kind: str, **fields: Any) -> None:
        """Call `on_event` from a signal handler: immediately, or right after the call that the signal interrupted."""
        self._signal_events.append((kind, fields))
        if not self._is_emitting:
            self._emit_signal_events()

    def flush(self) -> None:
        """Write pending lines to the file. Lines that cannot be written remain pending."""
        if self._log is not None:
            with contextlib.suppress(WhetError):
                self._log.flush()

    def fsync(self) -> None:
        """Sync flushed lines to disk, so that they survive a power failure along with the next checkpoint.

        Thread-safe.
        """
        if self._log is not None:
            self._log.fsync()

    def read(self) -> None:
        """Read the pending outcomes, waiting for the device only once, and write them."""
        pending, self._pending, self._num_left = self._pending, [], 0
        if pending:
            self._write_steps(pending, self._read_numbers(pending))
        self._read_at = time.monotonic()
        self._write_waiting(until_step=None)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _read_finished(self) -> None:
        """Read the steps that the device has finished, and wait only for those that the last read left.

        Waiting for the newest step would leave the device idle until the host has launched the next one. Waiting for
        older ones keeps the host from running ahead without limit.
        """
        if self._reader is None:
            self.read()
            return
        num_read = self._num_left
        while num_read < len(self._pending) and self._reader.has_reached(self._pending[num_read][3]):
            num_read += 1
        finished, self._pending = self._pending[:num_read], self._pending[num_read:]
        self._num_left = len(self._pending)
        if finished:
            with self._reader.after(finished[-1][3]):
                numbers = self._read_numbers(finished)
            self._write_steps(finished, numbers)
            self._write_waiting(until_step=finished[-1][0]["step"])
        self._read_at = time.monotonic()

    def _write_waiting(self, *, until_step: int | None) -> None:
        """Write the deferred events of steps up to this one; all of them with None."""
        waiting, self._waiting = self._waiting, []
        for kind, fields in waiting:
            if until_step is None or fields["step"] <= until_step:
                self._write(kind, **fields)
            else:
                self._waiting.append((kind, fields))

    @property
    def _has_one_loss(self) -> bool:
        # The sum of losses jumps if optimizers step at different intervals, but that is not a spike.
        return self._run is None or len(self._run.steppers) == 1

    def _read_numbers(self, pending: list[_PendingStep]) -> list[_StepNumbers]:
        """Read the tensors and marks of steps. This waits for the device, and runs nothing else on its stream."""
        losses = _as_numbers([outcome.loss if outcome.has_loss else None for _, _, outcome, _ in pending])
        norms = _as_numbers([outcome.grad_norm for _, _, outcome, _ in pending])
        return [
            _StepNumbers(
                loss=loss,
                norm=norm,
                scalars={_scalar_name(name): float(value) for name, value in outcome.scalars.items()},
                seconds=self._seconds(outcome),
            )
            for (_, _, outcome, _), loss, norm in zip(pending, losses, norms, strict=True)
        ]

    def _write_steps(self, pending: list[_PendingStep], numbers: list[_StepNumbers]) -> None:
        computing: list[tuple[int, float]] = []
        for (facts, ids, outcome, _), read in zip(pending, numbers, strict=True):
            seconds, loss = read.seconds, read.loss
            computing.append((facts["step"], sum(spent for phase, spent in seconds.items() if phase != "data")))
            for phase, spent in self._extra_seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + spent
            self._extra_seconds = {}
            facts |= {"grad_norm": read.norm, "seconds": seconds, **read.scalars}
            facts |= {} if loss is None else {"loss": loss}
            self._append("step", **facts)
            # A manual step cannot be repeated or skipped, so the guard does not see its loss.
            spike = None
            if loss is not None and not outcome.is_manual and (self._has_one_loss or not math.isfinite(loss)):
                spike = self._guard.observe(facts["step"], loss)
            if spike is not None:
                self._write("spike", step=facts["step"], reason=spike, samples=sample_ids(ids))
        if self.on_step_times is not None:
            self.on_step_times(computing)
        self.notify("step", **pending[-1][0])

    def _write(self, kind: str, *, step: int, **fields: Any) -> None:
        self._append(kind, step=step, **fields)
        self.notify(kind, step=step, **fields)

    def _append(self, kind: str, *, step: int, **fields: Any) -> None:
        """Append an event to the log. A disk error is logged once; lines stay in memory and training continues."""
        if self._log is None:
            return
        if step <= self.repeat_until and kind in SUPERSEDED_KINDS:
            if kind == "step":
                self.repeated[step] = fields.get("loss")
            return
        try:
            self._log.append(kind, step=step, **fields)
            self._is_log_failing = False
        except WhetError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            if not self._is_log_failing:
                self._is_log_failing = True
                what = "the event log waits in memory"
                # Not `warn`, which reads newer steps first: this may be one of several steps that are being written.
                self._write("warning", step=step, **_disk_error(what, error, path=self._log.path, retry="in a second"))

    def _emit(self, kind: str, fields: dict[str, Any]) -> None:
        assert self._on_event is not None
        self._is_emitting = True
        try:
            self._on_event(kind, fields)
        finally:
            self._is_emitting = False

    def _emit_signal_events(self) -> None:
        while self._signal_events and self._on_event is not None:
            try:
                self._emit(*self._signal_events[0])
            except Exception:
                # The signal may have interrupted a write, and Python raises an error for a reentrant write to the same
                # stream.
                return
            del self._signal_events[0]

    def _seconds(self, outcome: Outcome) -> dict[str, float]:
        spent: dict[str, float] = {}
        for phase, start, end in outcome.marks:
            spent[phase] = spent.get(phase, 0.0) + self._device.elapsed_seconds(start, end)
        return spent


def _disk_error(what: str, error: WhetError, *, path: Path, retry: str) -> dict[str, Any]:
    cause = error.__cause__
    code = errno.errorcode.get(cause.errno or 0, "unknown") if isinstance(cause, OSError) else "unknown"
    facts = {"path": str(path), "errno": code, "free_bytes": durable.free_bytes(path), "retry": retry}
    return {"reason": f"{what}: {error.what}: {error.got}", **facts}


def _unexpected(error: Exception) -> BaseException | None:
    """Return the exception whose traceback is useful; None if the message of a WhetError suffices."""
    if not isinstance(error, WhetError):
        return error
    cause = error.__cause__
    return None if isinstance(cause, WhetError | OSError) else cause


def _scalar_name(name: str) -> str:
    """Return a name for a number from the loss that does not collide with the fields of a step event."""
    taken = ("kind", "time", "step", "epoch", "samples", "lr", "loss", "grad_norm", "seconds")
    return f"{name}_" if name in taken else name


def sample_ids(ids: np.ndarray) -> list[int]:
    """Return the sample ids of a step, for an event. A large batch is represented by its first 64."""
    return [int(number) for number in ids[:_MAX_SAMPLE_IDS]]


def held_memory(stepper: Stepper, *others: Stepper) -> dict[str, int]:
    """Return the bytes that weights, gradients, optimizer state and EMA take on this rank. `others` share the model."""

    def count(tensors: Iterable[Tensor]) -> int:
        local = (stepper.strategy.local(tensor) for tensor in tensors)
        return sum(tensor.numel() * tensor.element_size() for tensor in local)

    slots = (slot for one in (stepper, *others) for slot in one.optimizer.state.values())
    state = (value for slot in slots for value in slot.values() if isinstance(value, Tensor))
    gradients = (parameter.grad for parameter in stepper.model.parameters() if parameter.grad is not None)
    held = {
        "weights": count(tensor for _, tensor in named_tensors(stepper.model)),
        "gradients": count(gradients),
        "optimizer": count(state),
    }
    return held if stepper.ema is None else {**held, "ema": count(stepper.ema.average.values())}


def _as_numbers(tensors: list[Tensor | None]) -> list[float | None]:
    """Return the values of scalar tensors on one device, waiting for the device only once."""
    present = [tensor for tensor in tensors if tensor is not None]
    values = iter(torch.stack(present).tolist()) if present else iter(())
    return [None if tensor is None else next(values) for tensor in tensors]
