"""Save one checkpoint from several processes: each writes its rows, the first one publishes.

Processes exchange messages through a store, not collectives: a background thread may save while training uses the
collectives.
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
    """Short texts between the processes of one training, each under a name of its own."""

    @property
    def rank(self) -> int:
        """Which of the processes this is, counted from 0."""

    @property
    def size(self) -> int:
        """How many they are."""

    def post(self, name: str, text: str) -> None:
        """Leaves a text for who waits for it."""

    def wait(self, name: str) -> str:
        """The text; WhetError when the one who should post it is gone or does not answer."""

    def drop(self, name: str) -> None:
        """Forgets a text that everybody has read."""


class WrittenShard(FrozenModel):
    """What one process has done for a checkpoint."""

    step: int
    shard: Shard


class WriteFailure(FrozenModel):
    """Why a process could not do its part."""

    what: str
    got: str
    hint: str
    errno: int | None
    """Where a disk refused: the training goes on without this checkpoint."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int) -> Self:
        """What the others should know of an error."""
        if not isinstance(error, WhetError):
            what = f"process {rank} could not write its part of a checkpoint"
            return cls(what=what, got=f"{type(error).__name__}: {error}"[:300], hint="the same command", errno=None)
        cause = error.__cause__
        code = cause.errno if isinstance(cause, OSError) else None
        return cls(what=error.what, got=f"process {rank}: {error.got}", hint=str(error.try_), errno=code)

    def again(self) -> WhetError:
        """The same error in another process."""
        error = WhetError(self.what, got=self.got, try_=self.hint)
        error.__cause__ = None if self.errno is None else OSError(self.errno, self.what)
        return error


class _ExchangeMessage(FrozenModel):
    draft: str | None = None
    share: WrittenShard | None = None
    failure: WriteFailure | None = None


def rank_part(snapshot: Snapshot, *, rank: int) -> Snapshot:
    """What a process has to keep of its state: the first one all that it has, another one its rows."""
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
    """Writes the checkpoint of a step with all processes; when this returns, in any of them, it survives a power cut.

    All call it, for the same step and with the same `turn`, a number used once. The first one runs `check` before
    anything is written. The bytes it takes; 0 but in the first.
    """
    if exchange.rank == 0:
        return _save_as_leader(folder, snapshot, step=step, exchange=exchange, turn=turn, check=check)
    _save_as_follower(folder, snapshot, step=step, exchange=exchange, turn=turn)
    return 0


def _save_as_leader(
    folder: Path, snapshot: Snapshot, *, step: int, exchange: RankExchange, turn: int, check: Callable[[], None]
) -> int:
    num_bytes = 0

    def fill(draft: Path) -> None:
        nonlocal num_bytes
        _post(exchange, f"{turn}/draft", _ExchangeMessage(draft=draft.name))
        own = write_shard(draft, snapshot.tensors, snapshot.rows, rank=0)
        others = (_receive_shard(rank, step=step, exchange=exchange, turn=turn) for rank in range(1, exchange.size))
        try:
            num_bytes = store.fill_draft(draft, snapshot, step=step, shards=[own, *others])
        except ValueError as error:
            raise WhetError("the processes hold no whole model together", got=str(error), try_="sharding=off") from None

    try:
        check()
        store.publish_checkpoint(folder, step=step, fill=fill)
    except BaseException as error:
        failed = _ExchangeMessage(failure=WriteFailure.of(error, rank=0))
        for name in ("draft", "done"):
            _post(exchange, f"{turn}/{name}", failed)
        raise
    _post(exchange, f"{turn}/done", _ExchangeMessage())
    # Everybody is here, so everybody has read what was told a turn ago.
    for name in ("draft", "done", *map(str, range(1, exchange.size))):
        exchange.drop(f"{turn - 1}/{name}")
    return num_bytes


def _save_as_follower(folder: Path, snapshot: Snapshot, *, step: int, exchange: RankExchange, turn: int) -> None:
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
        got = f"process {rank} has saved step {share and share.step}; step {step:,} was expected"
        raise WhetError("the processes do not save the same step", got=got, try_="the same command again")
    return share.shard


def _post(exchange: RankExchange, name: str, told: _ExchangeMessage) -> None:
    exchange.post(name, told.model_dump_json())


def _wait_for(exchange: RankExchange, name: str) -> _ExchangeMessage:
    told = _ExchangeMessage.model_validate_json(exchange.wait(name))
    if told.failure is not None:
        raise told.failure.again()
    return told
