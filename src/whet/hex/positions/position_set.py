"""What can be learned from here? A memory-mapped set of positions, read batch by batch as arrays."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whet.base.errors import UsageError, WhetError
from whet.hex.games import Samples
from whet.hex.positions.manifest import GAME_ROW, GAMES, MANIFEST, POSITIONS, Manifest, read_manifest
from whet.hex.positions.packing import row_type, unpack_boards
from whet.hex.positions.splitting import SPLITS
from whet.hex.rules import Positions
from whet.hex.symmetry import Symmetries, transform, transform_moves
from whet.run.disk import open_regular_file


class PositionSet:
    """A folder made by `whet data hex`; opened, it is read once, and what was changed since is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._check_files()
        kind = row_type(self.manifest.size)
        num_rows, rest = divmod((folder / POSITIONS).stat().st_size, kind.itemsize)
        if rest or not num_rows:
            raise self._damaged(POSITIONS, "not a whole number of positions")
        self._rows = np.memmap(folder / POSITIONS, dtype=kind, mode="r", shape=(num_rows,))
        with open_regular_file(folder / GAMES) as file:
            data = file.read()
        if len(data) % GAME_ROW.itemsize:
            raise self._damaged(GAMES, "not a whole number of games")
        self.games: NDArray[np.void] = np.frombuffer(data, dtype=GAME_ROW)
        lengths = self.games["length"].astype(np.uint64)
        follows = np.cumsum(lengths) - lengths  # One game after the other, and nothing between them.
        if (self.games["begin"] != follows).any() or lengths.sum() != num_rows:
            raise self._damaged(GAMES, "games beside the positions")
        if (self.games["split"] >= len(SPLITS)).any():
            raise self._damaged(GAMES, "games of no part")

    @property
    def size(self) -> int:
        """Of the boards."""
        return self.manifest.size

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """Another one for every other content: the hashes of its files."""
        facts = sorted((name, file.sha256) for name, file in self.manifest.files.items())
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def split(self, name: str) -> NDArray[np.int64]:
        """The numbers of all positions of a part (train, dev, test), in the order of the records."""
        if name not in SPLITS:
            raise UsageError("no such part", got=name, try_=", ".join(SPLITS))
        games = self.games[self.games["split"] == SPLITS.index(name)]
        lengths = games["length"].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        return np.arange(int(lengths.sum())) + np.repeat(games["begin"].astype(np.int64) - before, lengths)

    def batch(self, numbers: NDArray[np.int64]) -> Samples:
        """Positions by their numbers."""
        rows = self._rows[numbers]
        boards = unpack_boards(rows["board"], size=self.size)
        return Samples(
            positions=Positions(boards, rows["mover"].astype(np.int8)),
            moves=rows["move"].astype(np.int64),
            results=rows["won"].astype(np.float32),
            games=rows["game"].astype(np.int64),
            plies=rows["ply"].astype(np.int64),
        )

    def augmented(self, numbers: NDArray[np.int64], *, seed: int, epoch: int) -> Samples:
        """The same, each turned or mirrored in a way that seed, epoch and its number decide."""
        return seen_otherwise(self.batch(numbers), symmetries_of(numbers, seed=seed, epoch=epoch))

    def _check_files(self) -> None:
        if set(self.manifest.files) != {POSITIONS, GAMES}:
            raise self._damaged(MANIFEST, f"files {sorted(self.manifest.files)}")
        for name, facts in self.manifest.files.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != facts.bytes:
                raise self._damaged(name, f"not the {facts.bytes:,} bytes it had")
            with open_regular_file(path) as file:
                digest = hashlib.sha256()
                while piece := file.read(2**20):
                    digest.update(piece)
            if digest.hexdigest() != facts.sha256:
                raise self._damaged(name, "not the content it had")

    def _damaged(self, name: str, got: str) -> WhetError:
        return WhetError(f"{self.folder / name} is damaged", got=got, try_="whet data hex FILE --output-dir DIR again")


def seen_otherwise(samples: Samples, symmetry: Symmetries) -> Samples:
    """Turned or mirrored; what was played moves along, and who wins is the mover as before."""
    return Samples(
        positions=transform(samples.positions, symmetry),
        moves=transform_moves(samples.moves, symmetry, size=samples.positions.size),
        results=samples.results,
        games=samples.games,
        plies=samples.plies,
    )


def symmetries_of(numbers: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
    """(batch,): one of the four for each, evenly; the same for the same seed, epoch and number (splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(numbers).astype(np.uint64)
        for salt in (seed, epoch):
            mixed = (mixed + np.uint64(salt % 2**64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(62)).astype(np.int64)
