"""Hostile files at every entry point: nothing is executed, nothing outside is touched, all are refused."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fault_runs import ALL, BOUNDED, counts
from fork_server import ForkServer
from hostile_files import CONFIG, MACHINE, RUNS, SAFE, TORCH
from hostile_read import CAUGHT
from paths import SUPPORT

pytestmark = pytest.mark.torch

VISIT = SUPPORT / "hostile_read.py"
STARTER = Path(__file__).parent.parent.parent / "src" / "whet" / "recipes" / "starter.py"

FILE_DOORS = ("import", "init_from", "machine", "config", "report", "predict", "plan", "train", "session")
RUN_DOORS = ("report", "train", "session", "plan", "predict", "runs", "init_from")
CPU_SECONDS = 20
MODULES = "modules beside the run"
"""The one that is visited from inside."""


@dataclass
class Tried:
    visits: int = 0
    refused: int = 0
    cpu: float = 0.0
    rss_mb: float = 0.0
    problems: list[str] = field(default_factory=list)


class EntryPoints:
    """Reads files at entry points of whet, each in a new folder."""

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        self._fork_server, self._folder = fork_server, folder
        self._numbers = itertools.count()
        self.recipe = folder / "my_recipe.py"
        shutil.copy(STARTER, self.recipe)
        self._good: dict[str, Path] = {}

    def good(self, door: str) -> Path:
        """Make a valid run for that entry point."""
        if door not in self._good:
            run = self._folder / f"good-{door}"
            code, errors, _ = self.visit(door, run, steps=4)
            assert code == 0, errors
            self._good[door] = run
        return self._good[door]

    def visit(
        self, door: str, path: Path, *, steps: int = 6, plant: str | None = None, is_inside: bool = False
    ) -> tuple[int, str, dict[str, Any]]:
        folder = self._folder / f"visit-{next(self._numbers)}"
        folder.mkdir()
        logged, findings = folder / "logged.json", folder / "findings.txt"
        options = {
            "door": door,
            "path": str(path),
            "folder": str(folder),
            "logged": str(logged),
            "findings": str(findings),
            "recipe": str(self.recipe),
            "steps": steps,
            "plant": plant,
            "is_inside": is_inside,
            "cpu_seconds": CPU_SECONDS,
        }
        life = self._fork_server.start(VISIT, json.dumps(options))
        try:
            code, errors = life.wait()
        except AssertionError:
            life.send(signal.SIGKILL)
            code, errors = life.wait()
            errors += "it did not end"
        reported = json.loads(logged.read_text()) if logged.exists() else {}
        return code, errors + (findings.read_text() if findings.exists() else ""), reported

    def place(self) -> Path:
        place = self._folder / f"place-{next(self._numbers)}"
        (place / "victim").mkdir(parents=True)
        (place / "victim" / "file").write_text("untouched")
        return place

    def examine(self, name: str, door: str, path: Path, place: Path, tried: Tried, **options: Any) -> None:
        """Read one file and check the outcome."""
        code, reported, used = self.visit(door, path, **options)
        tried.visits += 1
        tried.refused += code in (1, 2)
        tried.cpu = max(tried.cpu, used.get("cpu", 0.0))
        tried.rss_mb = max(tried.rss_mb, used.get("rss", 0) / 1024)
        wrong = []
        if code == CAUGHT or (place / "canary").exists():
            wrong.append("EXECUTED")
        if code not in (0, 1, 2):
            wrong.append(f"exit {signal.Signals(-code).name if code < 0 else code}")
        if code == 0 and path.is_file():
            wrong.append("accepted")
        if any(word in reported for word in ("Traceback", "internal error", "your code raised an exception")):
            wrong.append("not explained")
        if {p.name: p.read_text() for p in (place / "victim").iterdir()} != {"file": "untouched"}:
            wrong.append("wrote outside")
        if wrong:
            tried.problems.append(f"{name} at {door}: {', '.join(wrong)}\n{reported[-600:]}")


@pytest.fixture(scope="module")
def entry_points(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> EntryPoints:
    return EntryPoints(fork_server, tmp_path_factory.mktemp("entry_points"))


def visits(amount: str) -> Iterator[tuple[str, str, str, Any]]:
    """The cases: (kind, name, entry point, maker). The gate has two of three files, each at one entry point."""
    turn = itertools.count()
    others = [door for door in FILE_DOORS if door != "import"]
    for number, (name, made) in enumerate(chosen({**TORCH, **SAFE}, amount)):
        # In the gate every third file at another entry point than its own, so that all of those get some.
        one = "import" if number % 3 else others[number // 3 % len(others)]
        for door in ("import", *others) if amount == "all" else (one,):
            yield "file", name, door, made
    for name, made in chosen(CONFIG, amount):
        for door in ("config", "train config") if amount == "all" else ("config",):
            yield "file", name, door, made
    for name, made in chosen(MACHINE, amount):
        yield "file", name, "machine", made
    for name, change in chosen(RUNS, amount):
        for door in RUN_DOORS if amount == "all" else (RUN_DOORS[next(turn) % len(RUN_DOORS)],):
            yield "run", name, door, change


def chosen(cases: dict[str, Any], amount: str) -> list[tuple[str, Any]]:
    return [case for number, case in enumerate(cases.items()) if amount == "all" or number % 3 != 2]


@pytest.mark.parametrize("amount", [BOUNDED, ALL])
def test_nothing_is_executed(entry_points: EntryPoints, amount: str, report_count: Callable[[str], None]) -> None:
    tried = Tried()
    names = set()
    for kind, name, door, made in visits(amount):
        names.add(name)
        place = entry_points.place()
        if kind == "file":
            path = place / made[0]
            made[1](path, place / "canary")
        else:
            path = place / "runs" / "run"
            shutil.copytree(entry_points.good("session" if door in ("session", "init_from") else "train"), path)
            made(path, place / "canary")
        entry_points.examine(name, door, path, place, tried, is_inside=name == MODULES)
    executions = sum("EXECUTED" in problem for problem in tried.problems)
    logged = counts(
        hostile_files=len(names),
        executions=executions,
        visits=tried.visits,
        refused=tried.refused,
        most_cpu_seconds=round(tried.cpu, 1),
        most_memory_mb=round(tried.rss_mb),
    )
    report_count(logged)
    assert not tried.problems, f"{logged}\n\n" + "\n\n".join(tried.problems)
    assert len(names) >= 60


@pytest.mark.parametrize(
    ("fault", "name", "door"),
    [
        ("pickle.load", "os.system in a legacy file", "import"),
        ("torch.load", "eval", "import"),
        ("torch.load", "os.system in an archive", "import"),
        ("checkpoint", "a pickle for tensors", "session"),
        ("cwd", MODULES, "report"),
    ],
)
def test_a_planted_reader_is_noticed(entry_points: EntryPoints, fault: str, name: str, door: str) -> None:
    """Test of the harness: a reader that executes code must be detected."""
    place = entry_points.place()
    tried = Tried()
    if name in TORCH:
        path = place / TORCH[name][0]
        TORCH[name][1](path, place / "canary")
    else:
        path = place / "run"
        shutil.copytree(entry_points.good("session"), path)
        RUNS[name](path, place / "canary")
    entry_points.examine(name, door, path, place, tried, plant=fault, is_inside=name == MODULES)
    assert any("EXECUTED" in problem for problem in tried.problems), tried


def test_good_files_pass_all_doors(entry_points: EntryPoints) -> None:
    """The files above are refused for the defect they were made with."""
    for door in ("report", "train", "plan", "runs"):
        place = entry_points.place()
        path = place / "runs" / "run"
        shutil.copytree(entry_points.good("train"), path)
        tried = Tried()
        entry_points.examine("good", door, path, place, tried)
        assert (tried.problems, tried.refused) == ([], 0), door
    for door in ("session", "init_from"):
        place = entry_points.place()
        shutil.copytree(entry_points.good("session"), place / "run")
        tried = Tried()
        entry_points.examine("good", door, place / "run", place, tried)
        assert (tried.problems, tried.refused) == ([], 0), door


@pytest.mark.parametrize("command", ["train", pytest.param("import", marks=pytest.mark.slow)])
def test_real_processes_do_not_import_from_the_working_folder(tmp_path: Path, command: str) -> None:
    """The processes that whet itself starts, from a folder with a json.py and a torch.py."""
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    RUNS[MODULES](hostile, tmp_path / "canary")
    weights = tmp_path / "w.pt"
    torch.save({"w": torch.zeros(2)}, weights)
    shutil.copy(STARTER, tmp_path / "my_recipe.py")
    words = {
        "train": (str(tmp_path / "my_recipe.py"), "max_steps=2", "--run", str(tmp_path / "run")),
        "import": (str(weights), "--out", str(tmp_path / "out")),
    }[command]
    # Like the installed program, which does not import from the current folder.
    program = [sys.executable, "-P", "-m", "whet", command, *words]
    done = subprocess.run(program, cwd=hostile, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "canary").exists()
