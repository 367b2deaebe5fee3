"""The key-value store that ranks share, for the rendezvous at the start and for messages from any thread.

Collectives must be called in the same order on all ranks, and by one thread of each rank. A background checkpoint
cannot guarantee this, so it uses the store.
"""

import datetime as dt
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from whet.base import env
from whet.base.errors import LostRankError, UsageError, WhetError, first_line
from whet.distributed.ranks import RankInfo

# Polling for a message backs off exponentially between these intervals.
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.005, 0.2
# Interval of polling during the rendezvous.
_POLL_SECONDS = 0.02


class RankStore:
    """Short text messages between ranks, stored by name."""

    def __init__(self, ranks: RankInfo, *, timeout_seconds: float) -> None:
        self._ranks = ranks
        self._timeout = timeout_seconds
        shared: Any = distributed_c10d._get_default_store()
        # Use a separate connection, because a wait on the shared one would block other threads.
        self._store = distributed_c10d.PrefixStore("whet", shared.clone())
        self._lock = threading.Lock()
        self._turn = 0
        self.check_lost: Callable[[], None] = lambda: None
        """A function that raises LostRankError if a rank is known to be lost. The heartbeat sets it."""

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def size(self) -> int:
        return self._ranks.size

    def next_turn(self) -> int:
        """Return the number of this call, counted from 1. Ranks use it to create matching message names."""
        self._turn += 1
        return self._turn

    def post(self, name: str, text: str) -> None:
        with self._lock:
            self._store.set(name, text)

    def find(self, name: str) -> str | None:
        """Return a message, or None if it does not exist."""
        with self._lock:
            return self._store.get(name).decode() if self._store.check([name]) else None

    def find_all(self, names: list[str]) -> list[str]:
        """Return several messages with one request to the store. All of them must exist."""
        with self._lock:
            return [text.decode() for text in self._store.multi_get(names)]

    def wait(self, name: str) -> str:
        """Wait for a message and return it. Raise LostRankError after the timeout, or if a rank is lost."""
        deadline, pause = time.monotonic() + self._timeout, _MIN_POLL_SECONDS
        while True:
            text = self.find(name)
            if text is not None:
                return text
            self.check_lost()
            if time.monotonic() > deadline:
                raise LostRankError(
                    "another rank does not respond",
                    got=f"rank {self.rank} of {self.size} has waited {self._timeout:.0f} s for {name}",
                    try_="run the same command again to resume from the last checkpoint",
                )
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)

    def drop(self, name: str) -> None:
        """Delete a message. Call this only after all ranks have read it."""
        with self._lock:
            self._store.delete_key(name)


def join_store(ranks: RankInfo, *, start_seconds: float, timeout_seconds: float) -> Any:
    """Connect to torch's store with a prefix that is unique to this start. Return when all ranks have connected.

    torchrun keeps its store when it restarts a group, so the store may contain addresses of dead processes. Its restart
    count cannot serve as a prefix, because it can differ between machines after one was lost. Instead, each rank posts
    a random token, and rank 0 answers it with a new random prefix.
    """
    deadline = time.monotonic() + start_seconds
    shared = _connect(ranks, seconds=start_seconds)
    shared.set_timeout(dt.timedelta(seconds=timeout_seconds))
    join = _assign_prefixes if ranks.is_rank_zero else _request_prefix
    return distributed_c10d.PrefixStore(join(shared, ranks, deadline), shared)


def _connect(ranks: RankInfo, *, seconds: float) -> Any:
    """Connect to the store at MASTER_ADDR and MASTER_PORT, which rank 0 or the launcher hosts."""
    try:
        return next(iter(rendezvous("env://", ranks.rank, ranks.size, timeout=dt.timedelta(seconds=seconds))))[0]
    except (dist.DistError, OSError) as error:
        address = f"{env.read('MASTER_ADDR')}:{env.read('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            what, hint = "the rendezvous port is taken", "another port: torchrun --master-port, or MASTER_PORT"
            raise UsageError(what, got=address, try_=hint) from error
        raise WhetError(
            "the ranks cannot reach each other",
            got=f"rank {ranks.rank} of {ranks.size} at {address}: {first_line(error)}",
            try_="run the same command again; on several machines, check that each can reach the first",
        ) from error


def _request_prefix(shared: Any, ranks: RankInfo, deadline: float) -> str:
    token = secrets.token_hex(8)
    shared.set(f"whet/asks/{ranks.rank}", token)
    while not shared.check([f"whet/answer/{token}"]):
        _poll(ranks, deadline, missing="rank 0")
    prefix = str(shared.get(f"whet/answer/{token}").decode())
    shared.set(f"{prefix}/joined/{ranks.rank}", "yes")
    return prefix


def _assign_prefixes(shared: Any, ranks: RankInfo, deadline: float) -> str:
    prefix = f"whet/{secrets.token_hex(8)}"
    missing = set(range(1, ranks.size))
    answered: set[str] = set()
    while missing:
        for rank in sorted(missing):
            if shared.check([f"{prefix}/joined/{rank}"]):
                missing.discard(rank)
            elif shared.check([f"whet/asks/{rank}"]):
                token = shared.get(f"whet/asks/{rank}").decode()
                if token not in answered:
                    shared.set(f"whet/answer/{token}", prefix)
                    answered.add(token)
        if missing:
            _poll(ranks, deadline, missing=", ".join(f"rank {rank}" for rank in sorted(missing)[:8]))
    return prefix


def _poll(ranks: RankInfo, deadline: float, *, missing: str) -> None:
    if time.monotonic() > deadline:
        raise LostRankError(
            "not all ranks have started",
            got=f"rank {ranks.rank} of {ranks.size} waits for {missing}",
            try_="run the same command again; on several machines, check that each can reach the first",
        )
    time.sleep(_POLL_SECONDS)
