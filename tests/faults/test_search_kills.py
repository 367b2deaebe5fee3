"""Killed search workers: no finished trial is lost or repeated, and trials continue."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from paths import SUPPORT
from postgres import postgres
from warm_python import Program, WarmPython
from whet.api.search import winning_args
from whet.hpo.storage import open_storage
from whet.hpo.study import DROPPED, RUN, counts
from whet.report.run_report import summarize
from whet.run.events import History
from whet.run.folder import open_run, run_folders
from whet.run.search_result import read_search

pytestmark = pytest.mark.torch

RUNNING, COMPLETE = optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.COMPLETE
RECIPE = SUPPORT / "searched_recipe.py"


class Workers:
    """`whet search` in separate processes that tests kill."""

    def __init__(self, root: Path, *words: str) -> None:
        self.root, self._words = root, words
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        cwd = cwd or self.root
        with (self.root / "said.txt").open("ab") as reported:
            worker = subprocess.Popen(
                [sys.executable, "-m", "whet", "search", str(RECIPE), *self._words, "--name", "s"],
                cwd=cwd,
                env={**os.environ, "WHET_HOME": str(self.root / "home"), "OMP_NUM_THREADS": "1"},
                stdout=reported,
                stderr=reported,
            )
        self.running.append(worker)
        return worker

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        self.running.remove(worker)

    def reported(self) -> str:
        return (self.root / "said.txt").read_text()[-3000:]

    def close(self) -> None:
        for worker in list(self.running):
            self.kill(worker)


@pytest.fixture
def workers(tmp_path: Path):
    made: list[Workers] = []

    def make(*words: str) -> Workers:
        made.append(Workers(tmp_path, *words))
        return made[-1]

    yield make
    for each in made:
        each.close()


def trials_of(url: str | None, folder: Path) -> list[optuna.trial.FrozenTrial]:
    with open_storage(url, folder=folder) as storage:
        return storage.get_all_trials(storage.get_study_id_from_name("s"))


def until(condition, *, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("trial-0000/checkpoints/step-*/manifest.json"))


def test_killed_and_stopped_search_resumes_prunes_and_marks_infeasible_trials(warm_python: WarmPython, tmp_path):
    huge = 4 * 10**14
    # In this order, the grid tries the worse of the feasible values last.
    space = [f"takes=[0,{huge}]", "is_worse=[true,false]"]
    words = ["lr=0.01", "pause=0.1", "checkpoint_steps=2", "--trials", "4", "--seeds", "1", "--sampler", "GridSampler"]
    words = [*space, *words, "--subset", "0.9", "--jobs", "1", "--name", "s"]

    def start() -> Program:
        env = {**os.environ, "WHET_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
        return warm_python.start("-m", "whet", "search", RECIPE, *words, cwd=tmp_path, env=env)

    folder = tmp_path / "runs" / "s"
    first = start()
    until(lambda: list(folder.glob("trial-*/checkpoints/step-*4/manifest.json")))
    first.send_signal(signal.SIGKILL)
    assert first.wait().returncode == -signal.SIGKILL
    second = start()
    until(lambda: list(folder.glob("trial-*/checkpoints/step-*6/manifest.json")))
    second.send_signal(signal.SIGTERM)
    stopped = second.wait(timeout=600)
    assert stopped.returncode == 143, stopped.stderr
    assert not [t for t in trials_of(None, folder) if t.state == RUNNING], "stopped trials are queued"
    done = start().wait(timeout=600)
    assert done.returncode == 0, done.stderr

    result = read_search(folder)
    assert len(result.trials) == 4
    big = [trial for trial in result.trials if trial.settings["takes"] == huge]
    assert [(trial.state, trial.value) for trial in big] == [("infeasible", None)] * 2
    assert all("out of memory" in trial.note for trial in big), "one while the model was built, one in the first step"
    good, worse = sorted((t for t in result.trials if t not in big), key=lambda t: t.settings["is_worse"])
    assert (good.state, good.steps) == ("complete", 9), "90 % of 40 rows in batches of 4"
    assert (worse.state, worse.steps) == ("pruned", 2), "ended after the second of nine evaluations"
    assert result.continued == 2
    assert result.winner is not None
    assert result.winner.number == good.number
    assert list(result.winner.values) == ["1"], "trained again with a new seed"
    runs = [Path(good.run or ""), folder / "seed-0000"]
    assert [open_run(run).config["seed"] for run in runs] == [0, 1]
    assert len({summarize(run).provenance.data for run in runs}) == 1, "the same rows for every seed"
    history = History(Path(good.run or ""))
    resumed = [event.step for event in history.events(kinds=("resume",))]
    assert len(resumed) == 2
    assert resumed[0] >= 4, "from a checkpoint after the kill"
    assert resumed[1] >= 6, "from where it stopped"
    assert not any(name.startswith("test_") for event in history.events(kinds=("eval",)) for name in event.fields)
    assert {"takes=0", "is_worse=false", "lr=0.01"} < set(winning_args("s", recipe=str(RECIPE), root=folder.parent))


@pytest.mark.slow
def test_two_machines_simulated_by_two_folders_share_one_database(workers, tmp_path):
    with postgres() as server:
        made = workers("lr=1e-4..1:log", "--trials", "8", "--seeds", "2", "--storage", server.url)
        places = [tmp_path / "one", tmp_path / "two"]
        for place in places:
            place.mkdir()
        both = [made.start(cwd=place) for place in places]
        assert [worker.wait(timeout=400) for worker in both] == [0, 0], made.reported()
        results = [read_search(place / "runs" / "s") for place in places]
        trials = trials_of(server.url, tmp_path)
    assert sum(map(counts, trials)) == 8
    assert len({t.params["lr"] for t in trials if counts(t)}) == 8, "a trial ran twice"
    assert results[0].trials == results[1].trials, "each lists all trials"
    assert results[0].candidates == results[1].candidates
    assert results[0].is_confirmed
    runs = [Path(t.run or "") for t in results[0].trials]
    assert {run.parents[2].name for run in runs} == {"one", "two"}, "both ran trials"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["journal", "postgresql"])
def test_thirty_kills_of_workers_in_each_storage(workers, tmp_path, where, report_count):
    if where == "journal":
        _kill_again_and_again(workers, tmp_path, None, report_count, restart=None)
        return
    with postgres() as server:

        def restart() -> None:
            server.stop()
            time.sleep(2)
            server.start()

        _kill_again_and_again(workers, tmp_path, server.url, report_count, restart=restart)


def _wait_somewhere(trial: optuna.trial.FrozenTrial, draw: random.Random) -> None:
    """Wait until a random moment of a trial: at its start, or after some of its five checkpoints."""
    saved = Path(trial.user_attrs[RUN]) / "checkpoints"
    goal, deadline = draw.choice((0, 0, 1, 2, 3, 4, 5)), time.monotonic() + 60
    while len(list(saved.glob("step-*/manifest.json"))) < goal and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(draw.uniform(0.0, 1.0))


def _kill_again_and_again(workers, tmp_path, url, report_count, *, restart) -> None:
    kills = int(os.environ.get("WHET_SEARCH_KILLS", "30"))
    trials = max(4, kills // 2)
    words = [
        "lr=1e-4..1:log",
        "pause=0.5",
        "checkpoint_steps=2",
        "keep_checkpoints=9",
        "--trials",
        str(trials),
        "--seeds",
        "0",
    ]
    made = workers(*words, "--pruner", "NopPruner", *(["--storage", url] if url else []))
    folder, draw = tmp_path / "runs" / "s", random.Random(7)
    made.start()
    # The second one joins an existing search.
    until(lambda: (folder / "search.json").exists())
    finished: dict[int, float] = {}
    done = 0
    while done < kills:
        made.running = [worker for worker in made.running if worker.poll() is None]
        while len(made.running) < 2:
            made.start()
        now = trials_of(url, folder)
        finished |= {t.number: t.value for t in now if t.state == COMPLETE}
        assert len(finished) < trials, f"all done after {done} kills"
        busy = {t.user_attrs.get("owner", {}).get("pid"): t for t in now if t.state == RUNNING and RUN in t.user_attrs}
        targets = [worker for worker in made.running if worker.pid in busy]
        if not targets:
            time.sleep(0.1)
            continue
        _wait_somewhere(busy[targets[0].pid], draw)
        if restart is not None and done == kills // 2:
            restart()
        made.kill(targets[0])
        done += 1
    made.start()
    for worker in list(made.running):
        assert worker.wait(timeout=600) == 0, made.reported()
    ended = trials_of(url, folder)
    states = {t.number: t.state for t in ended}
    assert not [n for n, state in states.items() if not state.is_finished()], "a trial is stuck"
    for number, value in finished.items():
        assert states[number] == COMPLETE
        assert ended[number].value == value, "a finished trial was lost"
    counted = [t for t in ended if counts(t)]
    assert len(counted) == trials
    assert all(t.state == COMPLETE for t in counted)
    assert len({t.user_attrs[RUN] for t in counted}) == trials, "a trial ran twice"
    resumed = [
        event.step for run in run_folders(folder) for event in History(run).events(kinds=("resume",)) if event.step > 0
    ]
    dropped = sum(DROPPED in t.user_attrs for t in ended)
    assert resumed, "no killed trial resumed from a checkpoint"
    report_count(f"{done} kills, {dropped} trials went on as others, {len(resumed)} times from a checkpoint")
