"""Every format gives the same corpus; splits, columns and labels are recognized; splits do not leak."""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from planted_texts import clean_rows, row
from whet.base.errors import UsageError
from whet.recipes.text.config import TextConfig
from whet.recipes.text.corpus import (
    Corpus,
    Examples,
    balanced_weights,
    class_weights,
    normalize_text,
    read_class_weights,
    split,
)
from whet.recipes.text.corpus_reader import load_corpus, read_files
from whet.recipes.text.readers import rows as lines_module
from whet.recipes.text.readers.samples import ColumnOverrides, detect_separator
from whet.recipes.text.readers.sources import find_sources

ROWS = [(" ".join(text.split()), label) for text, label in clean_rows(200)]
PARTS = {"train": ROWS[:160], "validation": ROWS[160:180], "test": ROWS[180:]}


def as_json(rows: list[tuple[str, str]]) -> str:
    return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)


def arrow_table(rows: list[tuple[str, str]], *, names: list[str] | None = None):
    """A table as Hugging Face datasets writes it: labels may be indices, with their names in the metadata."""
    arrow = pytest.importorskip("pyarrow")
    labels = [label if names is None else names.index(label) for _, label in rows]
    table = arrow.table({"text": [text for text, _ in rows], "label": labels})
    if names is None:
        return table
    info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(info)})


def save_split(folder: Path, rows: list[tuple[str, str]], *, names: list[str]) -> None:
    """Write the files of `Dataset.save_to_disk`: Arrow streams, dataset_info.json and state.json."""
    ipc = pytest.importorskip("pyarrow.ipc")
    folder.mkdir(parents=True)
    files = []
    for number, some in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
        table = arrow_table(some, names=names).replace_schema_metadata(None)
        files.append({"filename": f"data-{number:05}-of-00002.arrow"})
        with ipc.new_stream(str(folder / files[-1]["filename"]), table.schema) as writer:
            writer.write_table(table)
    features = {"label": {"names": names, "_type": "ClassLabel"}, "text": {"dtype": "string", "_type": "Value"}}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))


def make(form: str, folder: Path) -> Path:
    names = sorted({label for _, label in ROWS})
    folder.mkdir(exist_ok=True)
    for part, rows in PARTS.items():
        if form == "JSON lines named csv":
            (folder / f"{part}.csv").write_text(as_json(rows))
        elif form == "CSV with semicolons":
            lines = [b"text;label;"]
            lines += ['"{}";{};'.format(text.replace('"', '""'), label).encode() for text, label in rows]
            (folder / f"{part}.tsv").write_bytes(b"\r\n".join(lines))
        elif form == "TSV with bare quotes":
            lines = ["label\ttext", *(f'{label}\t"{text}' for text, label in rows)]
            (folder / f"{part}.txt").write_text("\n".join(lines))
        elif form == "Parquet":
            pytest.importorskip("pyarrow.parquet").write_table(arrow_table(rows), folder / f"{part}.parquet")
        elif form == "Parquet pieces in data/":
            (folder / "data").mkdir(exist_ok=True)
            for number, some in enumerate((rows[:9], rows[9:])):
                name = f"data/{part}-0000{number}-of-00002.parquet"
                pytest.importorskip("pyarrow.parquet").write_table(arrow_table(some, names=names), folder / name)
        elif form == "class folders":
            for number, (text, label) in enumerate(rows):
                (folder / part / label).mkdir(exist_ok=True, parents=True)
                (folder / part / label / f"{number:03}.txt").write_text(text)
        elif form == "saved dataset":
            save_split(folder / part, rows, names=names)
            (folder / "dataset_dict.json").write_text(json.dumps({"splits": [*PARTS, "unsupervised"]}))
    return folder


