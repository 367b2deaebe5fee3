"""What the docs say is true: the map shows the rooms, commands run, examples run."""

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import whet as package
from conftest import ROOT, Run

ROOMS = sorted(path.name for path in (ROOT / "src" / "whet").iterdir() if (path / "__init__.py").exists())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_maps_show_every_room_in_the_order_of_the_layers() -> None:
    house, _, _ = (ROOT / "docs" / "map.md").read_text().partition("Around the house")
    on_the_map = re.findall(r"^\| `(\w+)/` \|", house, re.MULTILINE)
    in_the_docstring = re.findall(r"^    (\w+)  +\w", package.__doc__ or "", re.MULTILINE)
    layers = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert layers is not None
    by_lint = [name for name in re.findall(r"\w+", layers[1]) if name in ROOMS]
    assert on_the_map == in_the_docstring == by_lint[::-1]
    assert sorted(on_the_map) == ROOMS


def _commands() -> list[str]:
    readme = (ROOT / "README.md").read_text()
    lines = re.findall(r"^\$ (whet .*?)(?:\s+#.*)?$", readme, re.MULTILINE)
    assert lines, "the README shows commands"
    return lines


@pytest.mark.parametrize("command", _commands())
def test_commands_of_the_readme_run(command: str, whet: Run) -> None:
    done = whet(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr


def test_python_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "micro_batch" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def _torch_free_modules() -> list[str]:
    rooms = ("base", "machine", "plan", "config", "run", "report", "cli", "recipes")
    walked = pkgutil.walk_packages(package.__path__, "whet.")
    return [found.name for found in walked if found.name.split(".")[1] in rooms]


@pytest.mark.parametrize("name", _torch_free_modules())
def test_examples_in_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
