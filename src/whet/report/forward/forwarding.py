"""How does a run reach a dashboard? Read from outside, sent in batches, and sent again until it is taken."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from whet.base.record import Record
from whet.report.forward.rows import Rows
from whet.report.forward.target import Target, UnreachableError, about
from whet.run.event import Event
from whet.run.events import History
from whet.run.folder import Run
from whet.run.follow import GONE, follow

_WAITING_EVENTS = 10_000
"""So many wait in memory while a dashboard is slow; the rest waits in the file."""
_BATCH_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0

Say = Callable[[str], None]


class Forwarded(Record):
    """What was forwarded."""

    rows: int
    """Steps that were new to the dashboard."""
    last_step: int | None
    state: str | None
    """How the run ended; None where it has not."""


def forward(
    run: Run,
    target: Target,
    *,
    project: str = "whet",
    once: bool = False,
    tries: int | None = None,
    say: Say | None = None,
    stop: threading.Event | None = None,
) -> Forwarded:
    """Forwards what the dashboard does not have yet, then what comes, until the run ends (`once`: until now).

    A dashboard that does not answer is tried again, `tries` times or for ever. Setting `stop` ends it soon; what was
    not sent is sent the next time.
    """
    stop, say = stop or threading.Event(), say or _nothing
    insist = _Insisting(tries=tries, say=say, stop=stop)
    told, rows = about(run, project=project), Rows()
    num_sent, last = 0, None
    try:
        held = insist(partial(target.open, told))
        say(f"{run.path.name} is forwarded to {target.where()}")
        for events in _batches(run, once=once, stop=stop):
            if any(event.kind == GONE for event in events):
                say("the training has died; its next events are waited for")
            found = [row for event in events for row in rows.take(event)]
            # No events: it is over. A run that ended has nothing more for its last step.
            found += [] if events or rows.state is None else rows.rest()
            fresh = [row for row in map(held.news, found) if row is not None]
            for start in range(0, len(fresh), target.most_rows):
                part = fresh[start : start + target.most_rows]
                insist(partial(target.send, part))
                num_sent, last = num_sent + len(part), part[-1].step
        insist(partial(target.close, rows.state))
    except BaseException as error:
        with contextlib.suppress(UnreachableError):
            target.close(None)
        if not isinstance(error, _StoppedError):
            raise
    finally:
        stop.set()
    return Forwarded(rows=num_sent, last_step=last, state=rows.state)


class _StoppedError(Exception):
    """It was told to stop before the dashboard answered."""


_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class _Insisting:
    """Asks a dashboard until it answers, with longer and longer pauses."""

    tries: int | None
    say: Say
    stop: threading.Event

    def __call__(self, ask: Callable[[], _Answer]) -> _Answer:
        pause, failed = _FIRST_PAUSE, 0
        while not self.stop.is_set():
            try:
                answer = ask()
            except UnreachableError as error:
                failed += 1
                if self.tries is not None and failed >= self.tries:
                    raise
                if failed == 1:
                    self.say(f"no answer ({error}); tried again until there is one, the training does not wait")
                self.stop.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                if failed:
                    self.say("it answers again")
                return answer
        raise _StoppedError


def _nothing(text: str) -> None:
    """Says it to nobody."""


def _batches(run: Run, *, once: bool, stop: threading.Event) -> Iterator[list[Event]]:
    """The events of a run, a second's worth at a time, or as many as may wait; none at last."""
    if once:
        batch: list[Event] = []
        for event in History(run).events():
            batch.append(event)
            if len(batch) == _WAITING_EVENTS:
                yield batch
                batch = []
        yield from (batch, [])
        return
    waiting: queue.Queue[Event | BaseException | None] = queue.Queue(_WAITING_EVENTS)
    # A thread: following waits for the file, and what was read must not wait with it.
    threading.Thread(target=_read, args=(run, waiting, stop), daemon=True, name="follow").start()
    is_over = False
    while not is_over and not stop.is_set():
        batch, until = [], time.monotonic() + _BATCH_SECONDS
        while len(batch) < _WAITING_EVENTS and (left := until - time.monotonic()) > 0:
            try:
                item = waiting.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(item, BaseException):
                raise item
            if item is None:
                is_over = True
                break
            batch.append(item)
        if batch:
            yield batch
    yield []


def _read(run: Run, waiting: "queue.Queue[Event | BaseException | None]", stop: threading.Event) -> None:
    def put(item: Event | BaseException | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put(item, timeout=0.5)
                return

    try:
        for event in follow(run, stop=stop):
            put(event)
        put(None)
    except BaseException as error:
        put(error)