FORMS = (
    *("JSON lines named csv", "CSV with semicolons", "TSV with bare quotes", "Parquet", "Parquet pieces in data/"),
    *("class folders", "saved dataset"),
)


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_corpus(tmp_path: Path, form: str) -> None:
    read = read_files(make(form, tmp_path / "data"))
    quote = '"' if form == "TSV with bare quotes" else ""
    for part, rows in zip((read.corpus.train, read.corpus.val, read.corpus.test), PARTS.values(), strict=True):
        got = [(text, read.corpus.classes[label]) for text, label in zip(part.texts, part.labels, strict=True)]
        want = [(quote + text, label) for text, label in rows]
        assert (sorted(got) == sorted(want)) if form == "class folders" else (got == want)
    assert read.notes[0].startswith("read 160 + 20 + 20 rows of ")
    assert read.notes[0].endswith("text = text, label = label, 4 classes")


def test_class_folders_without_splits_are_split(tmp_path: Path) -> None:
    for number, (text, label) in enumerate(ROWS):
        (tmp_path / label).mkdir(exist_ok=True)
        (tmp_path / label / f"{number}.txt").write_text(text)
    corpus = read_files(tmp_path).corpus
    assert (len(corpus.train), len(corpus.val), len(corpus.test)) == (160, 20, 20)


