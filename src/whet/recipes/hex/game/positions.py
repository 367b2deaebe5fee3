"""Positions to train on, on disk: format, packing, splits and reading."""

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
    """Return a 16-byte hash of each game. A game and its rotation by 180 degrees have the same hash."""
    is_cell = games.moves >= 0
    rotated = np.where(is_cell, cell_maps(games.size)[TURNED][np.where(is_cell, games.moves, 0)], games.moves)
    salt = seed.to_bytes(16, "little", signed=True)
    keys = []
    for moves, other, length in zip(games.moves, rotated.astype(np.int16), games.lengths, strict=True):
        first = min(moves[:length].tobytes(), other[:length].tobytes())
        keys.append(hashlib.blake2b(first, digest_size=16, salt=salt, person=b"whet hex").digest())
    return keys


def split_of(keys: list[bytes], *, val_share: float, test_share: float) -> NDArray[np.uint8]:
    """Return the index of the split of each game, (games,)."""
    draws = np.frombuffer(b"".join(keys), dtype="<u8")[::2] / 2.0**64
    return np.select([draws < val_share, draws < val_share + test_share], [1, 2], default=0).astype(np.uint8)


FORMAT = "whet hex positions 1"
MANIFEST, POSITIONS, GAMES = "manifest.json", "positions.bin", "games.bin"
GAME_ROW = np.dtype([("begin", "<u8"), ("length", "<u2"), ("split", "u1"), ("winner", "u1")])
"""One game: its first position, the number of positions, the index of its split, and the winner."""


class PositionFile(FrozenModel):
    """Size and hash of a file."""

    bytes: int
    sha256: str


class PositionCounts(FrozenModel):
    """The size of a split."""

    games: int = Field(ge=0)
    positions: int = Field(ge=0)


class PositionManifest(FrozenModel):
    """The contents of manifest.json. It is written last, so a folder with a manifest is complete."""

    format: str
    size: int
    size_source: str
    """A description of how the size was determined."""
    seed: int
    val_share: float
    test_share: float
    source: str
    orientation: Orientation
    num_read: int
    """The number of games in the records, valid or not."""
    num_won_by_blue: int
    num_unconfirmed: int = 0
    """Games whose winner is recorded, but not shown by the stones. Duplicates count."""
    repeated: int
    """The number of skipped duplicates, including games rotated by 180 degrees."""
    rejected: dict[str, int]
    rejected_examples: dict[str, list[str]]
    splits: dict[str, PositionCounts]
    files: dict[str, PositionFile]


def read_manifest(folder: Path) -> PositionManifest:
    """Read the manifest of a folder of positions."""
    path = folder / MANIFEST
    hint = "whet data hex FILE --out DIR"
    if not path.is_file():
        raise UsageError("not a folder of positions", got=str(folder), try_=hint)
    try:
        data = strict_json.decode(read_regular_file(path).decode())
    except ValueError as error:
        raise WhetError(f"{path} is damaged", got=str(error)[:200], try_=hint) from None
    if data.get("format") != FORMAT:
        raise UsageError("positions in another format", got=str(data.get("format"))[:60], try_=hint)
    manifest = PositionManifest.from_json(data, where=path)
    check_size(manifest.size)
    if set(manifest.splits) != set(SPLITS):
        raise WhetError(f"{path} is damaged", got=f"splits {sorted(manifest.splits)}"[:200], try_=hint)
    return manifest


_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)
_UNPACKED = ((np.arange(256)[:, None] >> _SHIFTS) & 3).astype(np.int8)
"""A lookup table with the four cells of every byte value."""


