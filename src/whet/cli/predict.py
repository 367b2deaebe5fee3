"""`whet predict`: classify texts or a file with a trained model."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.base.errors import UsageError
from whet.base.units import valid_utf8
from whet.cli import output
from whet.cli.options import Checkpoint, ModelFunction, RecipeFile

if TYPE_CHECKING:
    from whet.run.folder import Run

_FILE_SUFFIXES = (".csv", ".tsv", ".tab", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow")
_FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"}


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="FILE|TEXT...|-", help="A file, or texts; - is standard input.")
    ] = None,
    recipe: RecipeFile = None,
    model: ModelFunction = None,
    checkpoint: Checkpoint = "best",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write predictions to this file.")] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="csv|jsonl", help="Output format. Default: that of --out or of the input."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=100_000, help="Batch size.")] = 64,
    device: Annotated[str, typer.Option(help="auto (cuda for a file, else cpu), mps, cuda, cuda:1 or cpu.")] = "auto",
    text_column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the text.")] = None,
    pair_column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the second text.")] = None,
    label_column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the true label.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print all probabilities as JSON; for a file as JSON lines.")
    ] = False,
) -> None:
    """Classify texts or a file of any length with a trained model.

    \b
    whet predict runs/text-001 "Return the sum of the elements."
    whet predict runs/text-001 reviews.csv --out answers.csv
    cat reviews.jsonl | whet predict runs/text-001 - --format jsonl
    whet predict runs/mine --model train.py:make_model inputs.npy --out predictions.npy

    A file may be CSV, TSV, JSON lines, Parquet, or plain text with one text per line. Predictions are written in the
    same order, with row numbers and the probability of each class. If rows have labels, the predictions are also
    scored.

    A run that was trained from Python needs --model, a function that creates its model. The inputs of the model are the
    array in a .npy file, or the tensors in a .safetensors file, passed by name. Its outputs are written as .npy.
    """
    from whet.run.folder import locate_checkpoint, open_run

    run, checkpoint = locate_checkpoint(run, checkpoint)
    opened = open_run(run)
    if model is not None:
        _predict_arrays(opened, texts or [], out, model=model, checkpoint=checkpoint, batch=batch, device=device)
        return
    given = texts or ["-"]
    path = _input_file(given)
    if path is None:
        if out is not None or format_ is not None:
            raise UsageError("--out and --format need an input file", got=given[0][:80], try_="a file, or - for stdin")
        predictor = _load_predictor(
            opened, recipe=recipe, checkpoint=checkpoint, device="cpu" if device == "auto" else device
        )
        # Strip these texts like those of a file and of the training data.
        _print_predictions([valid_utf8(text).strip() for text in given], predictor, as_json=json)
        return
    format_ = format_ or ("jsonl" if json else None if out is None else _format_of(out))
    with _standard_input() if path == Path("-") else contextlib.nullcontext(path) as source:
        if out is not None:
            out = out.expanduser().absolute()
            _check_output(out, source=source, run=opened.path)
        predictor = _load_predictor(opened, recipe=recipe, checkpoint=checkpoint, device=device)
        if not hasattr(predictor, "predict"):
            # The recipe does not read files, so treat each line as a text.
            if out is not None:
                raise UsageError("this recipe cannot write prediction files", got=out, try_="no --out")
            _print_predictions(_lines(source), predictor, as_json=json)
            return
        columns = {"text": text_column, "pair": pair_column, "label": label_column}
        _predict_file(source, predictor, columns=columns, out=out, format_=format_, batch=batch)


def _predict_arrays(
    run: "Run", files: list[str], out: Path | None, *, model: str, checkpoint: str, batch: int, device: str
) -> None:
    """Write the outputs of the user's model for the rows of a file."""
    from whet.api.predict import predict_arrays
    from whet.run.folder import shell_path

    if len(files) != 1 or out is None:
        got = "no --out" if len(files) == 1 else f"{len(files)} files"
        hint = f"whet predict {shell_path(run.path)} --model {model} inputs.npy --out predictions.npy"
        raise UsageError("--model needs one input file and --out", got=got, try_=hint)
    with output.user_output_to_stderr():
        shape = predict_arrays(run, model, Path(files[0]), out, which=checkpoint, batch=batch, device=device)
    output.result(f"{out}  {shape[0]:,} rows, shape {shape}")


def _input_file(given: list[str]) -> Path | None:
    """Return the input file (- for standard input), or None if the arguments are texts."""
    if given == ["-"]:
        return Path("-")
    if not all(text.strip() for text in given):
        raise UsageError("there is nothing to predict", got="an empty text", try_='whet predict RUN "some text"')
    word = given[0]
    if len(given) > 1:
        _check_no_files(given)
        return None
    path = Path(word).expanduser()
    with contextlib.suppress(OSError, ValueError):
        if path.exists():
            return path
    if path.suffix.lower() in _FILE_SUFFIXES and " " not in word:
        raise UsageError("no such file", got=word[:200], try_="an existing file, or a text of several words")
    return None


