"""How do processes that were started together find each other, and nobody of an earlier start?

torchrun keeps one store while it starts a group again and again, and the addresses of dead processes stay in it under
the same names (its own count of restarts differs between machines when one of them was lost). So each process asks
with a word that was never used, and the first one answers with the name of a corner of the store that is new.
"""

import datetime as dt
import secrets
import time
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from whet.base.errors import LostRankError
from whet.world.world import World

_LOOK_SECONDS = 0.02


def gather(world: World, *, start_seconds: float, longest_seconds: float) -> Any:
    """The store of this group alone; returns once all are there."""
    longest = dt.timedelta(seconds=longest_seconds)
    shared: Any = next(iter(rendezvous("env://", world.rank, world.size, timeout=longest)))[0]
    deadline = time.monotonic() + start_seconds
    corner = _answer(shared, world, deadline) if world.is_first else _ask(shared, world, deadline)
    return distributed_c10d.PrefixStore(corner, shared)


def _ask(shared: Any, world: World, deadline: float) -> str:
    word = secrets.token_hex(8)
    shared.set(f"whet/asks/{world.rank}", word)
    while not shared.check([f"whet/answer/{word}"]):
        _look_again(world, deadline, missing="rank 0")
    corner = str(shared.get(f"whet/answer/{word}").decode())
    shared.set(f"{corner}/here/{world.rank}", "yes")
    return corner


def _answer(shared: Any, world: World, deadline: float) -> str:
    corner = f"whet/{secrets.token_hex(8)}"
    missing = set(range(1, world.size))
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
            _look_again(world, deadline, missing=", ".join(f"rank {rank}" for rank in sorted(missing)[:8]))
    return corner


def _look_again(world: World, deadline: float, *, missing: str) -> None:
    if time.monotonic() > deadline:
        raise LostRankError(
            "not all processes of this training have come",
            got=f"rank {world.rank} of {world.size} waits for {missing}",
            try_="the same command again; on several machines, that each can reach the first",
        )
    time.sleep(_LOOK_SECONDS)
