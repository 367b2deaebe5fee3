"""Save one checkpoint from several ranks. Each rank writes its rows, and rank 0 publishes the checkpoint.

Ranks exchange messages through a key-value store instead of collectives, which training may use while a background
thread saves.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self

from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.checkpoint import store
from whet.checkpoint.shards import Shard, write_shard
from whet.checkpoint.snapshot import Snapshot


class RankExchange(Protocol):
    """The interface for exchanging short named messages between the ranks of a run."""

    @property
    def rank(self) -> int:
        """The index of this rank, counted from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def post(self, name: str, text: str) -> None:
        """Publish a message under a name that other ranks wait for."""

    def wait(self, name: str) -> str:
        """Wait for a message and return it. Raise WhetError if the sender has exited or does not respond."""

    def drop(self, name: str) -> None:
        """Delete a message that every rank has read."""


class WrittenShard(FrozenModel):
    """The part of a checkpoint that one rank wrote."""

    step: int
    shard: Shard


class WriteFailure(FrozenModel):
    """An error of one rank, in a form that can be sent to other ranks."""

    what: str
    got: str
    hint: str
    errno: int | None
    """Error number of a disk error, after which training continues without this checkpoint. None for other errors."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int) -> Self:
        """Return a description of an error that occurred on `rank`."""
        if not isinstance(error, WhetError):
            what = f"rank {rank} could not write its part of a checkpoint"
            return cls(
                what=what, got=f"{type(error).__name__}: {error}"[:300], hint="run the same command again", errno=None
            )
        cause = error.__cause__
        code = cause.errno if isinstance(cause, OSError) else None
        return cls(what=error.what, got=f"rank {rank}: {error.got}", hint=str(error.try_), errno=code)

    def as_error(self) -> WhetError:
        """Return the error to raise on another rank."""
        error = WhetError(self.what, got=self.got, try_=self.hint)
        # Callers recognize a disk error by its cause.
        error.__cause__ = None if self.errno is None else OSError(self.errno, self.what)
        return error


class _ExchangeMessage(FrozenModel):
    draft: str | None = None
    share: WrittenShard | None = None
    failure: WriteFailure | None = None


def rank_part(snapshot: Snapshot, *, rank: int) -> Snapshot:
    """Return the part of the state that a rank saves: everything on rank 0, sharded rows on all other ranks."""
    if rank == 0:
        return snapshot
    return replace(snapshot, tensors={name: snapshot.tensors[name] for name in snapshot.rows})


def save_sharded(
    folder: Path,
    snapshot: Snapshot,
    *,
    step: int,
    exchange: RankExchange,
    turn: int,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Write the checkpoint of a step from all ranks. Once this returns on any rank, the checkpoint is durable.

    All ranks call this for the same step with the same `turn`, a number that is used only once. Rank 0 calls `check`
    before anything is written. Return the size in bytes on rank 0, and 0 on all other ranks.
    """
    if exchange.rank == 0:
        return _save_on_rank_zero(folder, snapshot, step=step, exchange=exchange, turn=turn, check=check)
    _save_on_other_rank(folder, snapshot, step=step, exchange=exchange, turn=turn)
    return 0


def _save_on_rank_zero(
    folder: Path, snapshot: Snapshot, *, step: int, exchange: RankExchange, turn: int, check: Callable[[], None]
) -> int:
    num_bytes = 0

    def fill(draft: Path) -> None:
        nonlocal num_bytes
        _post(exchange, f"{turn}/draft", _ExchangeMessage(draft=draft.name))
        # The other ranks write their files concurrently.
        own = write_shard(draft, snapshot.tensors, snapshot.rows, rank=0)
        others = (_receive_shard(rank, step=step, exchange=exchange, turn=turn) for rank in range(1, exchange.size))
        try:
            num_bytes = store.fill_draft(draft, snapshot, step=step, shards=[own, *others])
        except ValueError as error:
            raise WhetError("the ranks do not hold a complete model", got=str(error), try_="sharding=off") from None

    try:
        check()
        store.publish_checkpoint(folder, step=step, fill=fill)
    except BaseException as error:
        failed = _ExchangeMessage(failure=WriteFailure.of(error, rank=0))
        # Post the failure under both names, because the other ranks may wait for either.
        for name in ("draft", "done"):
            _post(exchange, f"{turn}/{name}", failed)
        raise
    _post(exchange, f"{turn}/done", _ExchangeMessage())
    # Every rank has taken part in this turn, so all messages of the previous turn have been read.
    for name in ("draft", "done", *map(str, range(1, exchange.size))):
        exchange.drop(f"{turn - 1}/{name}")
    return num_bytes


def _save_on_other_rank(folder: Path, snapshot: Snapshot, *, step: int, exchange: RankExchange, turn: int) -> None:
    rank = exchange.rank
    draft = _wait_for(exchange, f"{turn}/draft").draft
    assert draft is not None
    try:
        shard = write_shard(folder / draft, snapshot.tensors, snapshot.rows, rank=rank)
    except BaseException as error:
        _post(exchange, f"{turn}/{rank}", _ExchangeMessage(failure=WriteFailure.of(error, rank=rank)))
        raise
    _post(exchange, f"{turn}/{rank}", _ExchangeMessage(share=WrittenShard(step=step, shard=shard)))
    _wait_for(exchange, f"{turn}/done")


def _receive_shard(rank: int, *, step: int, exchange: RankExchange, turn: int) -> Shard:
    share = _wait_for(exchange, f"{turn}/{rank}").share
    if share is None or share.step != step:
        got = f"rank {rank} has saved step {share and share.step}; step {step:,} was expected"
        raise WhetError("ranks do not save the same step", got=got, try_="run the same command again")
    return share.shard


def _post(exchange: RankExchange, name: str, message: _ExchangeMessage) -> None:
    exchange.post(name, message.model_dump_json())


def _wait_for(exchange: RankExchange, name: str) -> _ExchangeMessage:
    message = _ExchangeMessage.model_validate_json(exchange.wait(name))
    if message.failure is not None:
        raise message.failure.as_error()
    return message
