"""The data report: every planted defect is found with its kind and row, and clean files have no findings."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from paths import ROOT, SUPPORT, ReportCount, Run
from planted_texts import clean_rows, clean_table, planted_table, row
from whet.base.errors import UsageError
from whet.cli.main import run
from whet.recipes.text.data_report import row_index
from whet.recipes.text.data_report.inspector import DatasetInspector
from whet.recipes.text.data_report.label_checks import misspelled
from whet.recipes.text.data_report.report import DEFECT_KINDS, DataReport, serious_lines
from whet.recipes.text.data_report.row_index import TEST, TRAIN, VAL, TextHashes
from whet.recipes.text.readers.samples import ColumnOverrides

Whet = Callable[..., subprocess.CompletedProcess[str]]
BROKEN_TORCH = SUPPORT / "broken_torch"
NOT_IN_CSV = {"not-a-row", "group-leak"}


def kinds_of(report: DataReport) -> dict[str, int]:
    return {finding.kind: finding.count for finding in report.findings}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Whet:
    """Run `whet ARGUMENTS` in an empty folder and in this process; one command of this file is a process of its own."""
    monkeypatch.chdir(tmp_path)

    def run_here(*words: str) -> subprocess.CompletedProcess[str]:
        code = run([*words])
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run_here


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clean_table().write(tmp_path_factory.mktemp("clean") / "data")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_table().write(tmp_path_factory.mktemp("planted") / "data")


def test_ten_thousand_clean_rows_have_no_findings(clean: Path) -> None:
    report = DatasetInspector(clean).run()
    assert (report.rows, [part.rows for part in report.splits]) == (10_000, [8_000, 1_000, 1_000])
    assert report.labels == dict.fromkeys(("politics", "science", "sport", "travel"), 2_500)
    assert report.findings == ()


def test_every_planted_defect_is_found_with_its_kind_and_row(planted: Path, report_count: ReportCount) -> None:
    expected = planted_table().planted
    assert expected.keys() == DEFECT_KINDS.keys() - NOT_IN_CSV
    result = {finding.kind: finding for finding in DatasetInspector(planted).run().findings}
    places = {
        kind: sorted(example.where.removeprefix(f"{planted}/") for example in finding.examples)
        for kind, finding in result.items()
    }
    assert places == {kind: sorted(where) for kind, where in expected.items()}
    assert {kind: finding.count for kind, finding in result.items()} == {k: len(where) for k, where in expected.items()}
    report_count(
        f"{sum(map(len, expected.values()))} defects of {len(expected)} kinds planted in 10,000 rows, all found"
    )


@pytest.mark.parametrize("kind", ["truncated", "not-a-row", "not-utf8", "nul", "bom", "line-endings", "leak"])
def test_defects_in_json_lines(tmp_path: Path, kind: str) -> None:
    lines = [json.dumps({"text": text, "label": label}).encode() + b"\n" for text, label in clean_rows(400)]
    plant = {
        "truncated": b'{"text": "The river meets the\n',
        "not-a-row": b'["The river", "sport"]\n',
        "not-utf8": b'{"text": "The caf\xe9", "label": "sport"}\n',
        "nul": b'{"text": "The caf\\u0000e opens", "label": "sport"}\n',
        "bom": b'{"text": "The \xef\xbb\xbfcafe opens", "label": "sport"}\n',
        "line-endings": lines.pop().replace(b"\n", b"\r\n"),
        "leak": lines[3],
    }[kind]
    (tmp_path / "train.txt").write_bytes(b"".join(lines[:300]))
    (tmp_path / "test.txt").write_bytes(b"".join([*lines[300:], plant]))
    report = DatasetInspector(tmp_path).run()
    assert kinds_of(report) == {kind: 1}
    assert report.findings[0].examples[0].where == f"{tmp_path}/test.txt:{len(lines) - 300 + 1}"


def test_a_text_in_all_three_splits() -> None:
    texts = TextHashes()
    for part, text in ((TRAIN, "A text"), (VAL, "a TEXT"), (TEST, "A text")):
        texts.add(text, "a text", label=0, split=part)
    assert sorted(texts.duplicates()) == [("leak", 2, 0), ("near-leak", 1, 0)]
    assert sorted(texts.removable()) == [("leak", 0, 2), ("near-leak", 1, 2)]


def test_similar_labels_are_not_taken_for_typos() -> None:
    often = {"relevant": 1_000, "irrelevant": 3, "grade 1": 900, "grade 2": 2, "yes": 900, "yet": 1, "result": 800}
    assert misspelled(often) == {}
    assert misspelled({**often, "reslut": 3, "Relevant ": 50}) == {"reslut": "result", "Relevant ": "relevant"}


def test_groups_in_two_splits_are_found(tmp_path: Path) -> None:
    rows = clean_rows(40)
    for part, some, group in (("train", rows[:30], "a"), ("test", rows[30:], "b")):
        lines = [row(*one) + b"," + group.encode() for one in some]
        (tmp_path / f"{part}.csv").write_bytes(b"\n".join([b"text,label,author", *lines]))
    assert DatasetInspector(tmp_path, overrides=ColumnOverrides(group="author")).run().findings == ()
    (tmp_path / "test.csv").write_bytes((tmp_path / "test.csv").read_bytes() + b"\nA new text,sport,a\n")
    assert kinds_of(DatasetInspector(tmp_path, overrides=ColumnOverrides(group="author")).run()) == {"group-leak": 1}


def test_multi_label_rows_and_pairs_are_not_duplicates(tmp_path: Path) -> None:
    both = [{"premise": "The river.", "hypothesis": text, "label": label} for text, label in clean_rows(300)]
    sets = [{"text": text, "tags": [label, "all"][: 1 + n % 2]} for n, (text, label) in enumerate(clean_rows(300))]
    for rows in (both, sets):
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        assert DatasetInspector(file).run().findings == ()


def test_multilingual_texts_and_numeric_labels_have_no_findings(tmp_path: Path) -> None:
    river = "\u0420\u0435\u043a\u0430 \u0442\u0435\u0447\u0451\u0442"
    texts = [text if n % 2 else f"{river} {n}" for n, (text, _) in enumerate(clean_rows(300))]
    lines = [json.dumps({"text": f"{text} [1]", "label": n % 3}) for n, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert DatasetInspector(tmp_path / "rows.jsonl").run().findings == ()


def test_too_many_labels_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_index, "MAX_LABELS", 1_000)
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"a text {n},{n}\n" for n in range(1_001)))
    with pytest.raises(UsageError, match="over 1,000 different labels"):
        DatasetInspector(tmp_path / "rows.csv").run()


# --- clean copies ----------------------------------------------------------------------------------------------------


def test_a_clean_copy_has_no_defects_and_lists_every_change(planted: Path, tmp_path: Path, here: Whet) -> None:
    before = {file.name: file.read_bytes() for file in planted.iterdir()}
    done = here("data", "text", str(planted), "--fix", "--out", "clean", "--json")
    assert done.returncode == 0, done.stderr
    fixed = json.loads(done.stdout)["fixed"]
    left = {kind for kind, what in DEFECT_KINDS.items() if what.action == "left"}
    assert kinds_of(DatasetInspector(tmp_path / "clean").run()).keys() == left - {"group-leak"}
    assert {file.name: file.read_bytes() for file in planted.iterdir()} == before

    entries = [json.loads(line) for line in (tmp_path / "clean" / "removed.jsonl").read_text().splitlines()]
    done_for = Counter((why, entry["action"]) for entry in entries for why in entry["why"])
    for kind in DEFECT_KINDS.keys() - NOT_IN_CSV - left:
        assert done_for[kind, DEFECT_KINDS[kind].action] >= 1, kind
    assert fixed["rows"] - fixed["kept"] == sum(entry["action"] == "removed" for entry in entries)
    kept = set((tmp_path / "clean" / "train.csv").read_bytes().splitlines())
    untouched = set(b"".join(clean_table().lines["train"]).splitlines()) - kept
    assert len(untouched) <= 12, "rows without a defect stay as they are"

    again = here("data", "text", str(planted), "--fix", "--out", "clean")
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_one_file_is_copied_to_one_file_and_kinds_can_be_left(tmp_path: Path, here: Whet) -> None:
    rows = clean_rows(50)
    more = [b'"Needlessly quoted","sport"', row("A <br/> new text", "sport")]
    text = b"\n".join([b"text,label", *(row(*one) for one in rows), row(*rows[0]), *more])
    (tmp_path / "rows.csv").write_bytes(text)
    done = here("data", "text", "rows.csv", "--fix", "--out", "out/clean.csv", "--leave", "html", "--strict")
    assert done.returncode == 1, "strict: something was found"
    expected = [b"text,label", *(row(*one) for one in rows), *more]
    assert (tmp_path / "out" / "clean.csv").read_bytes() == b"\n".join(expected) + b"\n"
    (entry,) = (tmp_path / "out" / "clean.removed.jsonl").read_text().splitlines()
    assert json.loads(entry)["other"] == "rows.csv:2"
    for leave, reported in (("htm", "no such kind"), ("truncated", "cannot be kept")):
        refused = here("data", "text", "rows.csv", "--fix", "--out", "other.csv", "--leave", leave)
        assert refused.returncode == 2
        assert reported in refused.stderr
    assert not (tmp_path / "other.csv").exists()


def test_a_file_that_changes_during_the_copy_is_rejected(tmp_path: Path) -> None:
    from whet.base.errors import WhetError
    from whet.recipes.text.data_report.clean_copy import write_clean_copy

    file = tmp_path / "rows.csv"
    file.write_bytes(b"\n".join([b"text,label", *(row(*one) for one in clean_rows(50))]))
    inspection = DatasetInspector(file)
    inspection.run()
    file.write_bytes(file.read_bytes().replace(b"river", b"stream"))
    with pytest.raises(WhetError, match="changed while it was copied"):
        write_clean_copy(inspection, tmp_path / "clean.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv"]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_needs_no_torch_and_shows_a_few_rows(planted: Path, whet: Run) -> None:
    done = whet("data", "text", str(planted), path=Path(f"{BROKEN_TORCH}{os.pathsep}{ROOT / 'src'}"))
    assert done.returncode == 0, done.stderr
    assert "rows of CSV; text = text, label = label" in done.stdout
    assert "! leak                    2  held-out texts" in done.stdout
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) < 5 + 4 * len(DEFECT_KINDS)


def test_the_docs_page_is_true(tmp_path: Path, here: Whet) -> None:
    page = (ROOT / "docs" / "text-data.md").read_text()
    commands = [shlex.split(words, comments=True) for words in re.findall(r"^\$ whet (.*)$", page, re.MULTILINE)]
    assert len(commands) == 6
    lines = [b"review,sentiment", *(row(*one) for one in clean_rows(60)), row(*clean_rows(1)[0])]
    (tmp_path / "reviews.csv").write_bytes(b"\n".join(lines))
    for words in commands:
        if words[0] == "data":
            done = here(*words)
            assert done.returncode == 0, done.stderr
    listed = dict(re.findall(r"^\| `([a-z0-9-]+)`(?: !)? \| (.*?) \| ", page, re.MULTILINE))
    assert listed == {kind: what.description for kind, what in DEFECT_KINDS.items()}


def test_column_options_and_unknown_columns(tmp_path: Path, here: Whet) -> None:
    (tmp_path / "rows.csv").write_text("words,kind\na b,x\nc d,y\n")
    assert "has no text column" in here("data", "text", "rows.csv").stderr
    done = here("data", "text", "rows.csv", "text_column=words", "label_column=kind")
    assert done.returncode == 0, done.stderr
    assert "text = words, label = kind" in done.stdout
    assert here("data", "text", "nowhere.csv").returncode == 2


def test_serious_findings_take_at_most_three_lines(planted: Path) -> None:
    lines = serious_lines(DatasetInspector(planted).run().findings, where="DIR")
    assert len(lines) == 3
    assert all(line.startswith("warning: ") for line in lines)
    assert "held-out texts that also occur in another split: 2" in lines[2]


# --- real data -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_findings_in_real_datasets() -> None:
    folder = os.environ.get("WHET_TEST_DATA")
    if not folder:
        pytest.skip("WHET_TEST_DATA is not set: it names a folder with sci-cite/ and csabstruct/")
    cited = kinds_of(DatasetInspector(Path(folder) / "sci-cite").run())
    assert cited == {
        "control": 1,
        "mojibake": 282,
        "duplicate": 1,
        "near-duplicate": 92,
        "leak": 2,
        "near-leak": 22,
        "two-labels": 10,
    }
    abstracts = kinds_of(DatasetInspector(Path(folder) / "csabstruct").run())
    assert abstracts == {
        "punctuation": 17,
        "html": 1,
        "label-in-text": 2,
        "duplicate": 110,
        "leak": 235,
        "two-labels": 111,
    }


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Twelve thousand long rows, 15 MB of text, of which only a few numbers per row are kept."""
    line = "the quick river meets the slow lamp again and again " * 24
    with (tmp_path / "rows.csv").open("w") as file:
        file.write("text,label\n")
        file.writelines(f"{n} {line},{'ab'[n % 2]}\n" for n in range(12_000))
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from whet.recipes.text.data_report.inspector import DatasetInspector\n"
        "import numpy; start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "rows = DatasetInspector(Path(sys.argv[1])).run().rows\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start\n"
        "print(rows, grown // (2**10 if sys.platform == 'darwin' else 1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "rows.csv"], capture_output=True, text=True, check=True
    )
    rows, kilobytes = map(int, done.stdout.split())
    assert rows == 12_000
    assert kilobytes < 8_000, "far less than the 15 MB of the file"
