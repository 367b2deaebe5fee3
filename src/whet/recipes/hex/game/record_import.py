"""`whet data hex`: import recorded games into a folder for training."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.recipes.hex.game.board import BLUE, MAX_SIZE, MIN_SIZE
from whet.recipes.hex.game.game_folder import (
    GAMES,
    MANIFEST,
    SPLITS,
    Arrays,
    GameManifest,
    SplitCounts,
    encode_arrays,
    game_keys,
    split_of,
)
from whet.recipes.hex.game.games import Games, join_games
from whet.recipes.hex.game.records import Edges, Orientation, RejectedGames, open_records
from whet.run import durable, strict_json

Progress = Callable[[int], None]
"""Callback that receives the number of games read so far."""
_MAX_REJECTED_SHARE = 0.1


class ImportOptions(FrozenModel):
    size: int | None = Field(default=None, ge=MIN_SIZE, le=MAX_SIZE)
    first: Edges | None = None
    """The edges that the first player connects, or None to infer them from the games."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    val_share: float = Field(default=0.05, ge=0, le=0.5)
    test_share: float = Field(default=0.05, ge=0, le=0.5)
    max_bad: int | None = Field(default=None, ge=0)
    """Maximum number of invalid games, or None for a tenth of the games. More raise WhetError."""


def import_records(
    path: Path, *, into: Path | None, options: ImportOptions | None = None, progress: Progress | None = None
) -> GameManifest:
    """Import a file or folder of games into the new folder `into`, and return its manifest.

    If `into` is None, write nothing.
    """
    options = options or ImportOptions()
    source = open_records(path, size=options.size, first=options.first)
    if into is not None and into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise UsageError("the output folder is not empty", got=str(into), try_="another --out")
    rejected, num_valid = RejectedGames(), 0
    kept: dict[bytes, None] = {}
    parts: list[Games] = []
    for games in source.games(rejected):
        num_valid += len(games)
        rows = []
        for row, key in enumerate(game_keys(games, seed=options.seed)):
            if key not in kept:
                kept[key] = None
                rows.append(row)
        parts.append(games.take(np.array(rows, dtype=np.int64)))
        if progress is not None:
            progress(num_valid + rejected.total)
    _check_rejected(rejected, num_valid, options, source.orientation, name=path.name)
    games = join_games(parts)
    split = split_of(list(kept), val_share=options.val_share, test_share=options.test_share)
    manifest = GameManifest(
        size=source.size,
        size_source=source.size_source,
        seed=options.seed,
        val_share=options.val_share,
        test_share=options.test_share,
        source=path.name,
        orientation=source.orientation,
        num_read=num_valid + rejected.total,
        num_won_by_blue=int((games.winners == BLUE).sum()),
        num_unconfirmed=rejected.num_unconfirmed,
        repeated=num_valid - len(games),
        rejected=rejected.counts,
        rejected_examples=rejected.examples,
        splits={
            name: SplitCounts(games=int(is_in.sum()), positions=int((games.lengths[is_in] + 1).sum()))
            for index, name in enumerate(SPLITS)
            for is_in in [split == index]
        },
    )

    def fill(draft: Path) -> None:
        arrays: Arrays = {"moves": games.moves, "winners": games.winners, "split": split}
        durable.write_draft(draft / GAMES, data=encode_arrays(arrays))
        text = strict_json.encode(manifest.as_json(), pretty=True) + "\n"
        durable.write_draft(draft / MANIFEST, data=text.encode(), is_last=True)

    if into is not None:
        durable.make_directory(into.parent)
        durable.publish_directory(into, fill=fill)
    return manifest


def _check_rejected(
    rejected: RejectedGames, num_valid: int, options: ImportOptions, orientation: Orientation, *, name: str
) -> None:
    total = num_valid + rejected.total
    limit = int(_MAX_REJECTED_SHARE * total) if options.max_bad is None else options.max_bad
    if rejected.total > limit:
        got = f"{rejected.total:,} of {total:,}; {'; '.join(rejected.lines())}"
        hint = "other records, or --max-bad N"
        if orientation.num_complete < orientation.num_complete_otherwise:
            edges = "top-bottom" if orientation.is_mirrored else "left-right"
            hint = f"--first {edges}: {orientation.num_complete_otherwise:,} games end that way"
        raise WhetError(f"more than {limit:,} games are invalid", got=got, try_=hint)
    if not num_valid:
        got = "; ".join([name, *rejected.lines()])
        raise UsageError("no valid game", got=got, try_="lines such as #13,a4g7 or a4 g7")


def import_lines(manifest: GameManifest) -> list[str]:
    """Format the result of an import as the lines that `whet data hex` prints."""
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
