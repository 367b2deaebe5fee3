"""`whet report` as HTML, Markdown, text and JSON, and its errors, on simulated runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simulated_run import _waits_for_no_disk, simulated_run  # noqa: F401
from whet.cli.main import run as whet
from whet.report.page.html import is_report
from whet.report.table import markdown_page


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a", "b"):
        simulated_run(tmp_path / "runs" / name, steps=60, seed=ord(name))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path / "runs"


def test_html_file_is_complete(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whet(["report", str(runs / "a"), "--html"]) == 0
    assert "wrote a.html" in capsys.readouterr().err
    assert is_report(Path("a.html"))
    before = Path("a.html").read_bytes()
    assert whet(["report", str(runs / "a"), "--html"]) == 0, "a report may replace a report"
    assert Path("a.html").read_bytes() == before
    assert whet(["report", str(runs / "a"), str(runs / "b"), "--html", "both.html"]) == 0
    assert whet(["report", str(runs / "a"), "--html", "--out", "named.txt"]) == 0
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["a.html", "both.html", "named.txt"], "no leftovers"
    assert sorted(path.name for path in (runs / "a").iterdir()) == sorted(path.name for path in (runs / "b").iterdir())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("{runs}/absent", "--html"), 2),
        (("{runs}/a", "{runs}/absent", "--markdown", "--out", "x.md"), 2),
        (("{runs}/a", "--html", "--json"), 2),
        (("{runs}/a", "--html", "--out", "{runs}"), 2),
        (("{runs}/a", "--html", "--out", "no/such/x.html"), 2),
        (("{runs}/a", "--markdown", "--out", "/proc/x.md"), 1),
        (("{runs}/damaged", "--html"), 1),
        (tuple(["{runs}/a"] * 13), 2),
    ],
)
def test_bad_input_is_an_error_and_writes_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int
) -> None:
    simulated_run(runs / "damaged", steps=60)
    (runs / "damaged" / "plan.json").write_text("{")
    assert whet(["report", *(word.format(runs=runs) for word in words)]) == code
    reported = capsys.readouterr()
    assert reported.out == ""
    assert [line.split(":")[0].strip() for line in reported.err.splitlines()] == ["error", "got", "try"]
    assert list(Path.cwd().iterdir()) == []


def test_file_that_is_not_a_report_is_kept(runs: Path) -> None:
    Path("a.html").write_text("<!doctype html>mine")
    assert whet(["report", str(runs / "a"), "--html"]) == 2
    assert Path("a.html").read_text() == "<!doctype html>mine"


def test_file_of_a_run_is_never_replaced(runs: Path) -> None:
    for file in (runs / "b" / "events.jsonl", runs / "b" / "plan.json"):
        before = file.read_bytes()
        assert whet(["report", str(runs / "a"), "--json", "--out", str(file)]) == 2
        assert file.read_bytes() == before


def test_stdout_may_be_explicit_closed_or_full(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert whet(["report", str(runs / "a"), "--html", "--out", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    assert not Path("-").exists()
    command = [sys.executable, "-m", "whet", "report", str(runs / "a")]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "error: the disk is full")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert whet(["report", str(runs / "a")]) == 0
        sys.stdout.close()


def test_comparison_as_text_markdown_and_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [str(runs / "a"), str(runs / "b")]
    assert whet(["report", *both]) == 0
    text = capsys.readouterr().out
    assert "configuration  a   b\nseed           97  98" in text
    assert "settings of the plan: no differences" in text
    assert whet(["report", *both, "--markdown"]) == 0
    assert capsys.readouterr().out == markdown_page("a / b", text)
    assert whet(["report", *both, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"] == ["a", "b"]


def test_one_run_as_text_and_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whet(["report", str(runs / "a")]) == 0
    assert capsys.readouterr().out.startswith("run       a: text, done at step 60 of 60")
    assert whet(["report", str(runs / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(runs / "a")


def test_one_run_as_markdown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whet(["report", str(runs / "a"), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["# `a`", "", "```text"]
    assert lines[3].startswith("run       a: text, done at step 60 of 60")
    assert lines[-1] == "```"


def test_text_cannot_close_the_markdown_code_block() -> None:
    nasty = "![x](http://evil.example/p.png) @everyone `a`\n```\n# c \x1b[2J"
    lines = markdown_page(nasty, nasty).splitlines()
    assert lines[2] == "```text"
    assert lines[-1] == "```"
    assert not [line for line in lines[3:-1] if "`" in line or not line.isprintable()]
    assert lines[0].startswith("# `")
    assert lines[0].count("`") == 2


def test_all_runs_are_validated_before_the_first_is_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(run: Path) -> None:
        raise AssertionError(f"{run} was read")

    monkeypatch.setattr("whet.report.run_report.summarize", never)
    assert whet(["report", str(runs / "a"), str(runs / "absent"), "--html"]) == 2
