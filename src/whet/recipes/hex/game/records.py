"""Read recorded games from files: board size, orientation, and what is wrong with them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.base.units import printable
from whet.recipes.hex.game.board import COLORS, EMPTY, check_size
from whet.recipes.hex.game.games import Games, Verdict, as_moves, judge_games
from whet.recipes.hex.game.notation import MAX_LINE, GameRecord, read_game
from whet.recipes.hex.game.symmetry import MIRRORED, cell_maps
from whet.run.disk import open_regular_file


class Orientation(FrozenModel):
    """How the moves of a file are read."""

    is_mirrored: bool
    """Whether the first player joins left and right in the record: columns and rows are exchanged on reading."""
    num_complete: int
    """Games that end by their last stone in this reading."""
    num_complete_otherwise: int
    num_sampled: int

    def told(self) -> str:
        """For people."""
        edges = "left and right: rows and columns exchanged" if self.is_mirrored else "top and bottom"
        counts = f"{self.num_complete:,} of {self.num_sampled:,} games end so"
        return f"the first player joins {edges} ({counts}, {self.num_complete_otherwise:,} the other way)"


def find_orientation(games: Sequence[Sequence[int]], *, size: int) -> Orientation:
    """By which reading more games are played by the rules and won by their last stone; of equals the usual one."""
    moves = as_moves(games)
    usual, other = (
        num_complete(judge_games(orient_moves(moves, size=size, is_mirrored=way), size=size)) for way in (False, True)
    )
    is_mirrored = other > usual
    return Orientation(
        is_mirrored=is_mirrored,
        num_complete=max(usual, other),
        num_complete_otherwise=min(usual, other),
        num_sampled=len(games),
    )


def num_complete(verdict: Verdict) -> int:
    """How many games were played to their end."""
    return int((verdict.is_legal & (verdict.winners != EMPTY)).sum())


def orient_moves(moves: NDArray[np.int16], *, size: int, is_mirrored: bool) -> NDArray[np.int16]:
    """The moves with the first player on top and bottom; a swap stays one."""
    is_cell = (moves >= 0) & (moves < size * size)
    if not is_mirrored:
        return moves
    return np.where(is_cell, cell_maps(size)[MIRRORED][np.where(is_cell, moves, 0)], moves).astype(np.int16)


SUFFIXES = (".trmph", ".txt", ".dat", ".hex")
_GAMES_PER_BATCH = 1024
_NUM_SAMPLED = 2000
_MAX_NAMED = 5
REASONS = {
    "unreadable": "not a game",
    "other size": "on a board of another size",
    "illegal": "against the rules",
    "unfinished": "nobody has joined their edges, and no winner is told",
    "contradiction": "the record tells another winner than the stones",
}


@dataclass
class RejectedGames:
    """What was left out and why; the first few by name."""

    counts: dict[str, int] = field(default_factory=dict)
    named: dict[str, list[str]] = field(default_factory=dict)

    def note(self, kind: str, where: str) -> None:
        """One game was left out."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        named = self.named.setdefault(kind, [])
        if len(named) < _MAX_NAMED:
            named.append(where)

    @property
    def total(self) -> int:
        """How many were left out."""
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"left out  {count:,} {REASONS[kind]}: {', '.join(self.named[kind])}{', ...' if count > _MAX_NAMED else ''}"
            for kind, count in self.counts.items()
        ]


