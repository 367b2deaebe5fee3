"""No command, and no process that it starts, imports a module of the current folder in place of an installed one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paths import SUPPORT
from whet.cli.main import COMMANDS

# Modules that Python, torch, whet or one of their libraries imports, early or late.
SHADOWING = (
    "abc", "argparse", "array", "ast", "asyncio", "base64", "bisect", "bz2", "calendar", "click", "cmath",
    "code", "codecs", "collections", "concurrent", "contextlib", "copy", "copyreg", "csv", "ctypes",
    "dataclasses", "datetime", "decimal", "difflib", "dis", "email", "enum", "errno", "filecmp", "fnmatch",
    "fractions", "functools", "getpass", "gettext", "glob", "gzip", "hashlib", "heapq", "hmac", "html",
    "http", "importlib", "inspect", "io", "ipaddress", "itertools", "json", "keyword", "linecache", "locale",
    "logging", "lzma", "math", "mimetypes", "multiprocessing", "numbers", "numpy", "operator", "optuna",
    "packaging", "pathlib", "pickle", "pkgutil", "platform", "posixpath", "pprint", "psutil", "pydantic",
    "queue", "quopri", "random", "re", "resource", "runpy", "safetensors", "secrets", "select", "selectors",
    "shlex", "shutil", "signal", "site", "sitecustomize", "socket", "sqlite3", "ssl", "stat", "statistics",
    "string", "struct", "subprocess", "sympy", "sysconfig", "tarfile", "tempfile", "textwrap", "threading",
    "tokenize", "tokenizers", "torch", "traceback", "transformers", "typer", "types", "typing", "unittest",
    "urllib", "usercustomize", "uuid", "warnings", "weakref", "webbrowser", "whet", "yaml", "zipfile", "zlib",
)  # fmt: skip

Whet = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that a shadowing module writes when it is imported. The folder of all of them is `hostile`."""
    folder, marker = tmp_path / "hostile", tmp_path / "marker"
    folder.mkdir()
    assert len(SHADOWING) > 100
    for name in SHADOWING:
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r} + ' ')\n")
    return marker


@pytest.fixture
def shadowed(tmp_path: Path, marker: Path) -> Whet:
    """Run `whet ARGUMENTS` among the shadowing modules, started as an installed program: from a script elsewhere.

    Neither `python -m`, which puts the current folder first, nor `python -P`, which children inherit.
    """
    script = tmp_path / "bin" / "whet"
    script.parent.mkdir()
    script.write_text("from whet.cli.main import main\nmain()\n")
    env = {**os.environ, "WHET_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path / "hostile",
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
            stdin=subprocess.DEVNULL,
        )

    return run


def expect(done: "subprocess.CompletedProcess[str]", marker: Path, *codes: int) -> None:
    assert not marker.exists(), f"imported: {marker.read_text()}"
    assert done.returncode in (codes or (0,)), done.stdout + done.stderr
    assert "internal error" not in done.stderr, done.stderr


def test_shadowing_modules_are_noticed(tmp_path: Path, marker: Path) -> None:
    """Plant the fault: Python itself puts the current folder first."""
    subprocess.run([sys.executable, "-c", "import json"], cwd=tmp_path / "hostile", capture_output=True)
    assert "json" in marker.read_text()


def test_commands_without_torch(shadowed: Whet, marker: Path) -> None:
    expect(shadowed("runs"), marker)
    expect(shadowed("init", "new.py"), marker)
    expect(shadowed("plan", "text", "--machine", "m2-air-8gb"), marker)


@pytest.mark.torch
def test_module_of_the_user_is_found_and_shadows_nothing(shadowed: Whet, marker: Path, tmp_path: Path) -> None:
    (tmp_path / "hostile" / "mine.py").write_text(
        "import json, torch, helper_of_mine\ndef model():\n    return torch.nn.Linear(2, 2), (torch.ones(2, 2),)\n"
    )
    (tmp_path / "hostile" / "helper_of_mine.py").write_text("import queue\n")
    expect(shadowed("check", "mine:model", "--for", "cpu"), marker)


