"""`whet data hex`: import recorded games into a folder of positions."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.recipes.hex.game.board import BLUE, MAX_SIZE, MIN_SIZE
from whet.recipes.hex.game.games import Games, unroll
from whet.recipes.hex.game.positions import (
    FORMAT,
    GAME_ROW,
    GAMES,
    MANIFEST,
    POSITIONS,
    SPLITS,
    PositionCounts,
    PositionFile,
    PositionManifest,
    as_rows,
    game_keys,
    split_of,
)
from whet.recipes.hex.game.records import RecordFiles, RejectedGames, open_records
from whet.run import durable, strict_json

Progress = Callable[[int], None]
"""Told how many games are read so far."""
_MAX_REJECTED_SHARE = 0.1


class ImportOptions(FrozenModel):
    """What one may say about an import."""

    size: int | None = Field(default=None, ge=MIN_SIZE, le=MAX_SIZE)
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    val_share: float = Field(default=0.05, ge=0, le=0.5)
    test_share: float = Field(default=0.05, ge=0, le=0.5)
    max_bad: int | None = Field(default=None, ge=0)
    """Games that may be left out as bad; unset, a tenth of them."""


def import_records(
    path: Path, *, into: Path | None, overrides: ImportOptions | None = None, progress: Progress | None = None
) -> PositionManifest:
    """Reads a file or folder of games; `into` becomes a set of positions. Without it they are only looked at."""
    overrides = overrides or ImportOptions()
    source = open_records(path, size=overrides.size)
    taking = _Importer(source, overrides, name=path.name, progress=progress)
    if into is None:
        for _ in taking.rows():
            pass
        return taking.manifest({})
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise UsageError("the folder is there already", got=str(into), try_="another --output-dir")
    durable.make_directory(into.parent)
    made: list[PositionManifest] = []

    def fill(draft: Path) -> None:
        rows = (rows.tobytes() for rows in taking.rows())
        files = {POSITIONS: durable.write_draft(draft / POSITIONS, data=rows)}
        files[GAMES] = durable.write_draft(draft / GAMES, data=taking.games.tobytes())
        facts = {name: PositionFile(bytes=file.size, sha256=file.sha256) for name, file in files.items()}
        made.append(taking.manifest(facts))
        text = strict_json.encode(made[0].as_json(), pretty=True) + "\n"
        durable.write_draft(draft / MANIFEST, data=text.encode(), is_last=True)

    durable.publish_directory(into, fill=fill)
    return made[0]


class _Importer:
    """Goes through the games of a source once."""

    def __init__(self, source: RecordFiles, overrides: ImportOptions, *, name: str, progress: Progress | None) -> None:
        self._source, self._wishes, self._name, self._progress = source, overrides, name, progress
        self._ledger = RejectedGames()
        self._seen: set[bytes] = set()
        self._num_good = self._repeated = self._num_positions = 0
        self._games: list[NDArray[np.void]] = []

    @property
    def games(self) -> NDArray[np.void]:
        """One row for each game that is in."""
        return np.concatenate([np.zeros(0, dtype=GAME_ROW), *self._games])

    def rows(self) -> Iterator[NDArray[np.void]]:
        """The positions of all games that are in, as they are written."""
        num_in = 0
        for games in self._source.games(self._ledger):
            self._num_good += len(games)
            keys = game_keys(games, seed=self._wishes.seed)
            is_new = np.array([self._is_new(key) for key in keys], dtype=np.bool_)
            games, keys = games.take(is_new), [key for key, new in zip(keys, is_new, strict=True) if new]
            if len(games):
                self._note(games, keys)
                yield as_rows(unroll(games, first_number=num_in))
            num_in += len(games)
            if self._progress is not None:
                self._progress(self._num_good + self._ledger.total)
        self._refuse_bad()

    def _is_new(self, key: bytes) -> bool:
        if key in self._seen:
            self._repeated += 1
            return False
        self._seen.add(key)
        return True

    def _note(self, games: Games, keys: list[bytes]) -> None:
        rows = np.zeros(len(games), dtype=GAME_ROW)
        rows["length"] = games.lengths + 1
        rows["begin"] = self._num_positions + np.cumsum(games.lengths + 1) - (games.lengths + 1)
        rows["split"] = split_of(keys, val_share=self._wishes.val_share, test_share=self._wishes.test_share)
        rows["winner"] = games.winners
        self._num_positions += int((games.lengths + 1).sum())
        self._games.append(rows)

    def _refuse_bad(self) -> None:
        total = self._num_good + self._ledger.total
        most = int(_MAX_REJECTED_SHARE * total) if self._wishes.max_bad is None else self._wishes.max_bad
        if self._ledger.total > most:
            got = f"{self._ledger.total:,} of {total:,}; {'; '.join(self._ledger.lines())}"
            raise WhetError(f"more than {most:,} games are bad", got=got, try_="other records, or --max-bad N")
        if not self._num_good:
            raise UsageError("no game is left", got=self._name, try_="lines such as #13,a4g7 or a4 g7")

    def manifest(self, files: dict[str, PositionFile]) -> PositionManifest:
        """What was found."""
        games = self.games
        splits = {
            name: PositionCounts(games=int(is_in.sum()), positions=int(games["length"][is_in].sum(dtype=np.int64)))
            for place, name in enumerate(SPLITS)
            for is_in in [games["split"] == place]
        }
        return PositionManifest(
            format=FORMAT,
            size=self._source.size,
            size_source=self._source.size_source,
            seed=self._wishes.seed,
            val_share=self._wishes.val_share,
            test_share=self._wishes.test_share,
            source=self._name,
            orientation=self._source.orientation,
            num_read=self._num_good + self._ledger.total,
            num_won_by_blue=int((games["winner"] == BLUE).sum()),
            repeated=self._repeated,
            rejected=self._ledger.counts,
            rejected_examples=self._ledger.named,
            splits=splits,
            files=files,
        )


def import_lines(manifest: PositionManifest) -> list[str]:
    """An import in lines."""
    num_games = sum(split.games for split in manifest.splits.values())
    blue = manifest.num_won_by_blue
    parts = (f"{name} {split.games:,} ({split.positions:,} positions)" for name, split in manifest.splits.items())
    return [
        f"games     {num_games:,} of {manifest.num_read:,} on {manifest.size}x{manifest.size} ({manifest.size_source})",
        f"edges     {manifest.orientation.told()}",
        f"winners   blue (first) {blue:,}, red {num_games - blue:,}",
        f"repeated  {manifest.repeated:,} games that were there before",
        f"parts     {', '.join(parts)}",
        *RejectedGames(counts=manifest.rejected, named=manifest.rejected_examples).lines(),
    ]
