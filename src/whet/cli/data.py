"""`whet data`: inspect, clean and prepare training data."""

import time
from pathlib import Path
from typing import Annotated

import typer

from whet.base.errors import UsageError
from whet.cli import output
from whet.cli.options import Json

_PROGRESS_SECONDS = 5


def data(
    recipe_name: Annotated[
        str, typer.Argument(metavar="RECIPE", help="The recipe that the data is for: text, chat, hex or puzzle.")
    ],
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="The data, as in data=PATH.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as text_column=string label_separator='|'.")
    ] = None,
    json: Json = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write a cleaned copy to --out, and a list of all changes.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE|DIR", help="The cleaned copy to create.")] = None,
    leave: Annotated[
        str, typer.Option(metavar="KIND,KIND", help="Kinds of defects that --fix should not change.")
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if there are any findings.")] = False,
) -> None:
    """Inspect data before training on it.

    \b
    whet data text reviews.csv
    whet data text citations/ --json
    whet data text reviews.csv --fix --out clean.csv

    Reports labels, lengths and defects, with examples and their row numbers: duplicate and contradictory rows, texts in
    two splits, labels that are probably misspelled, broken rows and encodings, and more. The original is never changed.
    """
    from whet.config.resolve import resolve_config
    from whet.recipes.recipe import BUILT_IN, load_recipe

    recipe = load_recipe(recipe_name)
    if not recipe.supports("inspect_data"):
        raise UsageError(f"the recipe {recipe.name} has no data report", got=recipe_name, try_=" or ".join(BUILT_IN))
    if fix != (out is not None):
        got = "--fix without --out" if fix else f"--out {out} without --fix"
        raise UsageError("a cleaned copy needs both --fix and --out", got=got, try_="--fix --out FILE")
    if leave and not fix:
        raise UsageError("--leave needs --fix", got=f"--leave {leave}", try_="--fix --out FILE")
    if not path.exists():
        raise UsageError("the data does not exist", got=path, try_="an existing file or folder")
    config = resolve_config(recipe.Config, settings or ()).config
    kinds = tuple(kind.strip() for kind in leave.split(",") if kind.strip())
    report = recipe.inspect_data(config, path, fix=out, leave=kinds)
    if json:
        output.result_json(report.as_json)
    else:
        output.result("\n".join(report.lines))
    if strict and report.num_findings:
        raise typer.Exit(1)


def data_chat(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE|DIR", help="Conversations as JSON or JSON Lines, or a folder with splits."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "--output-dir", metavar="DIR", help="The folder to create.")
    ] = None,
    input_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The same as FILE.")] = None,
    format_: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", help="auto, sharegpt, alpaca, openai or openassistant."),
    ] = "auto",
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="bpe (trained on the data), gpt2, a hub name, a file or a folder.")
    ] = "bpe",
    vocab_size: Annotated[int, typer.Option(metavar="N", help="Vocabulary size of a trained tokenizer.")] = 8192,
    max_length: Annotated[int, typer.Option(metavar="N", help="Maximum number of tokens in a row.")] = 2048,
    subsample_size: Annotated[
        int | None, typer.Option(metavar="N", help="Use only this many conversations, drawn at random.")
    ] = None,
    train_split: Annotated[
        float, typer.Option(metavar="SHARE", help="Share for training; the rest is halved into validation and test.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the split.")] = 42,
    loss: Annotated[str, typer.Option(metavar="WHAT", help="Tokens to train on: assistant, or all.")] = "assistant",
    max_bad: Annotated[int, typer.Option(metavar="N", help="Number of invalid records to skip before failing.")] = 100,
    json: Json = False,
) -> None:
    """Prepare conversations for training a chat model.

    \b
    whet data chat conversations.json --out data/chat
    whet data chat chats.jsonl.gz --out data/chat --max-length 1024 --subsample-size 10000
    whet train chat data_paths=[data/chat]

    Reads ShareGPT, Alpaca, OpenAI and OpenAssistant files of any size, splits them by conversation, trains a tokenizer,
    and writes tokens with a loss mask. The folder appears only when it is complete.
    """
    from whet.recipes.chat.manifest import summary_lines
    from whet.recipes.chat.prepare import PrepareOptions, prepare_data

    if (path is None) == (input_file is None):
        got = "none" if path is None else f"{path} and --input-file {input_file}"
        raise UsageError("one input file is required", got=got, try_="whet data chat FILE --out DIR")
    if out is None:
        raise UsageError("the output folder is missing", got="no --out", try_="--out DIR")
    given = {
        "format": format_,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "max_length": max_length,
        "subsample_size": subsample_size,
        "train_split": train_split,
        "seed": seed,
        "loss": loss,
        "max_bad": max_bad,
    }
    options = PrepareOptions.from_json(given, where="the options")
    source = path or input_file
    assert source is not None
    with output.progress("data") as show:
        manifest = prepare_data(source, out, options, on_progress=show)
    if json:
        output.result_json(manifest.as_json())
    else:
        output.result("\n".join(summary_lines(manifest, out)))


