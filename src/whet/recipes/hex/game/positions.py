"""Positions to learn from, on disk: format, packing, splits and reading."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.recipes.hex.game.board import Boards, check_size
from whet.recipes.hex.game.games import Games, Samples
from whet.recipes.hex.game.records import Orientation
from whet.recipes.hex.game.rules import Positions
from whet.recipes.hex.game.symmetry import TURNED, Symmetries, cell_maps, transform, transform_moves
from whet.run import strict_json
from whet.run.disk import open_regular_file, read_regular_file

SPLITS = ("train", "val", "test")


def game_keys(games: Games, *, seed: int) -> list[bytes]:
    """16 bytes for each game; a game that is turned by 180 degrees has the same."""
    is_cell = games.moves >= 0
    turned = np.where(is_cell, cell_maps(games.size)[TURNED][np.where(is_cell, games.moves, 0)], games.moves)
    salt = seed.to_bytes(16, "little", signed=True)
    keys = []
    for moves, other, length in zip(games.moves, turned.astype(np.int16), games.lengths, strict=True):
        first = min(moves[:length].tobytes(), other[:length].tobytes())
        keys.append(hashlib.blake2b(first, digest_size=16, salt=salt, person=b"whet hex").digest())
    return keys


def split_of(keys: list[bytes], *, val_share: float, test_share: float) -> NDArray[np.uint8]:
    """(games,): the place of each game in SPLITS."""
    draws = np.frombuffer(b"".join(keys), dtype="<u8")[::2] / 2.0**64
    return np.select([draws < val_share, draws < val_share + test_share], [1, 2], default=0).astype(np.uint8)


FORMAT = "whet hex positions 1"
MANIFEST, POSITIONS, GAMES = "manifest.json", "positions.bin", "games.bin"
GAME_ROW = np.dtype([("begin", "<u8"), ("length", "<u2"), ("split", "u1"), ("winner", "u1")])
"""One game: where its positions begin, how many there are, its part (splitting.SPLITS) and who won."""


class PositionFile(FrozenModel):
    """A file and what it should hold."""

    bytes: int
    sha256: str


class PositionCounts(FrozenModel):
    """One part."""

    games: int = Field(ge=0)
    positions: int = Field(ge=0)


class PositionManifest(FrozenModel):
    """All about a set of positions."""

    format: str
    size: int
    size_source: str
    """How it is known."""
    seed: int
    val_share: float
    test_share: float
    source: str
    orientation: Orientation
    num_read: int
    """Games in the records, good or bad."""
    num_won_by_blue: int
    repeated: int
    """Games that were there before (perhaps turned by 180 degrees), and are left out."""
    rejected: dict[str, int]
    rejected_examples: dict[str, list[str]]
    splits: dict[str, PositionCounts]
    files: dict[str, PositionFile]


def read_manifest(folder: Path) -> PositionManifest:
    """The manifest of a set of positions."""
    path = folder / MANIFEST
    hint = "whet data hex FILE --output-dir DIR"
    if not path.is_file():
        raise UsageError("no set of positions is here", got=str(folder), try_=hint)
    try:
        data = strict_json.decode(read_regular_file(path).decode())
    except ValueError as error:
        raise WhetError(f"{path} is damaged", got=str(error)[:200], try_=hint) from None
    if data.get("format") != FORMAT:
        raise UsageError("positions in another format", got=str(data.get("format"))[:60], try_=hint)
    found = PositionManifest.from_json(data, where=path)
    check_size(found.size)
    if set(found.splits) != set(SPLITS):
        raise WhetError(f"{path} is damaged", got=f"parts {sorted(found.splits)}"[:200], try_=hint)
    return found


_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)
_UNPACKED = ((np.arange(256)[:, None] >> _SHIFTS) & 3).astype(np.int8)
"""The four cells of every byte."""


def row_type(size: int) -> np.dtype[np.void]:
    """One position: little-endian on every machine, without gaps."""
    return np.dtype(
        [
            ("board", "u1", (num_bytes(size),)),
            ("mover", "u1"),
            ("won", "u1"),
            ("move", "<i2"),
            ("game", "<u4"),
            ("ply", "<u2"),
        ]
    )


def num_bytes(size: int) -> int:
    """Of one packed board."""
    return -(-size * size // 4)


def pack_boards(boards: Boards) -> NDArray[np.uint8]:
    """(batch, size, size) as (batch, bytes)."""
    size = boards.shape[-1]
    cells = np.zeros((len(boards), 4 * num_bytes(size)), dtype=np.uint8)
    cells[:, : size * size] = boards.reshape(len(boards), size * size)
    return np.bitwise_or.reduce(cells.reshape(len(boards), num_bytes(size), 4) << _SHIFTS, axis=2)


def unpack_boards(packed: NDArray[np.uint8], *, size: int) -> Boards:
    """And back."""
    return _UNPACKED[packed].reshape(len(packed), 4 * num_bytes(size))[:, : size * size].reshape(-1, size, size)


def as_rows(samples: Samples) -> NDArray[np.void]:
    """What is written of samples."""
    rows = np.zeros(len(samples), dtype=row_type(samples.positions.size))
    rows["board"] = pack_boards(samples.positions.boards)
    rows["mover"] = samples.positions.movers
    rows["won"] = samples.results
    rows["move"], rows["game"], rows["ply"] = samples.moves, samples.games, samples.plies
    return rows


class PositionSet:
    """A folder made by `whet data hex`; opened, it is read once, and what was changed since is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: PositionManifest = read_manifest(folder)
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
