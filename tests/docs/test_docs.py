"""The docs are correct: the package list is complete, commands run, examples run."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import whet as package
from paths import ROOT, Run
from warm_python import WarmPython
from whet.cli import main
from whet.config.resolve import resolve_config
from whet.recipes.recipe import load_recipe

pytestmark = pytest.mark.torch

PACKAGES = sorted(path.name for path in (ROOT / "src" / "whet").iterdir() if (path / "__init__.py").exists())
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_architecture_page_lists_every_package_in_layer_order() -> None:
    page, _, _ = (ROOT / "docs" / "architecture.md").read_text().partition("## Around the packages")
    on_the_page = re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE)
    in_the_docstring = re.findall(r"^    (\w+)  +\w", package.__doc__ or "", re.MULTILINE)
    layers = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert layers is not None
    by_lint = [name for name in re.findall(r"\w+", layers[1]) if name in PACKAGES]
    assert on_the_page == in_the_docstring == by_lint[::-1]
    assert sorted(on_the_page) == PACKAGES


_RUNNABLE = [
    # examples/callback.py runs in the gate.
    pytest.param("docs/callbacks.md", marks=pytest.mark.slow),
    pytest.param("docs/transformers.md", marks=pytest.mark.slow),
    *(f"docs/{name}.md" for name in ("data", "goals", "hex", "measure", "precision")),
]


@pytest.mark.parametrize("page", _RUNNABLE)
def test_python_of_a_page_runs(page: str, tmp_path: Path, warm_python: WarmPython) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        done = warm_python.run("-c", block, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_python_of_the_page_about_own_loops_runs_as_one_program(tmp_path: Path, warm_python: WarmPython) -> None:
    page = (ROOT / "docs" / "own-loops.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    done = warm_python.run("-c", "\n".join(blocks), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Progress(step=16" in done.stdout
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"own", "gan", "manual", "teacher"}


@pytest.mark.slow
def test_commands_of_the_python_page_run_in_their_order(whet: Run, warm_python: WarmPython, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(block)
    np.save(tmp_path / "inputs.npy", np.zeros((5, 8), dtype=np.float32))
    commands = [shlex.split(command) for command in re.findall(r"^\$ (.*)$", page, re.MULTILINE)]
    assert len(commands) == 9
    for program, *words in commands:
        shorter = {"prove": ["--kills=2", "--steps=12", "--budget=1"], "bench": ["--budget=10"]}.get(words[0], [])
        done = warm_python.run(*words, cwd=tmp_path) if program == "python" else whet(*words, *shorter)
        # A bench on a busy machine may find that its times are not steady.
        assert done.returncode == 0, f"{words}\n{done.stderr}"
    assert np.load(tmp_path / "predictions.npy").shape == (5, 3)


def test_each_command_of_the_reference_is_named_as_it_is_typed() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    usages = re.findall(r"^### (whet [\w ]+)\n\n```text\nUsage: (.*?) \[OPTIONS\]", page, re.MULTILINE)
    assert len(usages) == len(main.COMMANDS)
    assert [usage for _, usage in usages] == [name for name, _ in usages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def _troubles() -> list[list[str]]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return [shlex.split(command)[1:] for command in re.findall(r"^\$ (whet .*)$", page, re.MULTILINE)]


def test_each_question_of_the_troubleshooting_page_has_a_command_that_is_understood(
    capfd: pytest.CaptureFixture[str],
) -> None:
    commands = _troubles()
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert len(sections) >= 6
    assert all("$ whet " in section for section in sections)
    for words in commands:
        if words[0] == "plan" and "--machine" in words:
            # Without torch and without this machine: these really run.
            assert main.run(words) == 0, words
            assert words[-1] in capfd.readouterr().out
        elif words[0] == "train":
            resolve_config(load_recipe(words[1]).Config, [word for word in words[2:] if "=" in word])
        else:
            assert main.run([words[0], "--help"]) == 0


@pytest.mark.slow
def test_commands_of_the_troubleshooting_page_run_in_their_order(whet: Run, tmp_path: Path) -> None:
    rows = "".join(f"text number {n} is {kind},{kind}\n" for n in range(40) for kind in ("good", "bad"))
    (tmp_path / "reviews.csv").write_text(f"text,label\n{rows}")
    for words in _troubles():
        shorter = ["max_steps=3", "threads=1", "--no-measure"] if words[0] == "train" else []
        shorter = ["--budget=30"] if "--measure" in words or words[0] == "bench" else shorter
        shorter = ["--budget=8", "--device=cpu"] if words[0] == "doctor" else shorter
        done = whet(*words, *shorter)
        # Findings of a data report, faults of a device and unstable times set the exit code.
        may_find = words[0] in ("data", "doctor", "bench")
        assert done.returncode in ((0, 1) if may_find else (0,)), f"{words}\n{done.stderr}"
        assert "Traceback" not in done.stderr
