"""whet data chat: conversations made ready to train on."""

from pathlib import Path
from typing import Annotated

import typer


def data_chat(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE|DIR", help="Conversations: JSON or JSON lines; or train, dev and test files."),
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder to make.")] = None,
    input_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The same as FILE.")] = None,
    format_: Annotated[
        str,
        typer.Option("--format", metavar="SHAPE", help="auto, sharegpt, alpaca, openai or openassistant."),
    ] = "auto",
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="bpe: learned from the data; or gpt2, a hub name, a file, a folder.")
    ] = "bpe",
    vocab_size: Annotated[int, typer.Option(metavar="N", help="Ids of a vocabulary that is learned.")] = 8192,
    max_length: Annotated[int, typer.Option(metavar="N", help="The most tokens of a row.")] = 2048,
    subsample_size: Annotated[
        int | None, typer.Option(metavar="N", help="Take so many conversations only, at random.")
    ] = None,
    train_split: Annotated[
        float, typer.Option(metavar="SHARE", help="Trained on; of the rest, half is for dev and half for test.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(metavar="N", help="Decides which conversations go where.")] = 42,
    loss: Annotated[str, typer.Option(metavar="WHAT", help="What is learned: assistant, or all.")] = "assistant",
    max_bad: Annotated[int, typer.Option(metavar="N", help="Bad records that are skipped; more are an error.")] = 100,
    json: Annotated[bool, typer.Option("--json", help="The manifest as JSON.")] = False,
) -> None:
    """Make conversations ready to train on.

    \b
    whet data chat conversations.json --output-dir data/chat
    whet data chat chats.jsonl.gz --output-dir data/chat --max-length 1024 --subsample-size 10000
    whet train chat data_paths=[data/chat]

    Reads ShareGPT, Alpaca, OpenAI and OpenAssistant files of any size, splits by conversation, learns a vocabulary,
    and writes tokens with a mask of what is learned. The folder appears when it is complete, or not at all.
    """
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.recipes.chat.builder import Options, build
    from whet.recipes.chat.told import lines

    if (path is None) == (input_file is None):
        got = "none" if path is None else f"{path} and --input-file {input_file}"
        raise UsageError("one file of conversations is needed", got=got, try_="whet data chat FILE --output-dir DIR")
    if output_dir is None:
        raise UsageError("where to is not said", got="no --output-dir", try_="--output-dir DIR")
    asked = {
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
    options = Options.from_json(asked, where="the options")
    source = path or input_file
    assert source is not None
    with console.progress("data") as show:
        manifest = build(source, output_dir, options, told=show)
    if json:
        console.result_json(manifest.as_json())
    else:
        console.result("\n".join(lines(manifest, output_dir)))
