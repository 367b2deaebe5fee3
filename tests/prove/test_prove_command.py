"""The command `whet prove`: recipes, files and runs, its errors, and the files it writes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paths import ROOT, SUPPORT, Run
from whet.base.errors import UsageError
from whet.report.run_report import summarize
from whet.report.text import render_text

pytestmark = pytest.mark.torch

RECIPE = str(SUPPORT / "provable_recipe.py")
QUICK = ("--seed", "3", "--kills", "3", "--steps", "12", "--budget", "3")


@pytest.mark.slow
def test_starter_recipe_is_proved(whet: Run, tmp_path: Path) -> None:
    assert whet("init", "mine.py").returncode == 0
    done = whet("prove", "mine.py", "threads=1", *QUICK, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads(done.stdout)
    assert (proof["format_version"], proof["verdict"]) == (1, "proved")
    assert "max_steps=12 instead of None" in proof["shortened"]
    kept = tmp_path / "runs" / "mine-proof-001"
    assert json.loads((kept / "proof.json").read_text()) == proof
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine-proof-001"], "nothing else is left"
    assert "proved: " in whet("report", "runs/mine-proof-001").stdout


@pytest.mark.slow
def test_proving_a_run_does_not_change_it(warm_whet: Run, tmp_path: Path) -> None:
    table = tmp_path / "texts.jsonl"
    rows = ((f"{'good' if n % 2 else 'bad'} number {n} {n * n}", "even" if n % 2 == 0 else "odd") for n in range(120))
    table.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    small = ("arch.hidden_size=16", "arch.layers=1", "arch.heads=2", "threads=1", "epochs=2", "global_batch_size=8")
    done = warm_whet("train", "text", "data=texts.jsonl", *small, "--run", "runs/mine", "--quiet", "--max-restarts=0")
    assert done.returncode == 0, done.stderr
    files = {p: p.read_bytes() for p in (tmp_path / "runs" / "mine").rglob("*") if p.is_file()}
    done = warm_whet("prove", "runs/mine", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("proved")
    assert "runs/mine/proof.json" in done.stderr
    now = {p: p.read_bytes() for p in (tmp_path / "runs" / "mine").rglob("*") if p.is_file()}
    assert {path.name for path in now.keys() - files.keys()} == {"proof.json"}
    assert all(now[path] == files[path] for path in files)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    assert "proof     proved: " in render_text(summarize(tmp_path / "runs" / "mine"))


@pytest.mark.slow
def test_set_order_makes_a_training_nondeterministic(whet: Run) -> None:
    """Python orders sets of strings differently in each process; forks of a single process would not show it."""
    done = whet("prove", RECIPE, "threads=1", "mutant=order of a set", *QUICK)
    assert done.returncode == 1, done.stderr
    assert "cannot be proved" in done.stdout
    assert "not deterministic" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        pytest.param(
            (RECIPE, "mutant=fails by itself"),
            1,
            "ValueError: no such class (provable_recipe.py:",
            marks=pytest.mark.slow,
        ),
        (("text", "data=missing.jsonl"), 2, "the data does not exist"),
        ((RECIPE, "epcohs=3"), 2, "did you mean 'epochs'"),
        (("no_such_recipe",), 2, "no such recipe"),
        ((RECIPE, "--kills", "0"), 2, "--kills"),
        ((RECIPE, "--recipe", RECIPE), 2, "--recipe needs a run"),
        ((RECIPE, "--device", "gpu"), 2, "device must be auto"),
    ],
)
def test_invalid_arguments_give_three_line_errors(
    warm_whet: Run, tmp_path: Path, words: tuple[str, ...], code: int, reported: str
) -> None:
    done = warm_whet("prove", *words, "--quiet")
    assert done.returncode == code, done.stderr
    assert reported in done.stderr
    assert len(done.stderr.strip().splitlines()) == 3, done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists(), "no half-written run folder"


def test_run_folder_does_not_choose_the_code(warm_whet: Run, tmp_path: Path) -> None:
    assert warm_whet("init", "mine.py").returncode == 0
    assert warm_whet("train", "mine.py", "max_steps=2", "--run", "r", "--quiet", "--max-restarts=0").returncode == 0
    done = warm_whet("prove", "r")
    assert done.returncode == UsageError.exit_code
    assert "--recipe mine.py" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_stopped_proof_leaves_nothing_behind(tmp_path: Path, number: int, code: int) -> None:
    words = [sys.executable, "-m", "whet", "prove", RECIPE, "threads=1", "--kills", "500", "--budget", "1"]
    with (tmp_path / "errors").open("w+") as errors:
        process = subprocess.Popen(words, cwd=tmp_path, stderr=errors, env={**os.environ, "WHET_HOME": str(tmp_path)})
        deadline = time.monotonic() + 600
        while "kill   3 of" not in (tmp_path / "errors").read_text():
            assert time.monotonic() < deadline
            assert process.poll() is None, (tmp_path / "errors").read_text()
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        assert process.wait(120) == code
    _, alive = psutil.wait_procs(children, timeout=120)
    assert alive == []
    assert not (tmp_path / "runs").exists()


def test_help_needs_no_torch(whet: Run) -> None:
    places = (SUPPORT / "broken_torch", ROOT / "src")
    done = whet("prove", "--help", path=Path(os.pathsep.join(map(str, places))))
    assert done.returncode == 0, done.stderr
    for word in ("whet prove text", "not deterministic", "proof.json", "--kills"):
        assert word in done.stdout