def row_type(size: int) -> np.dtype[np.void]:
    """Return the dtype of one position: little-endian, without padding."""
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
    """Return the size of a packed board."""
    return -(-size * size // 4)


def pack_boards(boards: Boards) -> NDArray[np.uint8]:
    """Pack boards, (batch, size, size), into two bits per cell, (batch, bytes)."""
    size = boards.shape[-1]
    cells = np.zeros((len(boards), 4 * num_bytes(size)), dtype=np.uint8)
    cells[:, : size * size] = boards.reshape(len(boards), size * size)
    return np.bitwise_or.reduce(cells.reshape(len(boards), num_bytes(size), 4) << _SHIFTS, axis=2)


def unpack_boards(packed: NDArray[np.uint8], *, size: int) -> Boards:
    """Unpack boards."""
    return _UNPACKED[packed].reshape(len(packed), 4 * num_bytes(size))[:, : size * size].reshape(-1, size, size)


def as_rows(samples: Samples) -> NDArray[np.void]:
    """Return samples in the format of the position file."""
    rows = np.zeros(len(samples), dtype=row_type(samples.positions.size))
    rows["board"] = pack_boards(samples.positions.boards)
    rows["mover"] = samples.positions.movers
    rows["won"] = samples.results
    rows["move"], rows["game"], rows["ply"] = samples.moves, samples.games, samples.plies
    return rows


class PositionSet:
    """A folder written by `whet data hex`. Opening it verifies the hashes of its files."""

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
        begins = np.cumsum(lengths) - lengths  # Games are stored without gaps.
        if (self.games["begin"] != begins).any() or lengths.sum() != num_rows:
            raise self._damaged(GAMES, "its games do not match the positions")
        if (self.games["split"] >= len(SPLITS)).any():
            raise self._damaged(GAMES, "games without a split")

    @property
    def size(self) -> int:
        """The board size."""
        return self.manifest.size

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """A hash over the hashes of the files, which identifies the content."""
        facts = sorted((name, file.sha256) for name, file in self.manifest.files.items())
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def split(self, name: str) -> NDArray[np.int64]:
        """Return the numbers of all positions of a split, in the order of the records."""
        if name not in SPLITS:
            raise UsageError("no such split", got=name, try_=", ".join(SPLITS))
        games = self.games[self.games["split"] == SPLITS.index(name)]
        lengths = games["length"].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        return np.arange(int(lengths.sum())) + np.repeat(games["begin"].astype(np.int64) - before, lengths)

    def batch(self, numbers: NDArray[np.int64]) -> Samples:
        """Read positions by their numbers."""
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
        """Read positions and transform each by a symmetry that depends on the seed, the epoch and its number."""
        return transform_samples(self.batch(numbers), symmetries_of(numbers, seed=seed, epoch=epoch))

    def _check_files(self) -> None:
        if set(self.manifest.files) != {POSITIONS, GAMES}:
            raise self._damaged(MANIFEST, f"files {sorted(self.manifest.files)}")
        for name, facts in self.manifest.files.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != facts.bytes:
                raise self._damaged(name, f"not {facts.bytes:,} bytes")
            with open_regular_file(path) as file:
                digest = hashlib.sha256()
                while chunk := file.read(2**20):
                    digest.update(chunk)
            if digest.hexdigest() != facts.sha256:
                raise self._damaged(name, "another hash than in the manifest")

    def _damaged(self, name: str, got: str) -> WhetError:
        return WhetError(f"{self.folder / name} is damaged", got=got, try_="whet data hex FILE --out DIR again")


def transform_samples(samples: Samples, symmetry: Symmetries) -> Samples:
    """Apply a symmetry to samples. The result for the mover does not change."""
    return Samples(
        positions=transform(samples.positions, symmetry),
        moves=transform_moves(samples.moves, symmetry, size=samples.positions.size),
        results=samples.results,
        games=samples.games,
        plies=samples.plies,
    )


def symmetries_of(numbers: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a uniformly distributed symmetry for each number, (batch,), by splitmix64 of seed, epoch and number."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(numbers).astype(np.uint64)
        for salt in (seed, epoch):
            mixed = (mixed + np.uint64(salt % 2**64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(62)).astype(np.int64)