FAST = ("max_steps=6", "eval_every=6", "--device", "cpu")
# Every command, in an order in which each finds what it needs. A command of another recipe ends with a usage error.
CASES: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = [
    ("init", ("mine.py",), (0,)),
    ("probe", ("--json",), (0,)),
    ("plan", ("mine.py",), (0,)),
    ("train", ("mine.py", "--run", "runs/one", *FAST), (0,)),
    ("train", ("mine.py", "--run", "runs/two", "--nproc", "2", "--no-measure", *FAST), (0,)),
    ("train", ("mine.py", "--run", "runs/three", "--max-restarts", "0", "--no-measure", *FAST), (0,)),
    ("search", ("mine.py", "lr=1e-3..1e-2:log", "--trials", "1", "--name", "found", *FAST), (0,)),
    ("bench", ("mine.py", "--against", "naive", "--budget", "10", "--device", "cpu"), (0, 1)),
    ("check", ("mine.py", "--for", "mps"), (0, 1)),
    ("compare", ("mine.py", "--devices", "cpu", "--steps", "2"), (0, 1, 3)),
    ("prove", ("mine.py", "--kills", "1", "--steps", "8", "--budget", "1", "--device", "cpu"), (0, 1)),
    ("doctor", ("--device", "cpu", "--quick", "--budget", "20", "--json", "doctor.json"), (0, 1)),
    ("runs", (), (0,)),
    ("report", ("runs/one",), (0,)),
    ("watch", ("--terminal", "--once"), (0,)),
    ("forward", ("runs/one", "--to", "mlflow", "--once"), (0, 1, 2)),
    ("data", ("texts.csv",), (0, 1, 2)),
    ("data chat", ("chats.jsonl", "--out", "chats"), (0, 1, 2)),
    ("data hex", ("games.txt",), (0, 1, 2)),
    ("data puzzle", ("games.txt", "--out", "puzzles"), (0, 1, 2)),
    ("predict", ("runs/one", "--recipe", "mine.py", "a text"), (0, 1, 2)),
    ("generate", ("runs/one", "a text"), (0, 1, 2)),
    ("chat", ("runs/one",), (0, 1, 2)),
    ("serve", ("runs/one", "--port", "0"), (0, 1, 2)),
    ("play", ("two-distance", "--size", "2"), (2,)),
    ("arena", ("hex", "random", "two-distance", "--games", "2", "--size", "4", "--device", "cpu"), (0, 1, 2)),
    ("export", ("runs/one", "--to", "safetensors", "--out", "exported"), (0, 1, 2)),
    ("import", ("model.pt", "--out", "imported"), (0,)),
]


@pytest.mark.slow
@pytest.mark.torch
def test_every_command_and_its_children(shadowed: Whet, marker: Path, tmp_path: Path) -> None:
    import torch

    assert {command for command, _, _ in CASES} == set(COMMANDS)
    folder = tmp_path / "hostile"
    torch.save({"weight": torch.ones(2)}, folder / "model.pt")
    (folder / "texts.csv").write_text("text,label\n" + "good,1\nbad,0\n" * 20)
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (folder / "games.txt").write_text("a1b2a2b3a3\n")
    for command, arguments, codes in CASES:
        done = shadowed(*command.split(), *arguments)
        assert not marker.exists(), f"whet {command} {' '.join(arguments)} imported: {marker.read_text()}"
        assert done.returncode in codes, (command, done.stdout, done.stderr)
        assert "internal error" not in done.stderr, (command, done.stderr)


@pytest.mark.torch
def test_spawned_data_workers(tmp_path: Path, marker: Path) -> None:
    """Spawned workers, as on a Mac, in a program that an installed script started."""
    script = tmp_path / "bin" / "read.py"
    script.parent.mkdir()
    script.write_text(
        "import sys\n"
        f"sys.path.append({str(SUPPORT)!r})\n"
        "if __name__ == '__main__':\n"
        "    from worker_jobs import read_with_workers\n"
        "    print(read_with_workers('spawn'))\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path / "hostile", capture_output=True, text=True)
    expect(done, marker)
    assert done.stdout == "8\n"