@dataclass(frozen=True)
class RecordFiles:
    """Files of games, looked at once: their size of board and their orientation."""

    files: tuple[Path, ...]
    size: int
    size_source: str
    orientation: Orientation

    def games(self, ledger: RejectedGames) -> Iterator[Games]:
        """All games in their order, some thousand at a time."""
        batch: list[tuple[str, GameRecord]] = []
        for where, line in _lines(self.files):
            try:
                batch.append((where, read_game(line)))
            except UsageError as error:
                ledger.note("unreadable", f"{where} ({error.what}: {printable(error.got or '')[:40]})")
            if len(batch) == _GAMES_PER_BATCH:
                yield self._judged(batch, ledger)
                batch = []
        if batch:
            yield self._judged(batch, ledger)

    def _judged(self, batch: Sequence[tuple[str, GameRecord]], ledger: RejectedGames) -> Games:
        fitting = []
        for where, game in batch:
            if game.size not in (None, self.size) or game.least_size > self.size:
                is_outside = game.size is not None and game.least_size > game.size
                ledger.note("illegal" if is_outside else "other size", f"{where} ({game.size or game.least_size})")
            else:
                fitting.append((where, game))
        moves = as_moves([game.moves(self.size) for _, game in fitting])
        moves = orient_moves(moves, size=self.size, is_mirrored=self.orientation.is_mirrored)
        verdict = judge_games(moves, size=self.size)
        told = np.array([game.winner for _, game in fitting], dtype=np.int8)
        winners = np.where(verdict.winners != EMPTY, verdict.winners, told)
        is_good = verdict.is_legal & (winners != EMPTY) & ((told == EMPTY) | (told == winners))
        for place in np.flatnonzero(~is_good):
            where = fitting[place][0]
            if not verdict.is_legal[place]:
                ledger.note("illegal", where)
            elif winners[place] == EMPTY:
                ledger.note("unfinished", where)
            else:
                ledger.note("contradiction", f"{where} ({COLORS[told[place]]} is told)")
        return Games(self.size, moves[is_good], winners[is_good])


def open_records(path: Path, *, size: int | None = None) -> RecordFiles:
    """Looks at a file, or at all files of a folder: the size of the board, and which edges are whose."""
    files = _files(path)
    size, told = (check_size(size), "as you said") if size else _find_size(files)
    looked_at: list[tuple[int, ...]] = []
    for _, game in _readable(files):
        if game.size in (None, size) and game.least_size <= size:
            looked_at.append(game.moves(size))
        if len(looked_at) == _NUM_SAMPLED:
            break
    return RecordFiles(files, size, told, find_orientation(looked_at, size=size))


def _find_size(files: tuple[Path, ...]) -> tuple[int, str]:
    """What the first record says; where none says it, the reach of all moves."""
    largest, num_games = 0, 0
    for _, game in _readable(files):
        if game.size is not None:
            return game.size, "as the first record says"
        largest, num_games = max(largest, game.least_size), num_games + 1
    if not num_games:
        raise UsageError("no game in here can be read", got=files[0].name, try_="lines such as #13,a4g7 or a4 g7")
    return check_size(max(2, largest)), "the reach of all moves; --size N says otherwise"


def _readable(files: tuple[Path, ...]) -> Iterator[tuple[str, GameRecord]]:
    for where, line in _lines(files):
        try:
            yield where, read_game(line)
        except UsageError:
            continue


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        found = tuple(sorted(one for one in path.iterdir() if one.suffix.lower() in SUFFIXES and one.is_file()))
        if not found:
            raise UsageError("no records in this folder", got=str(path), try_="files named *" + " *".join(SUFFIXES))
        return found
    if not path.is_file():
        raise UsageError("the records are not there", got=str(path), try_="a file or folder that exists")
    return (path,)


def _lines(files: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Lines that are not empty and no comment, with where they stand; a line without end is cut."""
    for path in files:
        with open_regular_file(path, follows_links=True) as file:
            number = 0
            while piece := file.readline(2 * MAX_LINE):
                number += 1
                is_cut = not piece.endswith(b"\n") and len(piece) == 2 * MAX_LINE
                while is_cut and (rest := file.readline(2 * MAX_LINE)):
                    is_cut = not rest.endswith(b"\n")
                line = piece.decode("utf-8", "replace").lstrip("\ufeff")
                if line.strip() and not line.lstrip().startswith(("//", "%")):
                    yield f"{path.name}:{number}", line
