"""Workers that are killed: no finished trial is lost, none is stuck, none is made twice, and trials go on."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from postgres import postgres
from whet.recipes.searching import final_words
from whet.run.events import History
from whet.run.folder import run_folders
from whet.run.search_result import read_search
from whet.trials.ledger import DROPPED, RUN, does_count
from whet.trials.storage import open_storage

RUNNING, COMPLETE = optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.COMPLETE
RECIPE = Path(__file__).parent / "searched.py"


class Workers:
    """`whet search` in processes of their own, to be killed."""

    def __init__(self, root: Path, *words: str) -> None:
        self.root, self._words = root, words
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        cwd = cwd or self.root
        with (self.root / "said.txt").open("ab") as said:
            worker = subprocess.Popen(
                [sys.executable, "-m", "whet", "search", str(RECIPE), *self._words, "--name", "s"],
                cwd=cwd,
                env={**os.environ, "WHET_HOME": str(self.root / "home"), "OMP_NUM_THREADS": "1"},
                stdout=said,
                stderr=said,
            )
        self.running.append(worker)
        return worker

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        self.running.remove(worker)

    def said(self) -> str:
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


def until(condition, *, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("trial-0000/checkpoints/step-*/manifest.json"))


def test_a_killed_search_goes_on_from_its_checkpoint_and_a_trial_without_memory_is_infeasible(workers, tmp_path):
    huge = 4 * 10**13
    space = f"hidden_size=[4,{huge}]"
    words = ["lr=0.01", "pause=0.1", "checkpoint_steps=2", "--trials", "2", "--seeds", "0", "--sampler", "GridSampler"]
    made = workers(space, *words, "--subset", "0.8")
    folder = tmp_path / "runs" / "s"
    # Whichever comes first by the grid: the one that can be trained is killed.
    first = made.start()
    until(lambda: list(folder.glob("trial-*/checkpoints/step-*4/manifest.json")))
    made.kill(first)
    assert made.start().wait(timeout=120) == 0, made.said()
    result = read_search(folder)
    by_size = {trial.settings["hidden_size"]: trial for trial in result.trials}
    assert len(result.trials) == 2
    assert by_size[4].state == "complete"
    assert by_size[4].steps == 8, "80 % of 40 rows in batches of 4"
    assert by_size[huge].state == "infeasible"
    assert "out of memory" in by_size[huge].words
    assert by_size[huge].value is None
    assert result.continued == 1
    assert result.winner is not None
    assert result.winner.number == by_size[4].number
    history = History(Path(by_size[4].run or ""))
    resumed = [event.step for event in history.events(kinds=("resume",))]
    assert resumed
    assert resumed[0] >= 4, "it went on from a checkpoint"
    assert not any(name.startswith("test_") for event in history.events(kinds=("eval",)) for name in event.fields)
    assert "hidden_size=4" in final_words("s", recipe=str(RECIPE), root=tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["journal", "postgresql"])
def test_thirty_kills_of_workers_in_each_storage(workers, tmp_path, where, tell):
    if where == "journal":
        _kill_again_and_again(workers, tmp_path, None, tell, restart=None)
        return
    with postgres() as server:

        def restart() -> None:
            server.stop()
            time.sleep(2)
            server.start()

        _kill_again_and_again(workers, tmp_path, server.url, tell, restart=restart)


def _kill_again_and_again(workers, tmp_path, url, tell, *, restart) -> None:
    kills = int(os.environ.get("WHET_SEARCH_KILLS", "30"))
    trials = max(4, kills)
    words = ["lr=1e-4..1:log", "pause=0.5", "checkpoint_steps=2", "--trials", str(trials), "--seeds", "0"]
    made = workers(*words, "--pruner", "NopPruner", *(["--storage", url] if url else []))
    folder, draw = tmp_path / "runs" / "s", random.Random(7)
    made.start()
    # The second joins a search that is there.
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
        # Who has just begun a trial is killed somewhere between its first and its last instant.
        busy = {t.user_attrs.get("owner", {}).get("pid") for t in now if t.state == RUNNING and RUN in t.user_attrs}
        targets = [worker for worker in made.running if worker.pid in busy]
        if not targets:
            time.sleep(0.1)
            continue
        time.sleep(draw.uniform(0.0, 12.0))
        if restart is not None and done == kills // 2:
            restart()
        made.kill(targets[0])
        done += 1
    made.start()
    for worker in list(made.running):
        assert worker.wait(timeout=600) == 0, made.said()
    ended = trials_of(url, folder)
    states = {t.number: t.state for t in ended}
    assert not [n for n, state in states.items() if not state.is_finished()], "a trial is stuck"
    for number, value in finished.items():
        assert states[number] == COMPLETE
        assert ended[number].value == value, "a finished trial was lost"
    counted = [t for t in ended if does_count(t)]
    assert len(counted) == trials
    assert all(t.state == COMPLETE for t in counted)
    assert len({t.user_attrs[RUN] for t in counted}) == trials, "a trial was made twice"
    resumed = [
        event.step for run in run_folders(folder) for event in History(run).events(kinds=("resume",)) if event.step > 0
    ]
    dropped = sum(DROPPED in t.user_attrs for t in ended)
    assert resumed, "no killed trial went on from a checkpoint"
    tell(f"{done} kills, {dropped} trials went on as others, {len(resumed)} times from a checkpoint")
