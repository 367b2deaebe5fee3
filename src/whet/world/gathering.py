"""How do processes that were started together find each other, and nobody of an earlier start?

torchrun keeps one store while it starts a group again and again, and the addresses of dead processes stay in it under
the same names (its own count of restarts differs between machines when one of them was lost). So each process asks
with a word that was never used, and the first one answers with the name of a corner of the store that is new.
"""

import datetime as dt
import secrets
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from whet.base import env
from whet.base.errors import LostRankError, UsageError, WhetError
from whet.world.world import World

_LOOK_SECONDS = 0.02


def gather(world: World, *, start_seconds: float, longest_seconds: float) -> Any:
    """The store of this group alone; returns once all are there."""
    deadline = time.monotonic() + start_seconds
    shared = _reach(world, seconds=start_seconds)
    shared.set_timeout(dt.timedelta(seconds=longest_seconds))
    corner = _answer(shared, world, deadline) if world.is_first else _ask(shared, world, deadline)
    return distributed_c10d.PrefixStore(corner, shared)


def _reach(world: World, *, seconds: float) -> Any:
    """The store that the first process keeps, or the launcher for it."""
    try:
        return next(iter(rendezvous("env://", world.rank, world.size, timeout=dt.timedelta(seconds=seconds))))[0]
    except (dist.DistError, OSError) as error:
        address = f"{env.read('MASTER_ADDR')}:{env.read('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            what, hint = "the port at which all meet is taken", "another port: torchrun --master-port, or MASTER_PORT"
            raise UsageError(what, got=address, try_=hint) from error
        raise WhetError(
            "the processes of this training find no place to meet",
            got=f"rank {world.rank} of {world.size} at {address}: {(str(error).splitlines() or [''])[0][:200]}",
            try_="the same command again; on several machines, that each can reach the first",
        ) from error


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
