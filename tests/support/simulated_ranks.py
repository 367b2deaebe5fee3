"""Ranks of one training, simulated by threads: each holds its rows of a state, and they communicate through a dict."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.checkpoint.manifest import CheckpointInfo
from whet.checkpoint.sharded_save import save_sharded
from whet.checkpoint.snapshot import Snapshot
from whet.distributed.strategies import RowRange, rows_of_rank


@dataclass
class Board:
    """Texts by name, shared by all ranks."""

    texts: dict[str, str] = field(default_factory=dict)
    change: threading.Condition = field(default_factory=threading.Condition)


@dataclass
class ThreadExchange:
    rank: int
    size: int
    board: Board
    seconds: float = 10.0

    def post(self, name: str, text: str) -> None:
        with self.board.change:
            self.board.texts[name] = text
            self.board.change.notify_all()

    def wait(self, name: str) -> str:
        with self.board.change:
            if not self.board.change.wait_for(lambda: name in self.board.texts, timeout=self.seconds):
                raise WhetError("nobody has answered", got=name, try_="look")
            return self.board.texts[name]

    def drop(self, name: str) -> None:
        with self.board.change:
            self.board.texts.pop(name, None)


def whole_state(step: int) -> dict[str, Tensor]:
    """Shapes that divide and that do not, of several kinds; `model/count` and `optimizer/a/step` are not shared."""
    draw = torch.Generator().manual_seed(step)
    return {
        "model/a": torch.randn(10, 7, generator=draw),
        "model/b": torch.randn(5, generator=draw).to(torch.bfloat16),
        "model/one": torch.randn(1, 3, 2, generator=draw),
        "model/none": torch.empty(0, 4),
        "model/flat": torch.empty(6, 0),
        "model/ids": torch.randint(0, 9, (17, 2), generator=draw),
        "ema/a": torch.randn(10, 7, generator=draw),
        "optimizer/a/exp_avg": torch.randn(10, 7, generator=draw),
        "optimizer/a/step": torch.tensor(float(step)),
        "model/count": torch.tensor([step]),
    }


def is_shared(name: str) -> bool:
    return name not in ("optimizer/a/step", "model/count")


def snapshot_of(rank: int, size: int, *, step: int) -> Snapshot:
    """The state of a single process."""
    whole = whole_state(step)
    rows = {name: rows_of_rank(len(t), rank=rank, size=size) for name, t in whole.items() if is_shared(name)}
    tensors = {name: t[rows[name].start : rows[name].stop] if name in rows else t for name, t in whole.items()}
    return Snapshot(tensors=tensors, facts={"step": step}, info=CheckpointInfo(run_id="run"), rows=rows)


def save_with(
    folder: Path,
    size: int,
    *,
    step: int,
    turn: int = 1,
    board: Board | None = None,
    change: Callable[[int, Snapshot], Snapshot] = lambda _rank, taken: taken,
    steps: dict[int, int] | None = None,
    seconds: float = 10.0,
) -> list[BaseException | None]:
    """All simulated ranks save. Return the error of each."""
    board, errors = board or Board(), [None] * size

    def one(rank: int) -> None:
        exchange = ThreadExchange(rank, size, board, seconds)
        taken = change(rank, snapshot_of(rank, size, step=step))
        try:
            save_sharded(folder, taken, step=(steps or {}).get(rank, step), exchange=exchange, turn=turn)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def wanted_by(rank: int, size: int) -> Callable[[str, tuple[int, ...]], RowRange | None]:
    def wanted(name: str, shape: tuple[int, ...]) -> RowRange | None:
        return rows_of_rank(shape[0], rank=rank, size=size) if is_shared(name) else None

    return wanted
