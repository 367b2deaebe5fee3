"""Forward a run to a dashboard: read its events, send them in batches, and retry until they are accepted."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from whet.base.model import FrozenModel
from whet.report.export.tables import EXPORTED_KINDS, checked_step, named_event_numbers
from whet.report.forward.dashboards import Dashboard, DashboardRow, UnreachableError, describe_run
from whet.run.event import SESSION_START_KINDS, Event
from whet.run.events import History
from whet.run.folder import Run
from whet.run.follow import PROCESS_DIED, follow, in_batches


class RowCollector:
    """Collects events into one row per step. Keeps the newest row until an event of a later step arrives."""

    def __init__(self) -> None:
        self._open: DashboardRow | None = None
        self._sent = -1
        self.state: str | None = None
        """Final state of the run, or None if it has not ended."""

    def take(self, event: Event) -> Iterator[DashboardRow]:
        """Add an event, and yield the rows that it completes."""
        if event.kind == "end":
            state = event.get("state")
            self.state = state if isinstance(state, str) else "done"
        if event.kind in SESSION_START_KINDS:
            self.state = None
        if event.kind == "resume" and self._open is not None and self._open.step > event.step:
            # The run has resumed from an earlier step and will repeat this one, so drop the row.
            self._open = None
        if event.kind not in EXPORTED_KINDS:
            return
        step = checked_step(event)
        if event.kind == "health" and (self._open is None or self._open.step != step):
            return  # Skip health readings of a repeated step, which already has one.
        if self._open is not None and step > self._open.step:
            yield from self.rest()
        # Do not send a step twice, even if the run repeats it after a resume.
        if step > self._sent:
            known = self._open.values if self._open is not None else {}
            self._open = DashboardRow(step, event.time, {**known, **named_event_numbers(event)})

    def rest(self) -> Iterator[DashboardRow]:
        """Yield the row of the newest step, which is complete once the run has ended."""
        if self._open is not None:
            self._sent = self._open.step
            yield self._open
            self._open = None


_POLL_SECONDS = 1.0
# The pause doubles after each failure, up to a minute.
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0

Notify = Callable[[str], None]


class ForwardResult(FrozenModel):
    """The result of forwarding a run."""

    rows: int
    """Number of rows that were sent, one per step."""
    last_step: int | None
    state: str | None
    """Final state of the run, or None if it has not ended."""


def forward_run(
    run: Run,
    target: Dashboard,
    *,
    project: str = "whet",
    once: bool = False,
    tries: int | None = None,
    notify: Notify | None = None,
    stop: threading.Event | None = None,
) -> ForwardResult:
    """Forward the rows that the dashboard does not have yet, then new rows until the run ends.

    With `once`, stop after the current rows. If the dashboard does not respond, try `tries` times, or forever if None.
    Set `stop` to end early. The next call then sends the remaining rows.
    """
    stop, notify = stop or threading.Event(), notify or _ignore
    retry = _Retry(tries=tries, notify=notify, stop=stop)
    description, rows = describe_run(run, project=project), RowCollector()
    num_sent, last = 0, None
    try:
        forwarded = retry(partial(target.open, description))
        notify(f"{run.path.name} is forwarded to {target.where()}")
        for events in _batches(run, once=once, stop=stop):
            if any(event.kind == PROCESS_DIED for event in events):
                notify("the training process died; waiting for a resume")
            complete = [row for event in events for row in rows.take(event)]
            # The last batch is empty. If the run has ended by then, its newest row is complete and can be sent too.
            complete += [] if events or rows.state is None else rows.rest()
            fresh = [row for row in map(forwarded.new_part, complete) if row is not None]
            for start in range(0, len(fresh), target.max_rows):
                part = fresh[start : start + target.max_rows]
                retry(partial(target.send, part))
                num_sent, last = num_sent + len(part), part[-1].step
        retry(partial(target.close, rows.state))
    except BaseException as error:
        with contextlib.suppress(UnreachableError):
            # Close without a final state, so that the run can be continued later.
            target.close(None)
        if not isinstance(error, _StoppedError):
            raise
    finally:
        stop.set()
    return ForwardResult(rows=num_sent, last_step=last, state=rows.state)


class _StoppedError(Exception):
    """Raised if forwarding is stopped before the dashboard responds."""


_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Retry:
    """Repeats a call until it succeeds, with increasing pauses."""

    tries: int | None
    notify: Notify
    stop: threading.Event

    def __call__(self, call: Callable[[], _Result]) -> _Result:
        pause, failed = _FIRST_RETRY_SECONDS, 0
        while not self.stop.is_set():
            try:
                result = call()
            except UnreachableError as error:
                failed += 1
                if self.tries is not None and failed >= self.tries:
                    raise
                # Report only the first failure in a row.
                if failed == 1:
                    self.notify(f"no answer ({error}); retrying, training does not wait")
                self.stop.wait(pause)
                pause = min(2 * pause, _MAX_RETRY_SECONDS)
            else:
                if failed:
                    self.notify("the dashboard answers again")
                return result
        raise _StoppedError


def _ignore(text: str) -> None:
    """Do nothing. This is the default for `notify`."""


def _batches(run: Run, *, once: bool, stop: threading.Event) -> Iterator[list[Event]]:
    """Yield the events of a run in batches. The last batch is empty."""
    yield from in_batches(History(run).events()) if once else follow(run, poll_seconds=_POLL_SECONDS, stop=stop)
    yield []
