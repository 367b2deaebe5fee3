"""The programs and commands of README, "Getting started" and the tutorials run, in their order.

A block with a title is saved under that name, other blocks of Python are run, and so is each line that starts with `$`.
"""

import re
import shlex
from pathlib import Path

import pytest

from homes import new_home
from paths import ROOT, Run
from warm_python import WarmPython
from whet.cli import main
from whet.config.resolve import resolve_config
from whet.recipes.recipe import BUILT_IN, load_recipe

pytestmark = pytest.mark.torch

_BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Shortened to save time: the settings of a page are read first, as they are.
_SHORTER = {
    "train text": ("max_steps=6", "threads=1", "--no-measure", "--max-restarts=0"),
    "train chat": ("max_steps=3", "threads=1", "--no-measure", "--max-restarts=0"),
    "train hex": ("games=60", "max_steps=6", "threads=1", "--no-measure", "--max-restarts=0"),
    "arena hex": ("--games=4",),
    "prove": ("--kills=2", "--steps=12", "--budget=1"),
}
_SELF_PLAY = ("loop.games=40", "loop.gate_games=4", "loop.simulations=2")
_TUTORIALS = ("own-model", "text", "chat", "hex", "mac-to-cuda")
_PAGES = ["README.md", "docs/getting-started.md", *(f"docs/tutorials/{name}.md" for name in _TUTORIALS)]


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return language, title and text of the code blocks of a page."""
    return [(match[1], match[2] or "", match[3]) for match in _BLOCK.finditer((ROOT / page).read_text())]


def commands(page: str) -> list[list[str]]:
    lines = [line for language, _, text in blocks(page) if language == "console" for line in text.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


# README and the page about your own model train no recipe.
@pytest.mark.parametrize("page", [page for page in _PAGES if page not in ("README.md", "docs/tutorials/own-model.md")])
def test_settings_of_a_page_are_understood(page: str) -> None:
    """A key that does not exist, or a value that is not allowed, raises an error."""
    given = [words for program, *words in commands(page) if program == "whet" and words[0] in ("train", "plan")]
    trained = [words for words in given if words[1] in BUILT_IN]
    assert trained, "the page trains no recipe"
    for _, recipe, *words in trained:
        settings = [word for word in words if "=" in word]
        resolved = resolve_config(load_recipe(recipe).Config, settings)
        assert sorted(resolved.given) == sorted(word.partition("=")[0] for word in settings)


def test_recipes_of_the_readme_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHET_HOME", str(new_home(tmp_path / "whet-home")))
    table = re.findall(r"^\| `whet (train|init) (\S+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {what for verb, what in table if verb == "train"} == set(BUILT_IN)
    for verb, what in table:
        if verb == "init":
            assert main.run(["init", what]) == 0
        assert main.run(["plan", what, "--machine", "m2-air-8gb"]) == 0
        assert "micro_batch" in capfd.readouterr().out


def run_page(
    page: str, folder: Path, warm_whet: Run, warm_python: WarmPython, *, without: tuple[str, ...] = ()
) -> list[str]:
    """Run all of a page in a folder. Return what its commands printed."""
    outputs = []
    for language, title, text in blocks(page):
        if title:
            (folder / title).write_text(text)
        elif language == "python":
            done = warm_python.run("-c", text, cwd=folder)
            assert done.returncode == 0, done.stderr
        elif language == "console":
            for line in text.splitlines():
                program, *words = shlex.split(line.removeprefix("$ "), comments=True)
                if program in ("make", "pip") or words[0] in without:
                    continue
                done = warm_python.run(*words, cwd=folder) if program == "python" else warm_whet(*shorter(words))
                # A data report and a device check that find something set the exit code.
                allowed = (0, 1) if words[0] == "data" and words[1] == "text" else (0,)
                assert done.returncode in allowed, f"{line}\n{done.stdout}{done.stderr}"
                outputs.append(done.stdout)
    return outputs


def shorter(words: list[str]) -> list[str]:
    given = [*words, *_SHORTER.get(" ".join(words[:2]), _SHORTER.get(words[0], ()))]
    if "selfplay=True" in words:
        given = [word for word in given if word != "max_steps=6"] + list(_SELF_PLAY)
    # What is given twice is refused, so that the test's value replaces that of the page.
    last = {word.partition("=")[0]: number for number, word in enumerate(given) if "=" in word}
    return [word for number, word in enumerate(given) if "=" not in word or last[word.partition("=")[0]] == number]


# The commands of the other tutorials are tested with their recipes.
_IN_THE_GATE = ("README.md", "docs/getting-started.md", "docs/tutorials/own-model.md")


@pytest.mark.parametrize(
    "page", [page if page in _IN_THE_GATE else pytest.param(page, marks=pytest.mark.slow) for page in _PAGES]
)
def test_everything_on_a_page_runs(
    page: str, tmp_path: Path, whet: Run, warm_whet: Run, warm_python: WarmPython
) -> None:
    # The commands of the README are started as a user would.
    outputs = run_page(page, tmp_path, whet if page == "README.md" else warm_whet, warm_python, without=("prove",))
    assert len(outputs) >= 3
    if page == "README.md":
        assert (tmp_path / "runs" / "mine" / "run.json").exists()
    if page.endswith("own-model.md"):
        accuracy = re.search(r"accuracy ([\d.]+)", "".join(outputs))
        assert accuracy is not None
        assert float(accuracy[1]) > 0.9


def test_the_loop_of_the_readme_runs(tmp_path: Path, warm_python: WarmPython) -> None:
    (loop,) = [text for language, _, text in blocks("README.md") if language == "py"]
    given = """
import torch, whet
from torch import nn
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
loader, val = (torch.utils.data.DataLoader(data, batch_size=32) for _ in range(2))
"""
    done = warm_python.run("-c", given + loop, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"val_loss":' in (tmp_path / "runs" / "loop" / "events.jsonl").read_text()


@pytest.mark.slow
def test_the_training_of_the_first_tutorial_is_proved(tmp_path: Path, warm_whet: Run, warm_python: WarmPython) -> None:
    outputs = run_page("docs/tutorials/own-model.md", tmp_path, warm_whet, warm_python)
    assert any(output.startswith("proved") for output in outputs)
