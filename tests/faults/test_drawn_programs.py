"""Programs drawn at random, stopped once and killed once: what is registered is restored, what is hidden is named."""

import json
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import drawn_programs
from fault_runs import ALL, BOUNDED
from fork_server import ForkServer
from whet.run.events import read_events

pytestmark = pytest.mark.torch

NUM_PROGRAMS = {"bounded": 2, "all": 300}
NUM_HIDDEN = {"bounded": 5, "all": 60}
CUSTOM_LOOP = "session state restored exactly; your own variables only if registered"


def run_program(server: ForkServer, folder: Path, seed: int, kind: str, name: str, stop: int, number: int) -> Path:
    """Run a program until it ends or ends itself. Return where it writes its digest."""
    out = folder / f"{name}.json"
    process = server.start(Path(drawn_programs.__file__), seed, kind, folder / name, stop, number, out)
    code, errors = process.wait()
    is_expected = code in (0, 130) if number != signal.SIGKILL or not stop else code == -signal.SIGKILL
    assert is_expected, f"{drawn_programs.draw_program(seed, hidden=kind == 'hidden')}\n{errors}"
    return out


def exactness(run: Path) -> str:
    return str([*read_events(run, kinds=("resume",))][-1].get("exactness"))


def interrupted(server: ForkServer, folder: Path, seed: int, kind: str, number: int) -> tuple[dict[str, str], str]:
    """Interrupt a program at a random step, resume it, and return its digest and what the resume claimed."""
    stop = random.Random(f"{seed} {number}").randint(4, drawn_programs.STEPS - 2)
    name = signal.Signals(number).name
    run_program(server, folder, seed, kind, name, stop, number)
    out = run_program(server, folder, seed, kind, name, 0, number)
    return json.loads(out.read_text()), exactness(folder / name)


@pytest.mark.parametrize("size", [BOUNDED, ALL])
def test_programs_with_registered_state_resume_exactly(
    fork_server: ForkServer, tmp_path: Path, report_count: Callable[[str], None], size: str
) -> None:
    problems, features = [], Counter()
    for seed in range(NUM_PROGRAMS[size]):
        program = drawn_programs.draw_program(seed)
        features.update([*program.modules, *program.changes, program.optimizer, program.schedule, program.data])
        folder = tmp_path / str(seed)
        folder.mkdir()
        claim = CUSTOM_LOOP if program.is_loop else "bit-exact"
        try:
            whole = json.loads(run_program(fork_server, folder, seed, "known", "whole", 0, 0).read_text())
        except AssertionError as error:
            problems.append(str(error)[-1500:])
            continue
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                digest, said = interrupted(fork_server, folder, seed, "known", number)
            except AssertionError as error:
                problems.append(str(error)[-1500:])
                continue
            different = [name for name in {**whole, **digest} if whole.get(name) != digest.get(name)]
            if different or said != claim:
                problems.append(f"{program}: {signal.Signals(number).name}: {said!r}, different: {different}")
    report_count(f"{NUM_PROGRAMS[size]} programs, {len(features)} features, each stopped and killed, all equal")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("size", [BOUNDED, ALL])
def test_programs_with_hidden_state_are_not_called_bit_exact(
    fork_server: ForkServer, tmp_path: Path, report_count: Callable[[str], None], size: str
) -> None:
    problems = []
    for seed in range(NUM_HIDDEN[size]):
        program = drawn_programs.draw_program(seed, hidden=True)
        folder = tmp_path / str(seed)
        folder.mkdir()
        _, said = interrupted(fork_server, folder, seed, "hidden", signal.SIGKILL if seed % 2 else signal.SIGINT)
        if said == "bit-exact":
            problems.append(f"{program.hidden}: {said!r} ({program})")
    report_count(f"{NUM_HIDDEN[size]} programs with {len(drawn_programs.HIDDEN)} kinds of hidden state, all named")
    assert not problems, "\n".join(problems)