def test_an_unclosed_quote_affects_one_row_only(tmp_path: Path) -> None:
    lines = [row(*one) for one in ROWS]
    lines.insert(50, b'"never closed,sport')
    (tmp_path / "rows.csv").write_bytes(b"text,label\n" + b"\n".join(lines))
    with pytest.raises(UsageError, match=r"row 52 of .*rows.csv cannot be parsed"):
        read_files(tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("text,label\na,b\n".encode("utf-16"), "is not UTF-8"),
        (gzip.compress(b"text,label\n", mtime=0), "is compressed"),
        (b'[\n{"text": "a"}]', "is one JSON array"),
        (b"text,label\ra,b\rc,d\r", "carriage returns alone"),
        (b"PAR1 and no more", "cannot read"),
        (b"text,label,Text\na,b,c\n", "has a duplicate column"),
    ],
)
def test_unsupported_formats_are_rejected(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(UsageError, match=what) as caught:
        read_files(tmp_path / "rows")
    assert caught.value.try_


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    with pytest.raises(UsageError, match=r"\[parquet\]"):
        read_files(tmp_path / "rows")


def test_an_endless_line_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_ROW_BYTES", 10_000)
    (tmp_path / "rows").write_text(as_json(ROWS) + '{"text": "' + "a" * 50_000)
    with pytest.raises(UsageError, match=r"row 201 .* is too long"):
        read_files(tmp_path / "rows")


def test_two_files_for_a_split_and_hostile_names_are_rejected(tmp_path: Path) -> None:
    for name in ("train.csv", "train.jsonl"):
        (tmp_path / name).write_text(as_json(ROWS))
    with pytest.raises(UsageError, match="several files for train"):
        find_sources(tmp_path)
    saved = tmp_path / "saved"
    save_split(saved, ROWS, names=sorted({label for _, label in ROWS}))
    (saved / "data-00000-of-00002.arrow").rename(tmp_path / "elsewhere.arrow")
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../elsewhere.arrow"}]}))
    with pytest.raises(UsageError, match="cannot read"):
        read_files(saved)


def test_unlabeled_test_files_are_skipped_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(as_json(ROWS))
    (tmp_path / "test.csv").write_text("id,text\n1,a text\n")
    read = read_files(tmp_path)
    assert "test.csv has no labels and is skipped" in read.notes
    assert len(read.corpus.test) == 20


@pytest.mark.parametrize("num_bare", [1, 150])
def test_a_label_column_may_appear_in_a_later_row(tmp_path: Path, num_bare: int) -> None:
    (tmp_path / "train.jsonl").write_text(as_json(ROWS))
    (tmp_path / "test.jsonl").write_text('{"text": "a text"}\n' * num_bare + as_json(ROWS[:3]))
    with pytest.raises(UsageError, match=r"an empty label in .*test\.jsonl, row 1"):
        read_files(tmp_path)


# --- columns and labels ----------------------------------------------------------------------------------------------


def test_columns_are_guessed_and_can_be_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [
        {"title": "no", "premise": text, "hypothesis": "so", "class": label, "kind": "ab"[n % 2]}
        for n, (text, label) in enumerate(ROWS)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    guessed = read_files(file)
    assert "text = premise, pair = hypothesis, label = class" in guessed.notes[0]
    assert set(guessed.corpus.train.pairs) == {"so"}
    mine = read_files(file, overrides=ColumnOverrides(text="Hypothesis", pair="premise", label="kind"))
    assert mine.corpus.classes == ("a", "b")
    assert set(mine.corpus.train.texts) == {"so"}
    with pytest.raises(UsageError, match="has no column 'premiss'") as caught:
        read_files(file, overrides=ColumnOverrides(text="premiss"))
    assert caught.value.try_ == "text_column=premise"


def test_a_column_has_one_role(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": label, "review": text}) for text, label in ROWS))
    assert "text = review, label = text" in read_files(file, overrides=ColumnOverrides(label="text")).notes[0]


@pytest.mark.parametrize(
    ("cells", "separator", "classes"),
    [
        ([["a", "b"], ["b"], [], ["c"]], "auto", ("a", "b", "c")),
        (["a|b", "b", "a", "c", "a|c"], "auto", ("a", "b", "c")),
        (["a, b", "b", "a", "c"], "auto", ("a", "b", "c")),
        (["a+b", "b", "a"], "+", ("a", "b")),
        (['["a", "b"]', "['b']"], "auto", ("a", "b")),
    ],
)
def test_multi_label_cells(tmp_path: Path, cells: list[object], separator: str, classes: tuple[str, ...]) -> None:
    lines = [json.dumps({"text": text, "labels": cells[n % len(cells)]}) for n, (text, _) in enumerate(ROWS)]
    (tmp_path / "rows").write_text("\n".join(lines))
    corpus = read_files(tmp_path / "rows", separator=separator).corpus
    assert corpus.is_multi_label
    assert corpus.classes == classes
    assert {len(labels) for labels in corpus.train.label_sets} >= {1, 2}


AUTHORS = [f"{last}, {first}" for last in ("Smith", "Doe", "Lee") for first in ("Ann", "Bob", "Cleo")]


@pytest.mark.parametrize("labels", [["Smith, Ann", "Smith, Bob"], AUTHORS, ["a;b", "c;d"], ["x", "y"]])
def test_punctuation_in_names_is_not_a_separator(labels: list[str]) -> None:
    assert detect_separator(labels) is None


def test_the_separator_can_be_disabled(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "label": ["a|b", "a", "b"][n % 3]}) for n, (text, _) in enumerate(ROWS)]
    (tmp_path / "rows").write_text("\n".join(lines))
    assert read_files(tmp_path / "rows", separator=None).corpus.classes == ("a", "a|b", "b")


def test_sentences_of_a_document_stay_in_one_split(tmp_path: Path) -> None:
    lines = [{"sentences": [f"first {n}", f"second {n}"], "labels": ["x", "y"]} for n in range(60)]
    (tmp_path / "rows").write_text("\n".join(map(json.dumps, lines)))
    corpus = read_files(tmp_path / "rows").corpus
    assert not corpus.is_multi_label
    places = {text: part for part in ("train", "val", "test") for text in getattr(corpus, part).texts}
    assert len(places) == 120
    assert all(places[f"first {n}"] == places[f"second {n}"] for n in range(60))


# --- splitting -------------------------------------------------------------------------------------------------------


def parts(corpus: Corpus) -> tuple[Examples, Examples, Examples]:
    return corpus.train, corpus.val, corpus.test


def test_groups_and_equal_texts_stay_in_one_split() -> None:
    texts = tuple(f"{'The  text' if n % 2 else 'THE text'} {n // 2} " for n in range(1_000))
    groups = [f"author {n // 3}" if n % 5 else None for n in range(1_000)]
    examples = Examples(texts=texts, labels=tuple(n // 2 % 2 for n in range(1_000)))
    corpus = split(examples, classes=["a", "b"], groups=groups)
    assert min(map(len, parts(corpus))) > 50
    group_of = dict(zip(examples.texts, groups, strict=True))
    for one in parts(corpus):
        for other in parts(corpus):
            if one is not other:
                assert not {normalize_text(text) for text in one.texts} & {normalize_text(text) for text in other.texts}
                shared = {group_of[text] for text in one.texts} & {group_of[text] for text in other.texts}
                assert shared <= {None}
    assert sum(map(len, parts(corpus))) == 1_000


def test_a_split_is_stratified_and_follows_its_seed() -> None:
    examples = Examples(texts=tuple(f"text {n}" for n in range(1_000)), labels=(0,) * 900 + (1,) * 100)
    first, again, other = (split(examples, classes=["a", "b"], seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.test.texts != other.test.texts
    for corpus in (first, other):
        assert [Counter(part.labels) for part in parts(corpus)] == [{0: 720, 1: 80}, {0: 90, 1: 10}, {0: 90, 1: 10}]


def test_large_groups_keep_the_split_sizes() -> None:
    groups = [f"group {n // 10}" for n in range(2_000)]
    examples = Examples(texts=tuple(f"text {n}" for n in range(2_000)), labels=tuple(n % 2 for n in range(2_000)))
    assert [len(part) for part in parts(split(examples, classes=["a", "b"], groups=groups))] == [1_600, 200, 200]


# --- class weights ---------------------------------------------------------------------------------------------------


def test_class_weights_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text(as_json([*ROWS, *((f"{text} again", "sport") for text, _ in ROWS)]))
    corpus = read_files(tmp_path / "rows").corpus
    sport = corpus.classes.index("sport")
    assert class_weights("none", corpus) is None
    weights = class_weights("balanced", corpus)
    assert weights is not None
    mass = Counter[int]()
    for label in corpus.train.labels:
        mass[label] += weights[label]
    assert max(mass.values()) - min(mass.values()) < 1e-9
    assert weights[sport] == min(weights)
    assert class_weights({"sport": 2.5}, corpus) == tuple(2.5 if n == sport else 1.0 for n in range(4))
    assert balanced_weights([(0, 1), (1,), ()], num_classes=3) == (1.0, 0.5, 1.0)
    with pytest.raises(UsageError, match="unknown class") as caught:
        class_weights({"sprot": 2.0}, corpus)
    assert caught.value.try_ == "sport"
    with pytest.raises(UsageError, match="cannot parse"):
        read_class_weights("{sport: much}")


def test_notes_before_a_training(tmp_path: Path) -> None:
    for part, rows in PARTS.items():
        (tmp_path / f"{part}.jsonl").write_text(as_json([*rows, PARTS["train"][3], PARTS["train"][5], *rows[:2]]))
    (tmp_path / "train.jsonl").write_text(
        as_json([*PARTS["train"], (ROWS[7][0].upper(), "sport"), *[("new", "sprot")] * 2])
    )
    notes = load_corpus(TextConfig(data=str(tmp_path))).notes
    assert notes[0] == "read 163 + 24 + 24 rows of JSON lines; text = text, label = label, 5 classes"
    assert notes[1].startswith("warning: labels that are probably misspelled: 1")
    assert notes[2] == (
        "warning: held-out texts that also occur in another split: 4 (val in train 2, test in train 2, test in val 2)"
    )
    assert notes[3].startswith(
        "warning: rows whose text has another label in another row: 2 (texts 1, rows 2) (whet data text "
    )
    assert len(notes) == 4
