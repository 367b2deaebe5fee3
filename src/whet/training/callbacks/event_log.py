"""Record steps and events; losses are read late and in bulk, so that no step waits for the device."""

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.data.batch import GlobalBatch
from whet.device.abstract import AbstractDevice
from whet.run import durable
from whet.run.events import EventLog
from whet.step.non_finite_guard import NonFiniteGuard
from whet.step.step import Outcome

_READ_EVERY_SECONDS = 0.5
_MAX_PENDING = 256
_MAX_SAMPLE_IDS = 64


EventHandler = Callable[[str, dict[str, Any]], None]
"""Is told of every kind of event with its fields; it may draw, and cannot change the run."""


def emit_event(show: EventHandler | None, kind: str, fields: dict[str, Any]) -> None:
    """Before there is a run to write a refusal into: a screen that refuses (full disk, closed pipe) ends nothing."""
    if show is not None:
        with contextlib.suppress(OSError):
            show(kind, fields)


StepTimesHandler = Callable[[list[tuple[int, float]]], None]
"""Is given steps and the seconds their computing took on the device's clock, many at once."""


class Recorder:
    """Collects the outcomes of steps and writes them as events."""

    def __init__(
        self,
        log: EventLog | None,
        device: AbstractDevice,
        *,
        soundness: NonFiniteGuard | None = None,
        show: EventHandler | None = None,
    ) -> None:
        self._log = log
        self._device = device
        self._soundness = soundness or NonFiniteGuard(has_scaler=False)
        self._show = show
        self._pending: list[tuple[dict[str, Any], np.ndarray, Outcome]] = []
        self._read_at = time.monotonic()
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._extra_seconds: dict[str, float] = {}
        self._is_log_refused = False
        self._is_showing = False
        self._interjections: list[tuple[str, dict[str, Any]]] = []
        self.aside_seconds = 0.0
        """All seconds so far that went neither to steps nor to their data."""
        self.watch: StepTimesHandler | None = None

    def step(self, outcome: Outcome, *, ids: np.ndarray, **facts: Any) -> None:
        """Takes a step's outcome, its samples and what else is known of it; the outcome's tensors are read later."""
        self._pending.append((facts, ids, outcome))
        if len(self._pending) >= _MAX_PENDING or time.monotonic() - self._read_at > _READ_EVERY_SECONDS:
            self.read()

    def spent(self, phase: str, seconds: float) -> None:
        """Adds time spent outside steps (evaluate, save) to the oldest step that is not written yet, or to the next."""
        self._extra_seconds[phase] = self._extra_seconds.get(phase, 0.0) + seconds
        self.aside_seconds += seconds if phase != "data" else 0.0

    def timed(self, batches: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        """The same batches; waiting for them counts as time for data."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.spent("data", time.perf_counter() - start)
            if batch is None:
                return
            yield batch

    def later(self, kind: str, **fields: Any) -> None:
        """Takes what is written behind the steps so far, once they are read: nobody waits for the device for it."""
        self._waiting.append((kind, fields))

    def event(self, kind: str, *, step: int, **fields: Any) -> None:
        """Writes a happening, behind all steps before it."""
        self.read()
        self._write(kind, step=step, **fields)

    def end(self, *, step: int, **fields: Any) -> None:
        """Writes the end of a sitting, with the time that no later step will carry."""
        self.read()
        rest, self._extra_seconds = self._extra_seconds, {}
        self._write("end", step=step, **fields, **({"seconds": rest} if rest else {}))

    def tell(self, kind: str, **fields: Any) -> None:
        """Shows what need not be written. Who cannot be told is told nothing more: that must not end a run."""
        if self._show is None:
            return
        try:
            self._show_alone(kind, fields)
        except Exception as error:
            self._show = None
            reason = f"showing the run failed, so nothing more is shown: {type(error).__name__}: {error}"
            self._append("warning", step=fields.get("step", 0), reason=reason, retry="never")
        self._tell_interjections()

    def interject(self, kind: str, **fields: Any) -> None:
        """Shows what a signal handler has to say: at once, or, where it came in the middle of showing, right after."""
        self._interjections.append((kind, fields))
        if not self._is_showing:
            self._tell_interjections()

    def _tell_interjections(self) -> None:
        while self._interjections and self._show is not None:
            try:
                self._show_alone(*self._interjections[0])
            except Exception:
                # A handler may come in the middle of any write, and Python refuses a second one into the same stream.
                return
            del self._interjections[0]

    def _show_alone(self, kind: str, fields: dict[str, Any]) -> None:
        assert self._show is not None
        self._is_showing = True
        try:
            self._show(kind, fields)
        finally:
            self._is_showing = False

    def warn(self, step: int, what: str, error: WhetError, *, path: Path, retry: str) -> None:
        """Writes down that the disk refused something, and that training goes on."""
        cause = error.__cause__
        code = errno.errorcode.get(cause.errno or 0, "unknown") if isinstance(cause, OSError) else "unknown"
        facts = {"path": str(path), "errno": code, "free_bytes": durable.free_bytes(path), "retry": retry}
        self.event("warning", step=step, reason=f"{what}: {error.what}: {error.got}", **facts)

    def flush(self) -> None:
        """Hands all that waits to the system; what the disk refuses goes on waiting."""
        if self._log is not None:
            with contextlib.suppress(WhetError):
                self._log.flush()

    def settle(self) -> None:
        """Makes all that was flushed survive a power cut together with the checkpoint written next; any thread."""
        if self._log is not None:
            self._log.fsync()

    def _append(self, kind: str, *, step: int, **fields: Any) -> None:
        """A disk that refuses the log stops no training: the lines wait, and the first refusal is told."""
        if self._log is None:
            return
        try:
            self._log.append(kind, step=step, **fields)
            self._is_log_refused = False
        except WhetError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            if not self._is_log_refused:
                self._is_log_refused = True
                what = "the log of the run waits in memory"
                self.warn(step, what, error, path=self._log.path, retry="in a second")

    def read(self) -> None:
        """Reads what is pending, in one go, and writes it down."""
        self._read_at = time.monotonic()
        pending, self._pending = self._pending, []
        if pending:
            self._read_steps(pending)
        waiting, self._waiting = self._waiting, []
        for kind, fields in waiting:
            self._write(kind, **fields)

    def _read_steps(self, pending: list[tuple[dict[str, Any], np.ndarray, Outcome]]) -> None:
        losses = _as_numbers([outcome.loss for _, _, outcome in pending])
        norms = _as_numbers([outcome.grad_norm for _, _, outcome in pending])
        computing: list[tuple[int, float]] = []
        for (facts, ids, outcome), loss, norm in zip(pending, losses, norms, strict=True):
            assert loss is not None
            seconds = self._seconds(outcome)
            computing.append((facts["step"], sum(spent for phase, spent in seconds.items() if phase != "data")))
            for phase, spent in self._extra_seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + spent
            self._extra_seconds = {}
            facts |= {"loss": loss, "grad_norm": norm, "seconds": seconds}
            self._append("step", **facts)
            unusual = self._soundness.observe(facts["step"], loss)
            if unusual is not None:
                self._write("spike", step=facts["step"], reason=unusual, samples=sample_ids(ids))
        if self.watch is not None:
            self.watch(computing)
        self.tell("step", **pending[-1][0])

    def _write(self, kind: str, *, step: int, **fields: Any) -> None:
        self._append(kind, step=step, **fields)
        self.tell(kind, step=step, **fields)

    def _seconds(self, outcome: Outcome) -> dict[str, float]:
        spent: dict[str, float] = {}
        for phase, start, end in outcome.marks:
            spent[phase] = spent.get(phase, 0.0) + self._device.elapsed_seconds(start, end)
        return spent


def sample_ids(ids: np.ndarray) -> list[int]:
    """The samples of a step for an event; the first ones of a large batch."""
    return [int(number) for number in ids[:_MAX_SAMPLE_IDS]]


def _as_numbers(tensors: list[Tensor | None]) -> list[float | None]:
    """The values of scalars that lie on one device, with a single wait."""
    there = [tensor for tensor in tensors if tensor is not None]
    values = iter(torch.stack(there).tolist()) if there else iter(())
    return [None if tensor is None else next(values) for tensor in tensors]
