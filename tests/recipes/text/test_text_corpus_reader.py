"""User files: formats are detected from the content, and errors are raised before training."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from whet.base.errors import UsageError
from whet.recipes.text.corpus_reader import read_files
from whet.recipes.text.data import baseline_metrics

pytestmark = pytest.mark.torch

ROWS = [(f'a "quoted", longer text, number {n}', "even" if n % 2 == 0 else "odd") for n in range(40)]


def as_json(rows: list[tuple[str, str]], text: str = "text", label: str = "label") -> str:
    return "".join(json.dumps({"id": 1, label: of, text: words}) + "\n" for words, of in rows)


def as_delimited(rows: list[tuple[str, str]], mark: str) -> str:
    quoted = "".join('"' + words.replace('"', '""') + f'"{mark}{of}\n' for words, of in rows)
    return f"Sentence{mark}Category\n{quoted}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.txt"


@pytest.mark.parametrize(
    "content",
    [
        as_json(ROWS),
        as_json(ROWS, text="Content", label="CLASS").replace("\n", "\n\n"),
        as_json(ROWS).replace("\n", "\r\n"),
        "\ufeff" + as_json(ROWS),
        as_delimited(ROWS, ","),
        as_delimited(ROWS, "\t"),
        "\ufeff" + as_delimited(ROWS, "\t").replace("\n", "\r\n"),
    ],
    ids=["json", "json, other names", "json, crlf", "json, bom", "csv", "tsv", "tsv, bom, crlf"],
)
def test_the_format_is_detected_from_the_content(file: Path, content: str) -> None:
    file.write_bytes(content.encode())
    corpus = read_files(file).corpus
    rows = [(text, corpus.classes[label]) for text, label in zip(corpus.train.texts, corpus.train.labels, strict=True)]
    assert corpus.classes == ("even", "odd")
    assert rows == [row for row in ROWS if row in rows]
    assert (len(corpus.train), len(corpus.val), len(corpus.test)) == (32, 4, 4)


def test_numeric_labels_and_line_breaks_in_texts(file: Path) -> None:
    file.write_text("".join(json.dumps({"text": f"one\n two {n}", "label": n % 2}) + "\n" for n in range(20)))
    corpus = read_files(file).corpus
    assert corpus.classes == ("0", "1")
    assert all("\n" in text for text in corpus.train.texts)


def test_given_splits_are_used_unchanged(tmp_path: Path) -> None:
    for name, rows in (("train", ROWS[:30]), ("valid", ROWS[30:34]), ("test", ROWS[34:])):
        (tmp_path / f"{name}.csv").write_text(as_json(rows))
    (tmp_path / "README.md").write_text("not data")
    corpus = read_files(tmp_path).corpus
    assert corpus.train.texts == tuple(text for text, _ in ROWS[:30])
    assert corpus.val.texts == tuple(text for text, _ in ROWS[30:34])
    assert corpus.test.texts == tuple(text for text, _ in ROWS[34:])


@pytest.mark.parametrize("given", ["val", "test"])
def test_a_missing_split_is_taken_from_the_training_rows(tmp_path: Path, given: str) -> None:
    (tmp_path / "train.jsonl").write_text(as_json(ROWS[:30]))
    (tmp_path / f"{given}.jsonl").write_text(as_json(ROWS[30:]))
    corpus = read_files(tmp_path).corpus
    ready, cut = (corpus.val, corpus.test) if given == "val" else (corpus.test, corpus.val)
    assert set(ready.texts) == {text for text, _ in ROWS[30:]}
    assert len(cut) > 0
    assert sorted(corpus.train.texts + cut.texts) == sorted(text for text, _ in ROWS[:30])


def test_several_files_are_one_corpus(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(as_json(ROWS[:20]))
    (tmp_path / "b").write_text(as_delimited(ROWS[20:], ","))
    corpus = read_files(tmp_path / "a", tmp_path / "b").corpus
    assert sorted(corpus.train.texts + corpus.val.texts + corpus.test.texts) == sorted(text for text, _ in ROWS)


GOOD = as_json(ROWS).encode()


@pytest.mark.parametrize(
    ("content", "what", "got"),
    [
        (b"", "is empty", "no rows"),
        (b" \n\n", "is empty", "no rows"),
        (b"text,label\n", "has no rows", "only a header"),
        (b'{"words": "x", "label": "y"}', "has no text column", "columns words, label"),
        (b"text,kind\na,b\n", "has no label column", "columns text, kind"),
        (
            GOOD + b'{"text": "caf\xe9", "label": "odd"}',
            "is not UTF-8",
            f"byte 0xe9 at offset {len(GOOD) + 13}, row 41",
        ),
        (GOOD + b'{"text": "x", "label": "once"}', "the label 'once' occurs once", "even (20), odd (20), once (1)"),
        (GOOD.replace(b"odd", b"even"), "have the same label", "even (40)"),
        (GOOD + b'{"text": "  ", "label": "odd"}', "an empty text", "'  '"),
        (GOOD + b'{"text": null, "label": "odd"}', "an empty text", "None"),
        (GOOD + b'{"text": "x"}', "an empty label", "None"),
        (GOOD + b"{nonsense}", "row 41 of", "Expecting property name"),
        (GOOD + b"[1, 2]", "row 41 of", "[1, 2]"),
        (b"text,label\na,b\nc\n", "an empty label", "None"),
        (as_json(ROWS[:8]).encode(), "too few rows to hold out a validation split", "8 rows of 2 classes"),
        (as_json(ROWS[:18]).encode(), "too few rows to hold out a test split", "18 rows of 2 classes"),
    ],
)
def test_errors_name_the_bad_row(file: Path, content: bytes, what: str, got: str) -> None:
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_files(file)
    assert what in caught.value.what
    assert got in (caught.value.got or "")
    assert caught.value.try_


def test_missing_files_and_folders_without_training_rows_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_files(tmp_path / "none.csv")
    (tmp_path / "notes.md").write_text("hello")
    with pytest.raises(UsageError, match="no training file"):
        read_files(tmp_path)


def test_a_label_without_training_rows_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(as_json(ROWS))
    (tmp_path / "test.jsonl").write_text(as_json([*ROWS, ("text", "category")]))
    with pytest.raises(UsageError, match="'category' occurs never"):
        read_files(tmp_path)


def test_scicite_is_read() -> None:
    folder = os.environ.get("WHET_TEST_DATA")
    if not folder:
        pytest.skip("WHET_TEST_DATA is not set: it names a folder with sci-cite/")
    corpus = read_files(Path(folder) / "sci-cite").corpus
    assert (len(corpus.train), len(corpus.val), len(corpus.test)) == (7320, 916, 1861)
    assert corpus.classes == ("background", "method", "result")
    assert round(Counter(corpus.test.labels)[0] / len(corpus.test), 3) == 0.536
    assert baseline_metrics(corpus)["naive Bayes"]["accuracy"] > 0.75
