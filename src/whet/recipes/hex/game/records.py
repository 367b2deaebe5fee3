"""Read recorded games from files. Infer their board size and orientation, and reject invalid games."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
    """The edges that the first player connects in recorded games, and the evidence from both orientations."""

    is_mirrored: bool
    """Whether the first player connects left and right. Rows and columns are then exchanged during reading."""
    num_complete: int
    """Number of sampled games that are won by their last stone in this orientation."""
    num_complete_otherwise: int
    """Number of sampled games that are won by their last stone in the other orientation."""
    num_sampled: int
    is_given: bool = False
    """Whether the user has specified the edges."""

    @property
    def is_clear(self) -> bool:
        """Whether at least twice as many games are complete in this orientation as in the other."""
        return self.num_complete > 0 and self.num_complete >= 2 * self.num_complete_otherwise

    def summary(self) -> str:
        """Describe the orientation in one line."""
        edges = "left and right: rows and columns exchanged" if self.is_mirrored else "top and bottom"
        counts = f"{self.num_complete:,} of {self.num_sampled:,} games end that way"
        source = "as given; " if self.is_given else ""
        return f"the first player connects {edges} ({source}{counts}, {self.num_complete_otherwise:,} the other way)"


Edges = Literal["top-bottom", "left-right"]


def find_orientation(games: Sequence[Sequence[int]], *, size: int, first: Edges | None = None) -> Orientation:
    """Return the orientation in which more games are legal and won by their last stone.

    If both are equal, the first player connects top and bottom. `first` overrides the orientation, but not the counts.
    """
    moves = as_moves(games)
    usual, other = (
        _num_complete(judge_games(orient_moves(moves, size=size, is_mirrored=is_mirrored), size=size))
        for is_mirrored in (False, True)
    )
    is_mirrored = other > usual if first is None else first == "left-right"
    return Orientation(
        is_mirrored=is_mirrored,
        num_complete=other if is_mirrored else usual,
        num_complete_otherwise=usual if is_mirrored else other,
        num_sampled=len(games),
        is_given=first is not None,
    )


def _num_complete(verdict: Verdict) -> int:
    """Return the number of games that are legal and won on the board."""
    return int((verdict.is_legal & (verdict.winners != EMPTY)).sum())


def orient_moves(moves: NDArray[np.int16], *, size: int, is_mirrored: bool) -> NDArray[np.int16]:
    """Mirror the moves if needed, so that the first player connects top and bottom. Keep NO_MOVE and SWAP."""
    is_cell = (moves >= 0) & (moves < size * size)
    if not is_mirrored:
        return moves
    return np.where(is_cell, cell_maps(size)[MIRRORED][np.where(is_cell, moves, 0)], moves).astype(np.int16)


SUFFIXES = (".trmph", ".txt", ".dat", ".hex")
_GAMES_PER_BATCH = 1024
# Number of games that are replayed to determine the orientation.
_NUM_SAMPLED = 2000
_MAX_EXAMPLES = 5
REASONS = {
    "unreadable": "not a game",
    "other size": "on a board of another size",
    "illegal": "illegal",
    "unfinished": "unfinished, and without a recorded winner",
    "contradiction": "the recorded winner contradicts the stones",
}


@dataclass
class RejectedGames:
    """Numbers of rejected games by reason, with a few examples."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    num_unconfirmed: int = 0
    """Number of accepted games whose winner is recorded, but not shown by the stones."""

    def add(self, kind: str, where: str) -> None:
        """Count a game that was rejected for the reason `kind`. Keep its location as an example."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < _MAX_EXAMPLES:
            examples.append(where)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """Return one line per reason for rejection, with examples."""
        return [
            f"rejected  {count:,} {REASONS[kind]}: {', '.join(self.examples[kind])}"
            f"{', ...' if count > _MAX_EXAMPLES else ''}"
            for kind, count in self.counts.items()
        ]


@dataclass(frozen=True)
class RecordFiles:
    """Files of recorded games, and the board size and orientation of the games."""

    files: tuple[Path, ...]
    size: int
    size_source: str
    orientation: Orientation

    def games(self, rejected: RejectedGames) -> Iterator[Games]:
        """Yield the valid games in batches, in order. Count all other games in `rejected`."""
        batch: list[tuple[str, GameRecord]] = []
        for where, line in _lines(self.files):
            try:
                batch.append((where, read_game(line)))
            except UsageError as error:
                rejected.add("unreadable", f"{where} ({error.what}: {printable(error.got or '')[:40]})")
            if len(batch) == _GAMES_PER_BATCH:
                yield self._validate(batch, rejected)
                batch = []
        if batch:
            yield self._validate(batch, rejected)

    def _validate(self, batch: Sequence[tuple[str, GameRecord]], rejected: RejectedGames) -> Games:
        fitting = []
        for where, game in batch:
            if game.size not in (None, self.size) or game.min_size > self.size:
                outside = None if game.size is None else game.outside(game.size)
                if outside is None:
                    rejected.add("other size", f"{where} ({game.size or game.min_size})")
                else:
                    rejected.add("illegal", f"{where} ({outside} is not on the {game.size}x{game.size} board)")
            else:
                fitting.append((where, game))
        moves = as_moves([game.moves(self.size) for _, game in fitting])
        moves = orient_moves(moves, size=self.size, is_mirrored=self.orientation.is_mirrored)
        verdict = judge_games(moves, size=self.size)
        recorded = np.array([game.winner for _, game in fitting], dtype=np.int8)
        winners = np.where(verdict.winners != EMPTY, verdict.winners, recorded)
        is_valid = verdict.is_legal & (winners != EMPTY) & ((recorded == EMPTY) | (recorded == winners))
        for index in np.flatnonzero(~is_valid):
            where, game = fitting[index]
            if not verdict.is_legal[index]:
                rejected.add("illegal", f"{where}{_repeated_cell(game)}")
            elif winners[index] == EMPTY:
                rejected.add("unfinished", where)
            else:
                rejected.add("contradiction", f"{where} ({COLORS[recorded[index]]} is recorded)")
        rejected.num_unconfirmed += int((is_valid & (verdict.winners == EMPTY)).sum())
        return Games(self.size, moves[is_valid], winners[is_valid])


def _repeated_cell(game: GameRecord) -> str:
    """Return the first cell that is played twice, in parentheses, or an empty string."""
    cells = [name for name in game.names if name != "swap"]
    repeated = next((name for index, name in enumerate(cells) if name in cells[:index]), None)
    return f" ({repeated} twice)" if repeated else ""


def open_records(path: Path, *, size: int | None = None, first: Edges | None = None) -> RecordFiles:
    """Read a file or a folder of records to determine the board size and the orientation.

    Raise UsageError if the games do not show which edges the first player connects and `first` is None.
    """
    files = _files(path)
    size, size_source = (check_size(size), "as given") if size else _find_size(files)
    sample: list[tuple[int, ...]] = []
    num_recorded = 0
    for _, game in _readable(files):
        if game.size in (None, size) and game.min_size <= size:
            sample.append(game.moves(size))
            num_recorded += game.winner != EMPTY
        if len(sample) == _NUM_SAMPLED:
            break
    orientation = find_orientation(sample, size=size, first=first)
    # If most games have no winner, leave it to the import to reject them as unfinished.
    has_winners = 2 * max(orientation.num_complete, num_recorded) >= max(1, len(sample))
    if first is None and not orientation.is_clear and has_winners:
        raise UsageError(
            "the games do not show which edges the first player connects",
            got=f"of {len(sample):,} games {orientation.num_complete:,} end when the first player connects one pair "
            f"of edges, {orientation.num_complete_otherwise:,} with the other pair",
            try_="--first top-bottom, or --first left-right",
        )
    return RecordFiles(files, size, size_source, orientation)


def _find_size(files: tuple[Path, ...]) -> tuple[int, str]:
    """Return the board size and its source.

    The size is that of the first record that has one, or else the smallest size that contains all moves.
    """
    largest, num_games = 0, 0
    for _, game in _readable(files):
        if game.size is not None:
            return game.size, "from the first record"
        largest, num_games = max(largest, game.min_size), num_games + 1
    if not num_games:
        raise UsageError("no readable games", got=_first_problem(files), try_="lines such as #13,a4g7 or a4 g7")
    return check_size(max(2, largest)), "the smallest that contains all moves; --size N sets another"


def _first_problem(files: tuple[Path, ...]) -> str:
    """Describe the first line that is not a game, with the text that cannot be parsed."""
    for where, line in _lines(files):
        try:
            read_game(line)
        except UsageError as error:
            return f"{where}: {error.what}: {printable(error.got or '')[:60]}"
    return f"{files[0].name}: no line with a game"


def _readable(files: tuple[Path, ...]) -> Iterator[tuple[str, GameRecord]]:
    for where, line in _lines(files):
        try:
            yield where, read_game(line)
        except UsageError:
            continue


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        files = tuple(sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file()))
        if not files:
            raise UsageError("no records in this folder", got=str(path), try_="files named *" + " *".join(SUFFIXES))
        return files
    if not path.is_file():
        raise UsageError("the records do not exist", got=str(path), try_="an existing file or folder")
    return (path,)


def _lines(files: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Yield the location (file:line) and text of each line. Skip empty lines and comments, and truncate long lines."""
    for path in files:
        with open_regular_file(path, follows_links=True) as file:
            number = 0
            while line_bytes := file.readline(2 * MAX_LINE):
                number += 1
                is_truncated = not line_bytes.endswith(b"\n") and len(line_bytes) == 2 * MAX_LINE
                while is_truncated and (rest := file.readline(2 * MAX_LINE)):
                    is_truncated = not rest.endswith(b"\n")
                line = line_bytes.decode("utf-8", "replace").lstrip("\ufeff")
                if line.strip() and not line.lstrip().startswith(("//", "%")):
                    yield f"{path.name}:{number}", line
