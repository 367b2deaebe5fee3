"""Is every process of a training still alive? Each shows a pulse, and one that stops is ended, so that none waits on.

The launcher sees a process that was killed, and asks the others to stop; but they may wait for it in the middle of a
step. One that hangs as a whole (stopped, frozen with its machine) nobody sees: NCCL and gloo know no shorter limit than
the longest evaluation. The pulse is a thread's: who computes for ever still has one, so it also says whether the
process gets on.
"""

import contextlib
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from whet.base.errors import LostRankError
from whet.world.exchange import Exchange
from whet.world.headway import Headway, find_late

BEAT_SECONDS = 1.0
LOST_SECONDS = 15.0
"""Without a pulse for so long, a process counts as lost."""
GRACE_SECONDS = 5.0
"""Until a process that learns of a lost one, and hangs in what it waits for, ends itself."""
LEFT = "left"


class Pulse:
    """Shows this process's pulse and watches those of others: the first one all, all others the first."""

    def __init__(self, exchange: Exchange, headway: Headway, *, lost_seconds: float = LOST_SECONDS) -> None:
        self._exchange = exchange
        self._headway = headway
        self._lost_seconds = lost_seconds
        rank, size = exchange.rank, exchange.size
        self._watched = list(range(1, size)) if rank == 0 else [0]
        # The second one speaks first where the first one is silent.
        self._patience = lost_seconds if rank < 2 else lost_seconds + 2 * BEAT_SECONDS
        self._seen: dict[int, tuple[str, float]] = {}
        self._places: dict[int, dict[str, Any]] = {}
        self._answered_at = time.monotonic()
        self._has_left = threading.Event()
        self.lost: str | None = None
        """Which process is gone, in words."""
        self.say: Callable[[str], None] = lambda _line: None
        """Is given that line in the process that finds it out."""
        exchange.refuse_lost = self.refuse_lost
        me = psutil.Process()
        place = {"host": platform.node(), "pid": me.pid, "born": me.create_time()}
        exchange.post(f"place/{rank}", json.dumps(place))
        exchange.post(f"pulse/{rank}", "0 free")

    def start(self) -> None:
        """From here on; all processes have shown a first pulse."""
        for target in (self._talk, self._watch):
            threading.Thread(target=target, daemon=True, name="whet-pulse").start()

    def leave(self) -> None:
        """Says good-bye: a process that ends is not lost."""
        self._has_left.set()
        self._exchange.post(f"pulse/{self._exchange.rank}", LEFT)

    def refuse_lost(self) -> None:
        """Raises where a process is known to be lost."""
        if self.lost is not None:
            raise LostRankError(
                "another process of this training does not answer",
                got=self.lost,
                try_="the same command, which goes on from the last checkpoint",
            )

    def _talk(self) -> None:
        """All that may have to wait for the network."""
        count = 0
        while not self._has_left.wait(BEAT_SECONDS) and self.lost is None:
            count += 1
            try:
                self._exchange.post(f"pulse/{self._exchange.rank}", f"{count} {self._headway.word()}")
                pulses = self._exchange.find_all([f"pulse/{rank}" for rank in self._watched])
                told = self._exchange.find("lost")
            except RuntimeError:
                # Nobody keeps the texts any more; the other thread counts how long.
                continue
            now = self._answered_at = time.monotonic()
            for rank, pulse in zip(self._watched, pulses, strict=True):
                if self._seen.get(rank, ("", 0.0))[0] != pulse:
                    self._seen[rank] = pulse, now
            if told is not None and not self._has_left.is_set():
                self._lose(told)
            elif (gone := self._gone()) is not None:
                self._find_lost(gone, "has ended without a word")
            elif self._exchange.rank == 0:
                self._find_late()

    def _watch(self) -> None:
        """Only counts."""
        before = time.monotonic()
        while not self._has_left.wait(BEAT_SECONDS) and self.lost is None:
            now = time.monotonic()
            if now - before > 3 * BEAT_SECONDS:
                # We were stopped ourselves, perhaps with all others (Ctrl-Z, a laptop that was closed): begin anew.
                self._answered_at = now
                self._headway.begin_anew()
                self._seen = {rank: (pulse, now) for rank, (pulse, _) in self._seen.items()}
            before = now
            if now - self._answered_at > self._patience:
                self._lose(f"what the processes tell each other by is silent for {self._patience:.0f} s")
                return
            silent = [
                rank
                for rank, (pulse, seen_at) in self._seen.items()
                if pulse != LEFT and now - seen_at > self._patience
            ]
            if silent:
                self._find_lost(silent[0], f"shows no sign of life for {self._patience:.0f} s, and is ended")
                return

    def _gone(self) -> int | None:
        """A process on this machine that has ended without saying so."""
        for rank in self._watched:
            if self._seen[rank][0] == LEFT or self._process(rank) is not None or not self._is_here(rank):
                continue
            # It may have said so a moment ago.
            if self._exchange.find(f"pulse/{rank}") != LEFT:
                return rank
        return None

    def _find_late(self) -> None:
        """All wait for one that does not get on, or for each other."""
        words = {rank: pulse.partition(" ")[2] or "free" for rank, (pulse, _) in self._seen.items()}
        found = find_late({self._exchange.rank: self._headway.word(), **words})
        if found is None:
            return
        rank, where = found
        if rank is None:
            self._end_all(f"all {self._exchange.size} processes wait for each other in {where}, and are ended")
        else:
            self._find_lost(rank, f"does not get on with {where}, while the others wait, and is ended")

    def _find_lost(self, rank: int, how: str) -> None:
        """This process has found out: it tells the others and the user."""
        self._end_all(f"rank {rank} of {self._exchange.size} {how}", lost=str(rank))

    def _end_all(self, line: str, *, lost: str = "") -> None:
        self.say(line)
        self._exchange.post("lost", f"{lost}: {line}")
        self._lose(f"{lost}: {line}")

    def _lose(self, told: str) -> None:
        """Ends the lost process if it is on this machine; and this one too, if it does not end by itself."""
        rank, _, line = told.partition(": ") if ": " in told else ("", "", told)
        self.lost = line
        if rank.isdecimal() and int(rank) != self._exchange.rank and (hung := self._process(int(rank))) is not None:
            with contextlib.suppress(psutil.Error):
                hung.send_signal(signal.SIGKILL)
        if not self._has_left.wait(GRACE_SECONDS):
            os._exit(LostRankError.exit_code)

    def _is_here(self, rank: int) -> bool:
        return self._place(rank).get("host") == platform.node()

    def _process(self, rank: int) -> psutil.Process | None:
        """A process of this training on this machine; not another one that has its number by now."""
        if not self._is_here(rank):
            return None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._place(rank)["pid"])
            if process.create_time() == self._place(rank)["born"] and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def _place(self, rank: int) -> dict[str, Any]:
        if rank not in self._places:
            self._places[rank] = json.loads(self._exchange.find(f"place/{rank}") or "{}")
        return self._places[rank]
