"""How do processes read samples ahead, and what happens when one is lost?

Every process reads each n-th global batch of an epoch and sends it through a pipe of its own. Which samples those are,
and what is random about them, is a pure function: so when a process is killed, crashes or hangs, all are started anew
at the first batch that had not arrived, and nobody can tell from the samples. torch's DataLoader raises a lost worker's
error in the middle of whatever Python does then, an optimizer's step included, and shares tensors through /dev/shm.
"""

import ctypes
import multiprocessing
import os
import queue
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import numpy as np
import torch

from whet.base.errors import WhetError
from whet.data.batch import Position
from whet.data.sample import BadSampleError, pack_sample, sample_digest, unpack_sample

WORKER_TIMEOUT_SECONDS = 120.0
"""A worker that reads no sample for so long is taken to hang."""
MAX_LOSSES = 3
"""So often workers may be lost before this many batches arrive in a row:"""
BATCHES_TO_RESET_LOSSES = 100

_HEAD = struct.Struct("<cQ")
_BATCH, _ERROR, _HEARTBEAT = b"b", b"e", b"."
_HEARTBEAT_SECONDS = 1.0

PlannedBatches = Callable[[Position], Iterator[tuple[np.ndarray, Position, bool]]]
ReadSample = Callable[[tuple[int, int]], Any]


class _WorkerLostError(Exception):
    """A worker that will not answer, and how it ended."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: Any
    commands: Connection
    results: Connection


class Workers:
    """Reads the batches of an epoch with processes; they stay for the next one."""

    def __init__(self, read: ReadSample, planned: PlannedBatches, *, count: int, start: str, prefetch: int) -> None:
        self._read, self._planned = read, planned
        self._count, self._prefetch = count, prefetch
        self._context: Any = multiprocessing.get_context(start)
        self._workers: list[_Worker] = []
        self._is_idle = True
        self._num_losses = 0
        self._num_quiet = 0
        self.news: list[tuple[str, dict[str, Any]]] = []
        """What happened and should be told."""

    @property
    def pids(self) -> list[int]:
        """The processes that read now."""
        return [worker.process.pid for worker in self._workers]

    def batches(self, position: Position) -> Iterator[list[Any]]:
        """The samples of each global batch from `position` to the end of its epoch."""
        self._begin(position)
        turn, here = 0, position
        for ids, after, _ in self._planned(position):
            while True:
                try:
                    samples = self._receive(self._workers[turn % self._count])
                    break
                except _WorkerLostError as lost:
                    self._note(str(lost), ids)
                    self.close()
                    self._begin(here)
                    turn = 0
            turn, here = turn + 1, after
            self._num_quiet += 1
            yield samples
        self._is_idle = True

    def looked_at(self, ids: list[int]) -> list[bytes] | None:
        """What tells each of these samples from others, and once more the first; None where no worker survives it.

        By a process that ends then: a dataset that opens its files when first asked must not do so in this one, since
        workers that are forked later would share them.
        """
        try:
            self._workers = [self._start(0)]
            self._workers[0].commands.send([*ids, ids[0]])
            return self._receive(self._workers[0])
        except (_WorkerLostError, OSError):
            return None
        finally:
            self.close()

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.commands.close()
            worker.results.close()
        self._workers = []

    def _begin(self, position: Position) -> None:
        if not self._is_idle:
            # An epoch was left in the middle: what was read ahead for it is dropped with who read it.
            self.close()
        for is_last_try in (False, True):
            if not self._workers:
                self._workers = [self._start(number) for number in range(self._count)]
            try:
                for worker in self._workers:
                    worker.commands.send((position.epoch, position.samples))
                break
            except OSError:
                # One died while it had nothing to do: nothing is lost.
                if is_last_try:
                    raise
                self.close()
        self._is_idle = False

    def _start(self, number: int) -> _Worker:
        hears, commands = self._context.Pipe(duplex=False)
        results, tells = self._context.Pipe(duplex=False)
        words = (self._read, self._planned, number, self._count, self._prefetch, hears, tells, os.getpid())
        process = self._context.Process(target=worker_main, args=words, daemon=True, name=f"whet-data-{number}")
        with warnings.catch_warnings():
            # Newer Pythons warn of forks beside threads; the children use none that were there.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        # Here they are closed, so that a dead worker's pipe ends.
        hears.close()
        tells.close()
        return _Worker(process, commands, results)

    def _receive(self, worker: _Worker) -> list[Any]:
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
            raise _WorkerLostError(f"it read no sample for {WORKER_TIMEOUT_SECONDS:.0f} s and was killed") from None
        if kind == _ERROR:
            error, told = content
            error.add_note(told)
            raise error
        return [unpack_sample(sample) for sample in content]

    def _note(self, how: str, ids: np.ndarray) -> None:
        self._num_losses = 1 if self._num_quiet >= BATCHES_TO_RESET_LOSSES else self._num_losses + 1
        self._num_quiet = 0
        named = ", ".join(str(number) for number in ids[:4]) + (", ..." if len(ids) > 4 else "")
        if self._num_losses >= MAX_LOSSES:
            raise WhetError(
                f"a data worker was lost {self._num_losses} times",
                got=f"{how}; the batch that did not arrive has the samples {named}",
                try_="workers=0, which reads them in this process and shows what happens",
            )
        again = "at the same sample, with new workers"
        self.news.append(("warning", {"reason": f"a data worker was lost: {how}", "again": again, "samples": named}))


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it closed its pipe"
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
    return f"it ended with exit code {code}"


def _read_exactly(source: Connection, size: int) -> bytearray:
    """So many bytes; EOFError when the other side is gone, TimeoutError when nothing comes."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    waiting = select.poll()
    waiting.register(source.fileno(), select.POLLIN)
    while filled < size:
        if not waiting.poll(WORKER_TIMEOUT_SECONDS * 1000):
            raise TimeoutError
        count = os.readv(source.fileno(), [view[filled:]])
        if count == 0:
            raise EOFError
        filled += count
    return data


