"""The commands of docs/from-the-guides.md run, in their order, on small data."""

import json
import re
import shlex
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import pytest

from homes import new_home
from paths import ROOT, Run
from tiny_bert import write_tiny_bert
from warm_python import WarmPython
from whet.cli import main
from whet.config.resolve import resolve_config
from whet.machine import probe
from whet.machine.facts import ProbeResult
from whet.recipes.recipe import BUILT_IN, load_recipe

pytestmark = pytest.mark.torch

PAGE = (ROOT / "docs" / "from-the-guides.md").read_text()
INTRODUCTION, *GUIDES = re.split(r'^## (?=")', PAGE, flags=re.MULTILINE)
_COMMAND = re.compile(r"`((?:[A-Z_]+=\S+ )?whet [^`]+)`")
# They wait for somebody or serve a page.
_INTERACTIVE = ("watch", "play", "chat")
_SHORTER = {
    "train": ("max_steps=3", "threads=1", "--no-measure"),
    "search": ("max_steps=4", "threads=1"),
    "bench": ("--budget=15",),
    "plan": ("--budget=10",),
    "prove": ("--steps=8", "--budget=1"),
    "doctor": ("--budget=4",),
}
# Small models, so that the commands take seconds.
_SMALLER = {
    "chat": ("arch.hidden_size=32", "arch.num_heads=2"),
    "hex": ("arch.width=8", "arch.depth=1"),
}
_TITLES = [guide.partition("\n")[0] for guide in GUIDES]


def commands(guide: str) -> list[tuple[list[str], dict[str, str], bool]]:
    """Return words, variables and whether the page calls it refused, of each command in the right column."""
    found = []
    for line in (line for line in guide.splitlines() if line.startswith("|")):
        for match in _COMMAND.finditer(line):
            words = shlex.split(match[1])
            variables = dict(word.split("=") for word in words[: words.index("whet")])
            found.append((words[words.index("whet") + 1 :], variables, "refused" in line))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page names."""
    rows = "".join(f"text number {n} is {kind},{kind}\n" for n in range(200) for kind in ("good", "bad"))
    for name in ("reviews.csv", "citations.csv"):
        (tmp_path / name).write_text(f"text,label\n{rows}")
    chats = [
        {
            "conversations": [
                {"from": "human", "value": f"Is {n} even?"},
                {"from": "gpt", "value": ["yes", "no"][n % 2]},
            ]
        }
        for n in range(240)
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "conversations.json").write_text(json.dumps(chats))
    # The first player goes down column c of a 5x5 board, whatever the second player does.
    answers = product(("d1", "a4", "e1"), ("d2", "a1", "e5", "b2"), ("a2", "e4", "b3", "d3"), ("a3", "e3", "b4", "e2"))
    games = [f"#5,c1{a}c2{b}c3{c}c4{d}c5" for a, b, c, d in answers]
    (tmp_path / "games.trmph").write_text("\n".join(games))
    (tmp_path / "train.py").write_text(script())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHET_HOME", str(new_home(tmp_path / "whet-home")))
    return tmp_path


@pytest.fixture(scope="module")
def this_machine() -> ProbeResult:
    """What a command finds out about this machine: importing torch once more takes seconds."""
    return probe.probe()


def write_model(guide: str) -> None:
    """Write a small model in the place of SciBERT, if the guide needs one."""
    if "model=allenai/" in guide:
        write_tiny_bert(Path("allenai/scibert_scivocab_uncased"))


def script() -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```", INTRODUCTION, re.MULTILINE | re.DOTALL)
    return block


def test_every_guide_has_its_commands() -> None:
    assert len(GUIDES) == 5
    assert all(len(commands(guide)) >= 5 for guide in GUIDES)
    for guide in GUIDES:
        assert "| the guide | with whet |" in guide


@pytest.mark.parametrize("guide", GUIDES, ids=_TITLES)
def test_plans_run_and_settings_are_understood(
    guide: str,
    folder: Path,
    this_machine: ProbeResult,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_model(guide)
    monkeypatch.setattr(probe, "probe", lambda: this_machine)
    for words, variables, is_refused in commands(guide):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            if words[0] == "data" or (words[0] in ("plan", "probe") and "--measure" not in words):
                code = main.run(words)
                assert code == (2 if is_refused else 0), f"{words}\n{capfd.readouterr().err}"
                continue
        settings = [word for before, word in pairwise(words) if "=" in word and not before.startswith("--")]
        if words[1:] and words[1] in BUILT_IN and words[0] in ("train", "bench", "plan", "prove"):
            named = Path(words[words.index("--config-name") + 1]) if "--config-name" in words else None
            resolve_config(load_recipe(words[1]).Config, settings, file=named)
        assert main.run([words[0], "--help"]) == 0
        options = capfd.readouterr().out
        assert all(word in options for word in words if word.startswith("--")), words


def test_the_loop_of_the_page_trains(folder: Path, warm_python: WarmPython) -> None:
    done = warm_python.run("train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert main.run(["report", "runs/mine"]) == 0
    # The variables that the page tells to unset are those that whet reads.
    unset = set(re.findall(r"[A-Z_]{8,}", "".join(re.findall(r"^\$ unset .*$", INTRODUCTION, re.MULTILINE))))
    assert {"PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "OMP_NUM_THREADS"} <= unset


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES, ids=_TITLES)
def test_all_commands_run_in_their_order(
    guide: str, folder: Path, warm_whet: Run, warm_python: WarmPython, report_count: Callable[[str], None]
) -> None:
    if "train.py" in guide:
        assert warm_python.run("train.py", cwd=folder).returncode == 0
    write_model(guide)
    num_run = 0
    for words, variables, is_refused in commands(guide):
        if words[0] == "plan" and "--measure" not in words:
            # `test_plans_run_and_settings_are_understood` runs them.
            continue
        done = warm_whet(*shortened(words), **variables)
        # Findings of a device and unstable times set the exit code.
        allowed = (2,) if is_refused else (0, 1) if words[0] in ("doctor", "bench") else (0,)
        assert done.returncode in allowed, f"{words}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        num_run += 1
    report_count(f"{num_run} commands")


def shortened(words: list[str]) -> list[str]:
    """Return a command that takes seconds: few steps, a small model, little time to measure."""
    if words[0] in _INTERACTIVE:
        return [*words, "--help"]
    keys = {word.partition("=")[0] for word in words}
    smaller = _SMALLER.get(words[1], ()) if words[0] != "data" and len(words) > 1 else ()
    more = [setting for setting in smaller if setting.partition("=")[0] not in keys]
    if words[0] == "prove" and words[1] in BUILT_IN:
        more.append("threads=1")
    return [*words, *more, *_SHORTER.get(words[0], ())]
