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
from whet.recipes.hex.game.records import Edges, RecordFiles, RejectedGames, open_records
from whet.run import durable, strict_json

Progress = Callable[[int], None]
"""Called with the number of games read so far."""
_MAX_REJECTED_SHARE = 0.1


class ImportOptions(FrozenModel):
    """The options of an import."""

    size: int | None = Field(default=None, ge=MIN_SIZE, le=MAX_SIZE)
    first: Edges | None = None
    """The edges that the first player connects. Default: inferred from the games."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    val_share: float = Field(default=0.05, ge=0, le=0.5)
    test_share: float = Field(default=0.05, ge=0, le=0.5)
    max_bad: int | None = Field(default=None, ge=0)
    """The number of invalid games to skip; more are an error. Default: one tenth of the games."""


def import_records(
    path: Path, *, into: Path | None, options: ImportOptions | None = None, progress: Progress | None = None
) -> PositionManifest:
    """Import a file or folder of games into the new folder `into`. Without `into`, only report on the games."""
    options = options or ImportOptions()
    source = open_records(path, size=options.size, first=options.first)
    importer = _Importer(source, options, name=path.name, progress=progress)
    if into is None:
        for _ in importer.rows():
            pass
        return importer.manifest({})
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise UsageError("the output folder is not empty", got=str(into), try_="another --out")
    durable.make_directory(into.parent)
    manifests: list[PositionManifest] = []

    def fill(draft: Path) -> None:
        rows = (rows.tobytes() for rows in importer.rows())
        files = {POSITIONS: durable.write_draft(draft / POSITIONS, data=rows)}
        files[GAMES] = durable.write_draft(draft / GAMES, data=importer.games.tobytes())
        facts = {name: PositionFile(bytes=file.size, sha256=file.sha256) for name, file in files.items()}
        manifests.append(importer.manifest(facts))
        text = strict_json.encode(manifests[0].as_json(), pretty=True) + "\n"
        durable.write_draft(draft / MANIFEST, data=text.encode(), is_last=True)

    durable.publish_directory(into, fill=fill)
    return manifests[0]


class _Importer:
    """Reads the games of a source once, skips duplicates and counts the rest."""

    def __init__(self, source: RecordFiles, options: ImportOptions, *, name: str, progress: Progress | None) -> None:
        self._source, self._options, self._name, self._progress = source, options, name, progress
        self._rejected = RejectedGames()
        self._seen: set[bytes] = set()
        self._num_valid = self._repeated = self._num_positions = 0
        self._games: list[NDArray[np.void]] = []

    @property
    def games(self) -> NDArray[np.void]:
        """One row for each imported game."""
        return np.concatenate([np.zeros(0, dtype=GAME_ROW), *self._games])

    def rows(self) -> Iterator[NDArray[np.void]]:
        """Yield the positions of all imported games in the format of the position file."""
        num_imported = 0
        for games in self._source.games(self._rejected):
            self._num_valid += len(games)
            keys = game_keys(games, seed=self._options.seed)
            is_new = np.array([self._is_new(key) for key in keys], dtype=np.bool_)
            games, keys = games.take(is_new), [key for key, new in zip(keys, is_new, strict=True) if new]
            if len(games):
                self._record(games, keys)
                yield as_rows(unroll(games, first_number=num_imported))
            num_imported += len(games)
            if self._progress is not None:
                self._progress(self._num_valid + self._rejected.total)
        self._check_rejected()

    def _is_new(self, key: bytes) -> bool:
        if key in self._seen:
            self._repeated += 1
            return False
        self._seen.add(key)
        return True

    def _record(self, games: Games, keys: list[bytes]) -> None:
        rows = np.zeros(len(games), dtype=GAME_ROW)
        rows["length"] = games.lengths + 1
        rows["begin"] = self._num_positions + np.cumsum(games.lengths + 1) - (games.lengths + 1)
        rows["split"] = split_of(keys, val_share=self._options.val_share, test_share=self._options.test_share)
        rows["winner"] = games.winners
        self._num_positions += int((games.lengths + 1).sum())
        self._games.append(rows)

    def _check_rejected(self) -> None:
        total = self._num_valid + self._rejected.total
        limit = int(_MAX_REJECTED_SHARE * total) if self._options.max_bad is None else self._options.max_bad
        if self._rejected.total > limit:
            got = f"{self._rejected.total:,} of {total:,}; {'; '.join(self._rejected.lines())}"
            hint = "other records, or --max-bad N"
            orientation = self._source.orientation
            if orientation.num_complete < orientation.num_complete_otherwise:
                edges = "top-bottom" if orientation.is_mirrored else "left-right"
                hint = f"--first {edges}: {orientation.num_complete_otherwise:,} games end that way"
            raise WhetError(f"more than {limit:,} games are invalid", got=got, try_=hint)
        if not self._num_valid:
            got = "; ".join([self._name, *self._rejected.lines()])
            raise UsageError("no valid game", got=got, try_="lines such as #13,a4g7 or a4 g7")

    def manifest(self, files: dict[str, PositionFile]) -> PositionManifest:
        """Return the manifest of the import."""
        games = self.games
        splits = {
            name: PositionCounts(games=int(is_in.sum()), positions=int(games["length"][is_in].sum(dtype=np.int64)))
            for index, name in enumerate(SPLITS)
            for is_in in [games["split"] == index]
        }
        return PositionManifest(
            format=FORMAT,
            size=self._source.size,
            size_source=self._source.size_source,
            seed=self._options.seed,
            val_share=self._options.val_share,
            test_share=self._options.test_share,
            source=self._name,
            orientation=self._source.orientation,
            num_read=self._num_valid + self._rejected.total,
            num_won_by_blue=int((games["winner"] == BLUE).sum()),
            num_unconfirmed=self._rejected.num_unconfirmed,
            repeated=self._repeated,
            rejected=self._rejected.counts,
            rejected_examples=self._rejected.examples,
            splits=splits,
            files=files,
        )


def import_lines(manifest: PositionManifest) -> list[str]:
    """Return the report of `whet data hex`."""
    num_games = sum(split.games for split in manifest.splits.values())
    blue, recorded = manifest.num_won_by_blue, manifest.num_unconfirmed
    unconfirmed = f"; {recorded:,} by the record alone: the stones do not show it" if recorded else ""
    splits = (f"{name} {split.games:,} ({split.positions:,} positions)" for name, split in manifest.splits.items())
    return [
        f"games     {num_games:,} of {manifest.num_read:,} on {manifest.size}x{manifest.size} ({manifest.size_source})",
        f"edges     {manifest.orientation.summary()}",
        f"winners   blue (first) {blue:,}, red {num_games - blue:,}{unconfirmed}",
        f"repeated  {manifest.repeated:,} duplicate games",
        f"splits    {', '.join(splits)}",
        *RejectedGames(counts=manifest.rejected, examples=manifest.rejected_examples).lines(),
    ]
