"""The gates of `make lint` work: each fault is planted in a copy of the source and must be reported."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package with its configuration."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.fixture
def sparse(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one file of the package, for a gate that looks at each file alone."""

    def make(file: str) -> Path:
        (tmp_path / "src" / "whet" / file).parent.mkdir(parents=True)
        if (ROOT / "src" / "whet" / file).exists():
            shutil.copy(ROOT / "src" / "whet" / file, tmp_path / "src" / "whet" / file)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        return tmp_path

    return make


def plant(copy: Path, file: str, line: str) -> None:
    path = copy / "src" / "whet" / file
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text((path.read_text() if path.exists() else '"""Planted."""\n') + line + "\n")


def check(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(copy / "src")}
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=600)


def lint_imports(copy: Path) -> subprocess.CompletedProcess[str]:
    return check(copy, str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo")


def ruff(copy: Path) -> subprocess.CompletedProcess[str]:
    return check(copy, sys.executable, "-m", "ruff", "check", "--no-cache", "src")


def test_the_source_passes(copy: Path) -> None:
    for result in (lint_imports(copy), ruff(copy)):
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "reported"),
    [
        ("base/units.py", "from whet.plan.plan import Plan", "whet.base.units -> whet.plan.plan"),
        ("plan/workload.py", "def late():\n    import whet.run.folder", "whet.plan.workload -> whet.run.folder"),
        ("machine/facts.py", "import torch", "whet.machine.facts -> torch"),
        ("report/run_report.py", "def late():\n    import numpy", "whet.report.run_report -> numpy"),
    ],
    ids=["upward", "upward in a function", "torch", "numpy in a function"],
)
def test_a_wrong_import_fails(copy: Path, file: str, line: str, reported: str) -> None:
    plant(copy, file, line)
    result = lint_imports(copy)
    assert result.returncode != 0
    assert reported in result.stdout


def test_torch_through_a_chain_fails(copy: Path) -> None:
    # The layers allow recipes to use torch; a torch-free file that imports one of theirs does not stay torch-free.
    plant(copy, "recipes/text/model.py", "import torch")
    plant(copy, "recipes/text/config.py", "from whet.recipes.text import model")
    result = lint_imports(copy)
    assert result.returncode != 0
    assert "whet.recipes.text.config -> whet.recipes.text.model" in result.stdout
    assert "whet.recipes.text.model -> torch" in result.stdout


def test_an_upward_import_through_a_chain_fails(copy: Path) -> None:
    plant(copy, "machine/helper.py", "from whet.machine import second")
    plant(copy, "machine/second.py", "from whet.recipes import recipe")
    result = lint_imports(copy)
    assert result.returncode != 0
    assert "whet.machine.second -> whet.recipes.recipe" in result.stdout


def test_a_package_without_a_layer_fails(copy: Path) -> None:
    plant(copy, "utils/__init__.py", "")
    result = lint_imports(copy)
    assert result.returncode != 0
    assert "utils" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "reported"),
    [
        ("recipes/text/model.py", "def f():\n    import torch\n\n    torch.mps.synchronize()", "torch.mps"),
        ("recipes/text/model.py", "def f():\n    from torch import cuda\n\n    return cuda", "torch.cuda"),
        ("plan/workload.py", "import os\n\nHOME = os.environ", "os.environ"),
        ("plan/workload.py", "print('hello')", "T201"),
        ("run/folder.py", "import pickle", "pickle"),
        ("plan/workload.py", "from . import plan", "TID252"),
        ("config/options.py", "import torch", "TID253"),
    ],
)
def test_banned_names_fail(sparse: Callable[[str], Path], file: str, line: str, reported: str) -> None:
    plant(copy := sparse(file), file, line)
    result = ruff(copy)
    assert result.returncode != 0
    assert reported in result.stdout


def unsafe(copy: Path) -> subprocess.CompletedProcess[str]:
    return check(copy, sys.executable, str(ROOT / "tools" / "unsafe.py"), "src")


def test_the_source_runs_no_files(copy: Path) -> None:
    result = unsafe(copy)
    assert result.returncode == 0, result.stdout
    assert unsafe(copy / "src").returncode != 0, "a gate that checks no file has no effect"


@pytest.mark.parametrize(
    ("file", "line", "reported"),
    [
        (
            "training/weights.py",
            "import torch\n\nW = torch.load('w.pt', weights_only=True)",
            "allowed in whet/checkpoint/unpickle.py only",
        ),
        ("checkpoint/unpickle.py", "W = torch.load('w.pt')", "without an explicit weights_only=True"),
        (
            "checkpoint/unpickle.py",
            "SAFE = True\nW = torch.load('w.pt', weights_only=SAFE)",
            "without an explicit weights_only=True",
        ),
        (
            "checkpoint/unpickle.py",
            "from torch import load as read\n\nW = read('w.pt')",
            "without an explicit weights_only=True",
        ),
        ("config/sources.py", "import yaml\n\nX = yaml.load('a: 1', Loader=yaml.Loader)", "yaml.load"),
        ("config/sources.py", "X = eval('1')", "eval"),
        ("config/sources.py", "exec('x = 1')", "exec"),
        ("machine/programs.py", "import subprocess as s\n\ns.run('ls', shell=True)", "shell"),
        ("machine/programs.py", "from os import system\n\nsystem('ls')", "os.system"),
        (
            "recipes/text/model.py",
            "def f(load, name):\n    return load(name, trust_remote_code=True)",
            "trust_remote_code",
        ),
        (
            "checkpoint/store.py",
            "import torch.distributed.checkpoint as dcp\n\ndcp.load({}, checkpoint_id='x')",
            "torch.distributed.checkpoint.load",
        ),
        ("checkpoint/store.py", "import numpy as np\n\nX = np.load('x', allow_pickle=True)", "allow_pickle"),
        ("checkpoint/store.py", "from pickle import loads\n\nX = loads(b'')", "pickle.loads"),
        ("training/step_bench.py", "import pickle\n\nX = pickle.load(open('x', 'rb'))", "pickle.load"),
        ("training/shipped_bench.py", "X = pickle.loads(b'')", "pickle.loads"),
        ("training/shipped_bench.py", "X = cloudpickle.load(open('x', 'rb'))", "cloudpickle.load"),
    ],
)
def test_calls_that_run_files_fail(sparse: Callable[[str], Path], file: str, line: str, reported: str) -> None:
    plant(copy := sparse(file), file, line)
    result = unsafe(copy)
    assert result.returncode == 1
    assert reported in result.stdout


@pytest.mark.slow
def test_a_wrong_type_fails(copy: Path) -> None:
    plant(copy, "base/units.py", "\nBYTES: int = 'many'")
    result = check(copy, sys.executable, "-m", "mypy", "--cache-dir", str(copy / "cache"), "-p", "whet.base")
    assert result.returncode != 0
    assert "Incompatible types" in result.stdout


def test_make_help_names_every_target() -> None:
    listed = (ROOT / "Makefile").read_text().partition(".PHONY: ")[2].partition("\n")[0].split()
    logged = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    lines = [line.split() for line in logged.stdout.splitlines() if line.startswith("  make ")]
    assert sorted(line[1] for line in lines) == sorted(set(listed) - {"help"})
    assert all(len(line) > 4 for line in lines), "each with what it does"


def test_percent_is_written_in_one_way() -> None:
    actual = [path for path in (ROOT / "src").rglob("*.py") if re.search(r"[:\d]%\}", path.read_text())]
    assert actual == [], "show_share writes 13 %, Python's own format 13%"