# --- in the worker ---------------------------------------------------------------------------------------------------


def worker_main(
    read: ReadSample,
    planned: PlannedBatches,
    number: int,
    count: int,
    prefetch: int,
    hears: Connection,
    tells: Connection,
    parent: int,
) -> None:
    """The life of a worker: told where an epoch begins, it reads its batches of it."""
    # Ctrl-C reaches every process of a terminal; the training decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _exit_with_parent(parent)
    torch.set_num_threads(1)
    outbox: queue.Queue[tuple[bytes, Any]] = queue.Queue(prefetch)
    threading.Thread(target=_send, args=(outbox, tells), daemon=True).start()
    while True:
        try:
            told = hears.recv()
        except EOFError:
            return
        try:
            if isinstance(told, list):
                outbox.put((_BATCH, ForkingPickler.dumps([sample_digest(read((0, sample))) for sample in told])))
                continue
            epoch, samples = told
            for turn, (ids, _, _) in enumerate(planned(Position(epoch=epoch, samples=samples))):
                if turn % count == number:
                    outbox.put((_BATCH, ForkingPickler.dumps(_read_all(read, epoch, ids, outbox))))
        except BadSampleError as error:
            outbox.put((_ERROR, ForkingPickler.dumps((error, "\n".join(error.__notes__)))))


def _read_all(read: ReadSample, epoch: int, ids: np.ndarray, outbox: "queue.Queue[tuple[bytes, Any]]") -> list[Any]:
    found = []
    beaten = time.monotonic()
    for sample in ids:
        found.append(pack_sample(read((epoch, int(sample)))))
        if time.monotonic() - beaten > _HEARTBEAT_SECONDS:
            beaten = time.monotonic()
            if outbox.empty():
                outbox.put((_HEARTBEAT, b""))
    return found


def _send(outbox: "queue.Queue[tuple[bytes, Any]]", tells: Connection) -> None:
    while True:
        kind, content = outbox.get()
        rest = memoryview(_HEAD.pack(kind, len(content)) + bytes(content))
        try:
            while rest:
                rest = rest[os.write(tells.fileno(), rest) :]
        except OSError:
            os._exit(0)


def _exit_with_parent(parent: int) -> None:
    """Ends this process when the training is killed: at once where the system does it, else within a second."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)