def data_hex(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="Games: .trmph, HexWorld or plain lists of moves.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to create. Default: only report on the games.")
    ] = None,
    size: Annotated[int | None, typer.Option(metavar="N", help="Board size. Default: inferred from the games.")] = None,
    first: Annotated[
        str | None,
        typer.Option(
            metavar="top-bottom|left-right",
            help="The edges that the first player connects. Default: inferred from the games.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the split.")] = 0,
    val_share: Annotated[float, typer.Option(metavar="SHARE", help="Share of the games for validation.")] = 0.05,
    test_share: Annotated[float, typer.Option(metavar="SHARE", help="Share of the games for the final test.")] = 0.05,
    max_bad: Annotated[
        int | None, typer.Option(metavar="N", help="Number of invalid games to skip before failing. Default: a tenth.")
    ] = None,
    json: Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a game was skipped.")] = False,
) -> None:
    """Prepare recorded games of Hex for training.

    \b
    whet data hex games.trmph
    whet data hex games.trmph --out data/hex
    whet data hex games.txt --first left-right --out data/hex
    whet train hex data=data/hex

    Infers which edges the first player connects, and requires --first if the games do not show it. Replays every game,
    and writes its moves and winner. The games are split into train, val and test. The folder appears only when it is
    complete.
    """
    from whet.recipes.hex.game.record_import import ImportOptions, import_lines, import_records

    if first not in (None, "top-bottom", "left-right"):
        raise UsageError("no such edges", got=f"--first {first}", try_="--first top-bottom or --first left-right")
    given = {"size": size, "first": first, "seed": seed, "val_share": val_share, "test_share": test_share}
    given["max_bad"] = max_bad
    options = ImportOptions.from_json(given, where="the command line")
    next_note = time.monotonic() + _PROGRESS_SECONDS

    def progress(num_games: int) -> None:
        nonlocal next_note
        if time.monotonic() >= next_note:
            output.note(f"{num_games:,} games read")
            next_note = time.monotonic() + _PROGRESS_SECONDS

    manifest = import_records(path, into=out, options=options, progress=progress)
    if json:
        output.result_json(manifest.as_json())
    else:
        output.result("\n".join(import_lines(manifest)))
        if out is not None:
            what_next = f"to train on it: whet train hex data={out}"
            for name in ("train", "val"):
                if not manifest.splits[name].games:
                    what_next = f"the {name} split is empty: more games, or another --seed or --val-share"
            output.note(f"written to {out}; {what_next}")
    if strict and manifest.rejected:
        raise typer.Exit(1)


def data_puzzle(
    path: Annotated[
        Path,
        typer.Argument(metavar="FILE|DIR", help="train.csv and test.csv, or ARC *_challenges.json and _solutions."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to create.")],
    augment: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Augmented copies of each training puzzle; a maze has at most 7. Default: 1000 for ARC, else none.",
        ),
    ] = None,
    subsample: Annotated[int | None, typer.Option(metavar="N", help="Training Sudokus or mazes to keep.")] = None,
    min_difficulty: Annotated[
        int | None, typer.Option(metavar="N", help="Minimum of the column rating. Not used for ARC.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 42,
    json: Json = False,
) -> None:
    """Build a folder of puzzles in the format of the official TRM code.

    \b
    whet data puzzle sudoku-extreme/ --out data/sudoku --subsample 1000 --augment 1000
    whet data puzzle maze-30x30-hard/ --out data/maze --augment 7
    whet data puzzle arc-agi/ --out data/arc
    whet train puzzle data=data/sudoku

    Sudokus and mazes are CSV files with the columns question and answer. ARC tasks are JSON files. With the same seed
    and input, the arrays equal those of the official builders. The folder appears only when it is complete.
    """
    from whet.recipes.puzzle.builders import BuildOptions, build_folder, summary_lines

    if not path.exists():
        raise UsageError("the data does not exist", got=path, try_="an existing file or folder")
    options = BuildOptions(augment=augment, subsample=subsample, min_difficulty=min_difficulty, seed=seed)
    summary = build_folder(path, out, options)
    if json:
        output.result_json(summary)
    else:
        output.result("\n".join(summary_lines(summary, out)))
