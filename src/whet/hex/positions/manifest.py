"""What does a set of positions say about itself? Written last, so that a set with a manifest is whole."""

from pathlib import Path

import numpy as np
from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.hex.board import check_size
from whet.hex.positions.splitting import SPLITS
from whet.hex.records.orientation import Orientation
from whet.run import strict_json
from whet.run.disk import read_regular_file

FORMAT = "whet hex positions 1"
MANIFEST, POSITIONS, GAMES = "manifest.json", "positions.bin", "games.bin"
GAME_ROW = np.dtype([("begin", "<u8"), ("length", "<u2"), ("split", "u1"), ("winner", "u1")])
"""One game: where its positions begin, how many there are, its part (splitting.SPLITS) and who won."""


class FileFacts(FrozenModel):
    """A file and what it should hold."""

    bytes: int
    sha256: str


class SplitFacts(FrozenModel):
    """One part."""

    games: int = Field(ge=0)
    positions: int = Field(ge=0)


class Manifest(FrozenModel):
    """All about a set of positions."""

    format: str
    size: int
    size_told: str
    """How it is known."""
    seed: int
    dev_share: float
    test_share: float
    source: str
    orientation: Orientation
    num_read: int
    """Games in the records, good or bad."""
    num_won_by_blue: int
    repeated: int
    """Games that were there before (perhaps turned by 180 degrees), and are left out."""
    left_out: dict[str, int]
    left_out_named: dict[str, list[str]]
    splits: dict[str, SplitFacts]
    files: dict[str, FileFacts]


def read_manifest(folder: Path) -> Manifest:
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
    found = Manifest.from_json(data, where=path)
    check_size(found.size)
    if set(found.splits) != set(SPLITS):
        raise WhetError(f"{path} is damaged", got=f"parts {sorted(found.splits)}"[:200], try_=hint)
    return found
