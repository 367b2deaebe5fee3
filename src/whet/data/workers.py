"""Worker processes that read samples ahead and are restarted if one of them is lost.

Each of n workers reads every n-th global batch of an epoch and sends it through a pipe. Samples and their seeds are a
pure function of the position. If a worker is killed, crashes or hangs, all workers restart at the first batch that has
not arrived, and read the same samples. torch's DataLoader is not used for two reasons: it reports a lost worker by an
exception in the middle of any Python code, such as an optimizer step, and it shares tensors through /dev/shm.
"""

import multiprocessing
import os
import queue
import select
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.base import env
from whet.base.errors import UsageError, WhetError
from whet.base.process import kill_with_parent, signal_name, watch_parent
from whet.data.batch import Position
from whet.data.order import PlannedBatch, SampleOrder
from whet.data.sample import BadSampleError, DatasetReader, SampleIdentity, pack_samples

WORKER_TIMEOUT_SECONDS = 120.0
"""Seconds without a message after which a worker counts as hung."""
MAX_LOSSES = 3
"""Number of lost workers at which the run fails."""
BATCHES_TO_RESET_LOSSES = 100
"""Number of batches without a loss after which the count of lost workers is reset."""

# Each message starts with a header: its kind (one byte) and the size of its content (64 bits).
_HEAD = struct.Struct("<cQ")
_BATCH, _ERROR, _HEARTBEAT = b"b", b"e", b"."
_HEARTBEAT_SECONDS = 1.0
# A program that contains one of these words may distinguish itself from its workers.
_GUARD_WORDS = ("__main__", "__mp_main__", "current_process", "parent_process")


