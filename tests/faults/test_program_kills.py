"""kill -9 at random instants of programs drawn at random: nothing saved is lost, torn or different."""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import drawn_programs
from fault_runs import counts, published
from fork_server import ForkServer
from whet.run.events import read_events

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SEED = 20261118
KILLS, MOST_KILLS_PER_RUN = 800, 8
"""`whet prove` of the recipes adds the kills of trainings that come from the command line."""
FIRST_PROGRAM = 1000
"""Other programs than those of test_drawn_programs.py."""


def start(server: ForkServer, seed: int, folder: Path, name: str) -> tuple[object, Path]:
    out = folder / f"{name}.json"
    return server.start(Path(drawn_programs.__file__), seed, "known", folder / name, 0, 0, out), out


def test_random_kills_of_drawn_programs(
    fork_server: ForkServer, tmp_path: Path, report_count: Callable[[str], None]
) -> None:
    draw = random.Random(SEED)
    kills = programs = resumed = lost = torn = 0
    problems: list[str] = []
    while kills < KILLS:
        seed = FIRST_PROGRAM + programs
        programs += 1
        folder = tmp_path / str(seed)
        folder.mkdir()
        begin = time.monotonic()
        life, out = start(fork_server, seed, folder, "whole")
        ended = life.wait()
        assert ended.code == 0, f"{drawn_programs.draw_program(seed)}\n{ended.errors}"
        seconds, whole = time.monotonic() - begin, json.loads(out.read_text())
        run, newest = folder / "killed", 0
        for _ in range(min(MOST_KILLS_PER_RUN, KILLS - kills)):
            life, out = start(fork_server, seed, folder, "killed")
            time.sleep(draw.uniform(0, 0.9 * seconds))
            life.send(signal.SIGKILL)
            ended = life.wait()
            if ended.code == 0:
                break
            if ended.code != -signal.SIGKILL:
                problems.append(f"{seed}: {ended.errors[-1500:]}")
                break
            kills += 1
            steps, damaged = published(run)
            torn += len(damaged)
            # A checkpoint that was there after a kill is there after the next, or a newer one is.
            lost += max(steps, default=0) < newest
            newest = max(steps, default=0)
        if not out.exists():
            life, out = start(fork_server, seed, folder, "killed")
            ended = life.wait()
            if ended.code != 0:
                problems.append(f"{drawn_programs.draw_program(seed)}\n{ended.errors[-1500:]}")
                continue
        digest = json.loads(out.read_text())
        different = [name for name in {**whole, **digest} if whole.get(name) != digest.get(name)]
        claims = [str(event.get("exactness")) for event in read_events(run, kinds=("resume",))]
        resumed += len(claims)
        if different or any("not " in claim for claim in claims):
            problems.append(f"{drawn_programs.draw_program(seed)}: {claims}, different: {different}")
    totals = counts(kills=kills, programs=programs, resumed=resumed, lost=lost, torn=torn, different=len(problems))
    report_count(totals)
    assert not problems, "\n".join(problems)
    assert lost == torn == 0
    # Without resumes the test would prove nothing.
    assert resumed >= 0.5 * kills
