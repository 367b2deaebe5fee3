"""Training games on disk: array files with a hash, splits, and the folder that `whet data hex` writes."""

import hashlib
import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.recipes.hex.game.board import check_size
from whet.recipes.hex.game.games import Games, judge_games
from whet.recipes.hex.game.records import Orientation
from whet.recipes.hex.game.symmetry import TURNED, cell_maps
from whet.run import strict_json
from whet.run.disk import read_regular_file

SPLITS = ("train", "val", "test")
FORMAT = "whet hex games 1"
MANIFEST, GAMES = "manifest.json", "games.npz"
Arrays = dict[str, NDArray[Any]]
_DIGEST = "sha256"
_HINT = "whet data hex FILE --out DIR"


def encode_arrays(arrays: Arrays) -> bytes:
    """Return the bytes of an .npz file that contains the arrays and their SHA-256 hash."""
    buffer = io.BytesIO()
    with_digest: Any = {**arrays, _DIGEST: np.array(_digest(arrays))}
    np.savez_compressed(buffer, **with_digest)
    return buffer.getvalue()


def read_arrays(path: Path) -> Arrays | None:
    """Read a file written from `encode_arrays`. Return None if it is missing or damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        digest = str(arrays.pop(_DIGEST))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return arrays if digest == _digest(arrays) else None


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# --- splits -----------------------------------------------------------------------------------------------------------


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
    """Return the index in SPLITS of each game, (games,). It depends only on the key of the game."""
    draws = np.frombuffer(b"".join(keys), dtype="<u8")[::2] / 2.0**64
    return np.select([draws < val_share, draws < val_share + test_share], [1, 2], default=0).astype(np.uint8)


# --- folders ----------------------------------------------------------------------------------------------------------


class SplitCounts(FrozenModel):
    games: int = Field(ge=0)
    positions: int = Field(ge=0)


class GameManifest(FrozenModel):
    """The contents of manifest.json. It is written last, so a folder with a manifest is complete."""

    format: str = FORMAT
    size: int
    size_source: str
    """Description of how the size was determined."""
    seed: int
    val_share: float
    test_share: float
    source: str
    orientation: Orientation
    num_read: int
    """Number of games in the records, valid or not."""
    num_won_by_blue: int
    num_unconfirmed: int = 0
    """Number of games whose winner is recorded, but not shown by the stones. Duplicates are included."""
    repeated: int
    """Number of skipped duplicates. A game rotated by 180 degrees is a duplicate."""
    rejected: dict[str, int]
    rejected_examples: dict[str, list[str]]
    splits: dict[str, SplitCounts]


def read_manifest(folder: Path) -> GameManifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise UsageError("not a folder of games", got=str(folder), try_=_HINT)
    try:
        data = strict_json.decode(read_regular_file(path).decode())
    except ValueError as error:
        raise WhetError(f"{path} is damaged", got=str(error)[:200], try_=_HINT) from None
    if data.get("format") != FORMAT:
        raise UsageError("games in an unsupported format", got=str(data.get("format"))[:60], try_=_HINT)
    manifest = GameManifest.from_json(data, where=path)
    check_size(manifest.size)
    if set(manifest.splits) != set(SPLITS):
        raise WhetError(f"{path} is damaged", got=f"splits {sorted(manifest.splits)}"[:200], try_=_HINT)
    return manifest


@dataclass(frozen=True, slots=True)
class GameFolder:
    """The games of a folder that `whet data hex` wrote."""

    manifest: GameManifest
    splits: dict[str, Games]
    fingerprint: str
    """Hash that identifies the games and their splits."""

    @classmethod
    def read(cls, folder: Path) -> "GameFolder":
        """Read a folder and check its hash, games and splits. Raise WhetError if it is damaged."""
        manifest, arrays = read_manifest(folder), read_arrays(folder / GAMES)
        if arrays is None or {*arrays} != {"moves", "winners", "split"}:
            raise _damaged(folder, "missing, or its hash does not match its content")
        games = Games(manifest.size, arrays["moves"], arrays["winners"])
        counts = {name: int((arrays["split"] == index).sum()) for index, name in enumerate(SPLITS)}
        if (
            len({len(array) for array in arrays.values()}) > 1
            or not judge_games(games.moves, size=games.size).is_legal.all()
        ):
            raise _damaged(folder, "illegal games")
        if counts != {name: split.games for name, split in manifest.splits.items()}:
            raise _damaged(folder, "splits that differ from the manifest")
        splits = {name: games.take(arrays["split"] == index) for index, name in enumerate(SPLITS)}
        return cls(manifest, splits, _digest(arrays))


def _damaged(folder: Path, got: str) -> WhetError:
    return WhetError(f"{folder / GAMES} is damaged", got=got, try_=f"{_HINT} again")