class _WorkerLostError(Exception):
    """Raised if a worker has ended or hangs. The message describes which."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: Any
    commands: Connection
    results: Connection


class Workers:
    """Worker processes that read the batches of an epoch. They stay alive for the next epoch."""

    def __init__(self, reader: DatasetReader, order: SampleOrder, *, count: int, start: str, prefetch: int) -> None:
        self._reader, self._order = reader, order
        self._count, self._prefetch = count, prefetch
        if start == "spawn":
            _check_main_guard()
        self._context: Any = multiprocessing.get_context(start)
        self._workers: list[_Worker] = []
        self._is_idle = True
        self._num_losses = 0
        self._num_since_loss = 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        """Events for the run's log, as (kind, fields)."""

    def batches(self, position: Position) -> Iterator[tuple[list[Any], Any]]:
        """Yield the samples and the collated result of each remaining global batch of the epoch at `position`."""
        self._begin(position)
        turn, current = 0, position
        for planned in self._order.batches(position):
            while True:
                try:
                    content = self._receive(self._workers[turn % self._count])
                    break
                except _WorkerLostError as lost:
                    self._record_loss(str(lost), planned.ids)
                    self.close()
                    # Restart at the batch that did not arrive. Batches that were read ahead are read again.
                    self._begin(current)
                    turn = 0
            turn, current = turn + 1, planned.after
            self._num_since_loss += 1
            yield content
        self._is_idle = True

    def identify(self, ids: list[int]) -> SampleIdentity:
        """Call `DatasetReader.identify` in a worker. Return an empty identity if the worker is lost.

        A separate process is used because a dataset may open files at the first read, and workers that are forked later
        must not inherit them.
        """
        try:
            self._workers = [self._start(0)]
            self._workers[0].commands.send(ids)
            identity: SampleIdentity = self._receive(self._workers[0])
            return identity
        except (_WorkerLostError, OSError):
            return SampleIdentity()
        finally:
            self.close()

    def close(self) -> None:
        """Kill all worker processes. They start again on the next use."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.commands.close()
            worker.results.close()
        self._workers = []

    def _begin(self, position: Position) -> None:
        if not self._is_idle:
            # The last epoch was abandoned. Starting new workers discards the batches that were read ahead.
            self.close()
        # The workers compute the order themselves, except for state that only this process has.
        state = self._order.state(position.epoch)
        for is_last_try in (False, True):
            if not self._workers:
                self._workers = [self._start(number) for number in range(self._count)]
            try:
                for worker in self._workers:
                    worker.commands.send((position.epoch, position.samples, state))
                break
            except OSError:
                # A worker died while idle, so no batch is lost.
                if is_last_try:
                    raise
                self.close()
        self._is_idle = False

    def _start(self, number: int) -> _Worker:
        commands_in, commands = self._context.Pipe(duplex=False)
        results, results_out = self._context.Pipe(duplex=False)
        args = (self._reader, self._order, number, self._count, self._prefetch, commands_in, results_out, os.getpid())
        process = self._context.Process(target=worker_main, args=args, daemon=True, name=f"whet-data-{number}")
        with warnings.catch_warnings():
            # Python 3.12 and later warn about forking a process with threads. The workers do not use these threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                # A spawned process imports multiprocessing before it receives the path of this process.
                with env.safe_path():
                    process.start()
            except Exception as error:
                if isinstance(error, OSError):
                    raise
                # Everything is sent to spawned workers as a pickle.
                raise UsageError(
                    "the dataset or its collate function cannot be sent to workers",
                    got=f"{type(error).__name__}: {error}",
                    try_='workers=0 (in Python: overrides={"workers": 0}), or functions of a module instead of lambdas',
                ) from error
        # Close these ends in this process, so that reading from the pipe of a dead worker returns EOF.
        commands_in.close()
        results_out.close()
        return _Worker(process, commands, results)

    def _receive(self, worker: _Worker) -> Any:
        try:
            while True:
                kind, size = _HEAD.unpack(_read_exactly(worker.results, _HEAD.size))
                if kind != _HEARTBEAT:
                    content = ForkingPickler.loads(_read_exactly(worker.results, size))
                    break
        except EOFError:
            worker.process.join(5)
            raise _WorkerLostError(_describe_exit(worker.process.exitcode)) from None
        except TimeoutError:
            worker.process.kill()
            raise _WorkerLostError(f"read no sample for {WORKER_TIMEOUT_SECONDS:.0f} s and was killed") from None
        if kind == _ERROR:
            error, note = content
            error.add_note(note)
            raise error
        return content

    def _record_loss(self, how: str, ids: np.ndarray) -> None:
        self._num_losses = 1 if self._num_since_loss >= BATCHES_TO_RESET_LOSSES else self._num_losses + 1
        self._num_since_loss = 0
        samples = ", ".join(str(number) for number in ids[:4]) + (", ..." if len(ids) > 4 else "")
        if self._num_losses >= MAX_LOSSES:
            raise WhetError(
                f"a data worker was lost {self._num_losses} times",
                got=f"{how}; the batch that did not arrive has the samples {samples}",
                try_="workers=0, which reads them in this process and shows the error",
            )
        again = "at the same sample, with new workers"
        reason = f"a data worker was lost: {how}"
        self.events.append(("warning", {"reason": reason, "retry": again, "samples": samples}))


def _check_main_guard() -> None:
    """Raise UsageError if a spawned worker would run the whole program again, because it has no main guard.

    Without this check, the workers fail one after another. With a dataset of more than 64 KB, Python even waits forever
    for a worker that ended before it read the dataset.
    """
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    # A notebook has no file, and `python -m package` is not imported again.
    if file is None or getattr(spec, "name", "").endswith("__main__"):
        return
    try:
        source = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    if not any(word in source for word in _GUARD_WORDS):
        raise UsageError(
            "data workers are spawned, and each would run this program again",
            got=f'{Path(file).name} without if __name__ == "__main__"',
            try_='def main(): ... and if __name__ == "__main__": main()',
        )


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code < 0:
        name = signal_name(-code)
        return f"killed by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
    return f"ended with exit code {code}"


def _read_exactly(source: Connection, size: int) -> bytearray:
    """Read exactly `size` bytes.

    Raise EOFError if the worker has exited, and TimeoutError if it sends nothing.
    """
    data = bytearray(size)
    view, filled = memoryview(data), 0
    poll = select.poll()
    poll.register(source.fileno(), select.POLLIN)
    while filled < size:
        if not poll.poll(WORKER_TIMEOUT_SECONDS * 1000):
            raise TimeoutError
        # Read into the preallocated buffer without a copy, because batches can be large.
        count = os.readv(source.fileno(), [view[filled:]])
        if count == 0:
            raise EOFError
        filled += count
    return data


# --- in the worker ---------------------------------------------------------------------------------------------------


def worker_main(
    reader: DatasetReader,
    order: SampleOrder,
    number: int,
    count: int,
    prefetch: int,
    commands: Connection,
    results: Connection,
    parent: int,
) -> None:
    """Run a worker process: read its batches of each requested epoch."""
    # Ctrl-C is sent to every process of the terminal. The training process decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Exit when the training process is killed: immediately on Linux, within a second on other systems.
    kill_with_parent()
    watch_parent(parent, lambda: os._exit(0))
    # Multiple threads in each worker would compete with the training process.
    torch.set_num_threads(1)
    # The queue is bounded, so that a worker reads at most `prefetch` batches ahead.
    outbox: queue.Queue[tuple[bytes, Any]] = queue.Queue(prefetch)
    threading.Thread(target=_send, args=(outbox, results), daemon=True).start()
    is_ready = False
    while True:
        try:
            request = commands.recv()
        except EOFError:
            return
        try:
            if not is_ready:
                # Initialize here, so that an error is sent as a response.
                reader.init_worker(number, count)
                is_ready = True
            if isinstance(request, list):
                outbox.put((_BATCH, ForkingPickler.dumps(reader.identify(request))))
                continue
            epoch, samples, state = request
            order.load_state(state)
            for turn, planned in enumerate(order.batches(Position(epoch=epoch, samples=samples))):
                if turn % count == number:
                    outbox.put((_BATCH, pack_samples(_read_all(reader, epoch, planned, outbox))))
        except WhetError as error:
            sent = BadSampleError(error.what, got=error.got, try_=error.try_)
            notes = getattr(error, "__notes__", None) or [traceback.format_exc()]
            outbox.put((_ERROR, ForkingPickler.dumps((sent, "\n".join(notes)))))


def _read_all(
    reader: DatasetReader, epoch: int, planned: PlannedBatch, outbox: "queue.Queue[tuple[bytes, Any]]"
) -> tuple[list[Any], Any]:
    """Return (samples, None), or an empty list and the collated result."""
    samples = []
    last_beat = time.monotonic()
    for sample, key in zip(planned.ids, planned.keys, strict=True):
        samples.append(reader.read(epoch, int(sample), int(key)))
        if time.monotonic() - last_beat > _HEARTBEAT_SECONDS:
            last_beat = time.monotonic()
            if outbox.empty():
                outbox.put((_HEARTBEAT, b""))
    collated = reader.collate(samples, epoch, planned.after)
    return ([], collated) if collated is not None else (samples, None)


def _send(outbox: "queue.Queue[tuple[bytes, Any]]", results: Connection) -> None:
    while True:
        kind, content = outbox.get()
        rest = memoryview(_HEAD.pack(kind, len(content)) + bytes(content))
        try:
            while rest:
                rest = rest[os.write(results.fileno(), rest) :]
        except OSError:
            os._exit(0)
