"""whet predict: what a trained model says about texts, or about a whole file of them."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from whet.run.folder import Run

_FILE_ENDINGS = (".csv", ".tsv", ".tab", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow")
_FORMS = {".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"}


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="FILE|TEXT...|-", help="A file, or texts; - is standard input.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--recipe", metavar="FILE", help="Your recipe's file, if it is not a built-in one.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(metavar="best|last|STEP", help="Which weights.")] = "best",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the answers to this file.")] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="csv|jsonl", help="Of the answers; as --out or the file if not given."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=100_000, help="Texts that go through the model at once.")] = 64,
    device: Annotated[str, typer.Option(help="auto (cuda for a file, else cpu), mps, cuda, cuda:1 or cpu.")] = "auto",
    text_column: Annotated[str | None, typer.Option(metavar="NAME", help="The column with the text.")] = None,
    pair_column: Annotated[str | None, typer.Option(metavar="NAME", help="The column with the second text.")] = None,
    label_column: Annotated[str | None, typer.Option(metavar="NAME", help="The column with the true label.")] = None,
    json: Annotated[bool, typer.Option("--json", help="All probabilities, as JSON; of a file as JSON lines.")] = False,
) -> None:
    """What a trained model says about texts, or about a file of any length.

    \b
    whet predict runs/text-001 "Return the sum of the elements."
    whet predict runs/text-001 reviews.csv --out answers.csv
    cat reviews.jsonl | whet predict runs/text-001 - --format jsonl

    A file may be CSV, TSV, JSON lines, Parquet, or plain text with one on each line. Answers come in its order, with
    the number of their row and the probability of each class. Where rows have labels, the answers are scored too.
    """
    from whet.base.errors import UsageError
    from whet.run.folder import open_run

    opened = open_run(run)
    given = texts or ["-"]
    path = _as_file(given)
    if path is None:
        if out is not None or form is not None:
            raise UsageError(
                "--out and --format are for files", got=given[0][:80], try_="a file, or - (standard input)"
            )
        answers = _answers(opened, recipe=file, checkpoint=checkpoint, device="cpu" if device == "auto" else device)
        # Without the spaces around them, as texts of a file and of the training.
        _show([_readable(text).strip() for text in given], answers, as_json=json)
        return
    form = form or ("jsonl" if json else None if out is None else _form_of(out))
    with _standard_input() if path == Path("-") else contextlib.nullcontext(path) as place:
        out = None if out is None else _replaceable(out.expanduser().absolute(), read=place, run=opened.path)
        answers = _answers(opened, recipe=file, checkpoint=checkpoint, device=device)
        if not hasattr(answers, "predict"):
            # A recipe that reads no files: each line is a text.
            if out is not None:
                raise UsageError("the recipe writes no files of answers", got=out, try_="without --out")
            _show(_lines(place), answers, as_json=json)
            return
        columns = {"text": text_column, "pair": pair_column, "label": label_column}
        _answer_file(place, answers, columns=columns, out=out, form=form, batch=batch)


def _as_file(given: list[str]) -> Path | None:
    """The file that is meant; None for texts."""
    from whet.base.errors import UsageError

    if given == ["-"]:
        return Path("-")
    if not all(text.strip() for text in given):
        raise UsageError("there is nothing to predict", got="an empty text", try_='whet predict RUN "some text"')
    word = given[0]
    if len(given) > 1:
        _refuse_files_among(given)
        return None
    path = Path(word).expanduser()
    with contextlib.suppress(OSError, ValueError):
        if path.exists():
            return path
    if path.suffix.lower() in _FILE_ENDINGS and " " not in word:
        raise UsageError("no such file", got=word[:200], try_="a file that exists, or a text of several words")
    return None


def _form_of(out: Path) -> str | None:
    """What the ending says; None for one that says nothing."""
    from whet.base.errors import UsageError

    ending = out.suffix.lower()
    if ending in (".tsv", ".tab", ".parquet", ".arrow", ".xlsx"):
        raise UsageError("answers are CSV or JSON lines", got=out, try_="an --out that ends in .csv or .jsonl")
    return _FORMS.get(ending)


def _refuse_files_among(given: list[str]) -> None:
    """Names of files would be judged as if they were texts."""
    from whet.base.errors import UsageError

    for word in given:
        with contextlib.suppress(OSError, ValueError):
            if word == "-" or Path(word).expanduser().is_file():
                raise UsageError("one file at a time", got=" ".join(given)[:200], try_=f"whet predict RUN {word}")


@contextlib.contextmanager
def _standard_input() -> Iterator[Path]:
    """Standard input as a file, so that it may have any form and length."""
    from whet.base.errors import UsageError
    from whet.run import durable

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "standard-input"
        with durable.disk_errors("copy standard input to", path), path.open("wb") as file:
            if sys.stdin is not None:  # Closed by the caller (<&-): as if it were empty.
                shutil.copyfileobj(sys.stdin.buffer, file)
        if not path.stat().st_size:
            raise UsageError("there is nothing to predict", got="no text", try_='whet predict RUN "some text"')
        yield path


def _answers(opened: "Run", *, recipe: str | None, checkpoint: str, device: str) -> Any:
    """What answers: the recipe's model with the run's weights."""
    from whet.base.errors import UsageError, WhetError
    from whet.recipes.recipe import BUILT_IN, load_recipe

    # Only a built-in one by itself: a run folder may come from anywhere, and must not say which code is run.
    if recipe is None and opened.header.recipe not in BUILT_IN:
        raise UsageError("the run is of a recipe of yours", got=opened.header.recipe, try_="--recipe FILE")
    loaded = load_recipe(recipe or opened.header.recipe)
    if not loaded.supports("predict"):
        can_speak = loaded.supports("speak")
        way = f'whet generate {opened.path} --prompt "..."' if can_speak else "a method predict()"
        raise UsageError(f"the recipe {loaded.name} cannot predict", got=str(opened.path), try_=way)

    from whet.device.open import open_device
    from whet.training.weights import load_weights

    try:
        model, answers = loaded.predict(loaded.Config.model_validate(opened.config), opened.kept)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise WhetError("the run does not hold what its recipe needs", got=what, try_="another run") from None
    load_weights(opened.path, model, checkpoint=checkpoint)
    model.eval()
    if device != "cpu" and hasattr(answers, "to"):
        # By itself only CUDA: whether another device computes rightly is a question that a training asks first.
        found = open_device("cuda", on_failure="cpu") if device == "auto" else open_device(device)
        answers.to(found.device)
    return answers


def _show(given: list[str], answers: Any, *, as_json: bool) -> None:
    """Verdicts on texts from the command line."""
    from whet.cli import console

    found = answers(given)
    if len(found) != len(given):
        given = [f"{first} / {second}" for first, second in zip(given[::2], given[1::2], strict=True)]
    if as_json:
        console.result_json([{"text": text, **answer} for text, answer in zip(given, found, strict=True)])
        return
    rows = [
        (", ".join(answer.get("labels", [answer["label"]])) or "-", f"{answer['probability']:.3f}", _short(text))
        for text, answer in zip(given, found, strict=True)
    ]
    console.result(console.table(("label", "probability", "text"), rows))


def _answer_file(
    path: Path, answers: Any, *, columns: dict[str, str | None], out: Path | None, form: str | None, batch: int
) -> None:
    """Writes what the model says about each row, then how good that is."""
    from whet.cli import console
    from whet.recipes.text.prediction_files import FilePredictions
    from whet.run import durable

    found = FilePredictions(answers, path, columns=columns, output_format=form, batch_size=batch)
    if out is None:
        sys.stdout.flush()
        for line in found.lines():
            sys.stdout.buffer.write(line.encode())
        sys.stdout.buffer.flush()
    else:
        durable.check_writable(out)
        durable.write_file(out, data=(line.encode() for line in found.lines()))
        console.note(f"wrote {out}")
    for line in found.notes():
        console.note(line)
    for line in found.score_lines():
        console.note(line) if out is None else console.result(line)
    if found.num_failed:
        raise typer.Exit(1)


def _replaceable(out: Path, *, read: Path, run: Path) -> Path:
    """The file that is written: it may replace earlier answers, and nothing else."""
    from whet.base.errors import UsageError
    from whet.recipes.text.prediction_files import is_prediction_file

    if out.resolve().is_relative_to(run.resolve()):
        raise UsageError("answers do not belong into the run", got=out, try_="--out FILE outside of it")
    if out.is_dir():
        raise UsageError("the answers are a file", got=f"{out} is a folder", try_=f"--out {out / 'answers.csv'}")
    if not out.parent.is_dir():
        raise UsageError("no such folder for the answers", got=out.parent, try_=f"mkdir -p {out.parent}")
    if (out.exists() and out.samefile(read)) or (os.path.lexists(out) and not is_prediction_file(out)):
        raise UsageError("a file of that name is there, and no answers", got=out, try_="another --out FILE")
    return out


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def _readable(text: str) -> str:
    """The text without bytes that were no UTF-8 on the command line."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