def _format_of(out: Path) -> str | None:
    """Return the output format that a file name indicates, or None if its suffix is unknown."""
    suffix = out.suffix.lower()
    if suffix in (".tsv", ".tab", ".parquet", ".arrow", ".xlsx"):
        raise UsageError("predictions are CSV or JSON lines", got=out, try_="an --out that ends in .csv or .jsonl")
    return _FORMATS.get(suffix)


def _check_no_files(given: list[str]) -> None:
    """Raise UsageError if one of several texts is a file name, which would otherwise be classified itself."""
    for word in given:
        with contextlib.suppress(OSError, ValueError):
            if word == "-" or Path(word).expanduser().is_file():
                raise UsageError("only one file at a time", got=" ".join(given)[:200], try_=f"whet predict RUN {word}")


@contextlib.contextmanager
def _standard_input() -> Iterator[Path]:
    """Copy standard input to a temporary file, so that it may have any format and length. Yield its path."""
    from whet.run import durable

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "standard-input"
        with durable.disk_errors("copy standard input to", path), path.open("wb") as file:
            if sys.stdin is not None:  # None if closed by the caller (<&-).
                shutil.copyfileobj(sys.stdin.buffer, file)
        if not path.stat().st_size:
            raise UsageError("there is nothing to predict", got="no text", try_='whet predict RUN "some text"')
        yield path


def _load_predictor(opened: "Run", *, recipe: str | None, checkpoint: str, device: str) -> Any:
    """Load the predictor of a run's recipe, with the weights of a checkpoint."""
    from whet.api.load import load_predictor, load_run_recipe

    loaded = load_run_recipe(opened, given=recipe)
    if not loaded.supports("predict"):
        can_generate = loaded.supports("load_generator")
        way = f'whet generate {opened.path} --prompt "..."' if can_generate else "a method predict()"
        raise UsageError(f"the recipe {loaded.name} cannot predict", got=str(opened.path), try_=way)

    from whet.device.open import open_device

    _, predictor, _ = load_predictor(loaded, opened, checkpoint=checkpoint)
    if device != "cpu" and hasattr(predictor, "to"):
        # auto uses only CUDA, because only training checks whether other devices compute correctly.
        chosen = open_device("cuda", on_failure="cpu") if device == "auto" else open_device(device)
        predictor.to(chosen.device)
    return predictor


def _print_predictions(given: list[str], predictor: Any, *, as_json: bool) -> None:
    predictions = predictor(given)
    if len(predictions) != len(given):
        # The model classifies pairs, so there are two texts per prediction.
        given = [f"{first} / {second}" for first, second in zip(given[::2], given[1::2], strict=True)]
    if as_json:
        output.result_json([{"text": text, **answer} for text, answer in zip(given, predictions, strict=True)])
        return
    rows = [
        (", ".join(answer.get("labels", [answer["label"]])) or "-", f"{answer['probability']:.3f}", _short(text))
        for text, answer in zip(given, predictions, strict=True)
    ]
    output.result(output.table(("label", "probability", "text"), rows))


def _predict_file(
    path: Path, predictor: Any, *, columns: dict[str, str | None], out: Path | None, format_: str | None, batch: int
) -> None:
    """Write the prediction of each row of a file, then notes and scores. Exit with code 1 if a row failed."""
    from whet.recipes.text.prediction_files import FilePredictions
    from whet.run import durable

    predictions = FilePredictions(predictor, path, columns=columns, output_format=format_, batch_size=batch)
    if out is None:
        sys.stdout.flush()
        for line in predictions.lines():
            sys.stdout.buffer.write(line.encode())
        sys.stdout.buffer.flush()
    else:
        durable.check_writable(out)
        durable.write_file(out, data=(line.encode() for line in predictions.lines()))
        output.note(f"wrote {out}")
    for line in predictions.notes():
        output.note(line)
    for line in predictions.score_lines():
        output.note(line) if out is None else output.result(line)
    if predictions.num_failed:
        raise typer.Exit(1)


def _check_output(out: Path, *, source: Path, run: Path) -> None:
    """Raise UsageError if the output file cannot be written or would replace anything but earlier predictions."""
    from whet.recipes.text.prediction_files import is_prediction_file

    if out.resolve().is_relative_to(run.resolve()):
        raise UsageError("predictions cannot be written into the run", got=out, try_="--out FILE outside it")
    if out.is_dir():
        raise UsageError("--out must be a file", got=f"{out} is a folder", try_=f"--out {out / 'answers.csv'}")
    if not out.parent.is_dir():
        raise UsageError("the folder of --out does not exist", got=out.parent, try_=f"mkdir -p {out.parent}")
    if (out.exists() and out.samefile(source)) or (os.path.lexists(out) and not is_prediction_file(out)):
        raise UsageError("the file exists and has no predictions", got=out, try_="another --out FILE")


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
