"""The key-value store that ranks share."""

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
from whet.base.errors import LostRankError, UsageError, WhetError
from whet.distributed.ranks import RankInfo

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.005, 0.2


class RankStore:
    """Short texts between the processes of a training, each under a name that is used once."""

    def __init__(self, ranks: RankInfo, *, longest_seconds: float) -> None:
        self._ranks = ranks
        self._longest = longest_seconds
        shared: Any = distributed_c10d._get_default_store()
        # A connection of its own: a wait on one that is shared would hold up the others.
        self._store = distributed_c10d.PrefixStore("whet", shared.clone())
        self._lock = threading.Lock()
        self._turn = 0
        self.refuse_lost: Callable[[], None] = lambda: None
        """Raises where the one who is waited for is known to be gone."""

    @property
    def rank(self) -> int:
        """Which of the processes this is, counted from 0."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """How many they are."""
        return self._ranks.size

    def next_turn(self) -> int:
        """A number that was not used before; the same in all processes that ask equally often."""
        self._turn += 1
        return self._turn

    def post(self, name: str, text: str) -> None:
        """Leaves a text for who waits for it."""
        with self._lock:
            self._store.set(name, text)

    def find(self, name: str) -> str | None:
        """The text, if it is there."""
        with self._lock:
            return self._store.get(name).decode() if self._store.check([name]) else None

    def find_all(self, names: list[str]) -> list[str]:
        """Texts that are there, at once."""
        with self._lock:
            return [text.decode() for text in self._store.multi_get(names)]

    def wait(self, name: str) -> str:
        """The text, as soon as it is there."""
        deadline, pause = time.monotonic() + self._longest, _MIN_POLL_SECONDS
        while True:
            found = self.find(name)
            if found is not None:
                return found
            self.refuse_lost()
            if time.monotonic() > deadline:
                raise LostRankError(
                    "another process of this training does not answer",
                    got=f"rank {self.rank} of {self.size} waits for {name} since {self._longest:.0f} s",
                    try_="the same command, which goes on from the last checkpoint",
                )
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)

    def drop(self, name: str) -> None:
        """Forgets a text that everybody has read."""
        with self._lock:
            self._store.delete_key(name)


_POLL_SECONDS = 0.02


def join_store(ranks: RankInfo, *, start_seconds: float, longest_seconds: float) -> Any:
    """The store of this group alone; returns once all are there."""
    deadline = time.monotonic() + start_seconds
    shared = _connect(ranks, seconds=start_seconds)
    shared.set_timeout(dt.timedelta(seconds=longest_seconds))
    corner = (
        _assign_namespaces(shared, ranks, deadline) if ranks.is_first else _request_namespace(shared, ranks, deadline)
    )
    return distributed_c10d.PrefixStore(corner, shared)


def _connect(ranks: RankInfo, *, seconds: float) -> Any:
    """The store that the first process keeps, or the launcher for it."""
    try:
        return next(iter(rendezvous("env://", ranks.rank, ranks.size, timeout=dt.timedelta(seconds=seconds))))[0]
    except (dist.DistError, OSError) as error:
        address = f"{env.read('MASTER_ADDR')}:{env.read('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            what, hint = "the port at which all meet is taken", "another port: torchrun --master-port, or MASTER_PORT"
            raise UsageError(what, got=address, try_=hint) from error
        raise WhetError(
            "the processes of this training find no place to meet",
            got=f"rank {ranks.rank} of {ranks.size} at {address}: {(str(error).splitlines() or [''])[0][:200]}",
            try_="the same command again; on several machines, that each can reach the first",
        ) from error


def _request_namespace(shared: Any, ranks: RankInfo, deadline: float) -> str:
    word = secrets.token_hex(8)
    shared.set(f"whet/asks/{ranks.rank}", word)
    while not shared.check([f"whet/answer/{word}"]):
        _poll(ranks, deadline, missing="rank 0")
    corner = str(shared.get(f"whet/answer/{word}").decode())
    shared.set(f"{corner}/here/{ranks.rank}", "yes")
    return corner


def _assign_namespaces(shared: Any, ranks: RankInfo, deadline: float) -> str:
    corner = f"whet/{secrets.token_hex(8)}"
    missing = set(range(1, ranks.size))
    answered: set[str] = set()
    while missing:
        for rank in sorted(missing):
            if shared.check([f"{corner}/here/{rank}"]):
                missing.discard(rank)
            elif shared.check([f"whet/asks/{rank}"]):
                word = shared.get(f"whet/asks/{rank}").decode()
                if word not in answered:
                    shared.set(f"whet/answer/{word}", corner)
                    answered.add(word)
        if missing:
            _poll(ranks, deadline, missing=", ".join(f"rank {rank}" for rank in sorted(missing)[:8]))
    return corner


def _poll(ranks: RankInfo, deadline: float, *, missing: str) -> None:
    if time.monotonic() > deadline:
        raise LostRankError(
            "not all processes of this training have come",
            got=f"rank {ranks.rank} of {ranks.size} waits for {missing}",
            try_="the same command again; on several machines, that each can reach the first",
        )
    time.sleep(_POLL_SECONDS)
