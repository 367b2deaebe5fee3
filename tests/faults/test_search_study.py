"""The study of a search with processes that die or race: no trial is lost, repeated or superfluous."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from threading import Event

import optuna
import pytest
from optuna.trial import TrialState

from paths import SUPPORT
from postgres import postgres
from whet.api.search import prepare_search, run_search, search
from whet.base.errors import UsageError, WhetError
from whet.base.statistics import mean_interval
from whet.hpo import results
from whet.hpo.results import collect_results
from whet.hpo.samplers import make_pruner
from whet.hpo.storage import JOURNAL_FILE, open_storage, without_password
from whet.hpo.study import (
    DROPPED,
    DUPLICATE,
    OWNER_DIED,
    RUN,
    STOPPED,
    TASK,
    DeadOwnerDetector,
    SearchStudy,
    TrialOwner,
    counts,
    this_process,
)
from whet.hpo.trial_process import DIVERGED, OUT_OF_MEMORY, TrialExit
from whet.hpo.worker import FinishedTrial, TrialTask, WorkerConfig, run_worker
from whet.report.search_report import render_search

pytestmark = pytest.mark.torch

SPACE = {"x": optuna.distributions.FloatDistribution(0, 1)}

TAKES = """
import sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}, {support!r}]
from test_search_study import open_study
from whet.hpo.storage import open_storage
with open_storage({url!r}, folder=Path({folder!r})) as storage:
    study = open_study(storage)
    for _ in range({count}):
        claimed = study.claim(max_trials={most})
        if claimed is None:
            break
        study.set_attribute(claimed.number, "run", "a folder")
        print(claimed.number, flush=True)
        if {finishes}:
            study.finish(claimed, state="complete", value=1.0)
    time.sleep({sleeps})
"""


def open_study(storage, name: str = "s", *, pruner=None) -> SearchStudy:
    return SearchStudy(
        storage,
        name,
        is_higher_better=True,
        distributions=SPACE,
        sampler=lambda number: optuna.samplers.RandomSampler(seed=number),
        pruner=pruner or optuna.pruners.NopPruner(),
    )


def stopped() -> Event:
    """A config for a search that must be refused before it trains."""
    event = Event()
    event.set()
    return event


def process(folder: Path, url: str | None, *, count: int = 1, most: int = 10, finishes: bool = False, sleeps: int = 60):
    words = {"count": count, "most": most, "finishes": finishes, "sleeps": sleeps}
    code = TAKES.format(tests=str(Path(__file__).parent), support=str(SUPPORT), url=url, folder=str(folder), **words)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def killed(folder: Path, url: str | None) -> int:
    """Start a process that claims a trial and is killed. Return the number of the trial."""
    with process(folder, url) as taker:
        assert taker.stdout is not None
        number = int(taker.stdout.readline())
        taker.kill()
    return number


def check_a_killed_trial_is_resumed(folder: Path, url: str | None) -> None:
    with open_storage(url, folder=folder) as storage:
        study = open_study(storage)
        number = killed(folder, url)
        before = study.trials()[number]
        assert before.state == TrialState.RUNNING
        claimed = study.claim(max_trials=1)
        assert claimed is not None, "the requested trial is not run"
        assert claimed.run == "a folder", "it resumes in the same run"
        assert claimed.trial.params == before.params
        assert not counts(study.trials()[number])
        assert study.claim(max_trials=1) is None, "one trial was requested, and it is running"
        assert study.finish(claimed, state="complete", value=0.5)
        assert not study.finish(claimed, state="failed"), "finished trials stay finished"
        assert [t.value for t in study.trials() if counts(t)] == [0.5]


def check_racing_processes_make_no_trial_twice(folder: Path, url: str | None) -> None:
    racers = [process(folder, url, count=20, most=7, finishes=True, sleeps=0) for _ in range(2)]
    logged = [int(word) for racer in racers for word in racer.communicate(timeout=600)[0].split()]
    assert sorted(logged) == sorted(set(logged))
    assert len(logged) == 7
    with open_storage(url, folder=folder) as storage:
        trials = open_study(storage).trials()
    assert sum(map(counts, trials)) == 7
    assert all(t.state == TrialState.COMPLETE for t in trials if counts(t))


def test_killed_trial_is_continued_in_a_journal(tmp_path):
    check_a_killed_trial_is_resumed(tmp_path, None)


def test_racing_processes_claim_each_trial_once_in_a_journal(tmp_path):
    check_racing_processes_make_no_trial_twice(tmp_path, None)


@pytest.mark.slow
def test_postgresql_keeps_the_same_promises_and_may_be_restarted(tmp_path):
    with postgres() as server:
        # An empty database: both create its tables at the same time.
        check_racing_processes_make_no_trial_twice(tmp_path, server.url)
        with open_storage(server.url, folder=tmp_path) as storage:
            optuna.delete_study(study_name="s", storage=storage)
        check_a_killed_trial_is_resumed(tmp_path, server.url)
        with open_storage(server.url, folder=tmp_path) as storage:
            study = open_study(storage)
            claimed = study.claim(max_trials=6)
            assert claimed is not None
            server.stop()
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(study.finish, claimed, state="complete", value=0.25)
                server.start()
                assert done.result(timeout=600)
            assert study.trials()[claimed.number].value == 0.25


def test_death_between_marking_and_enqueueing_loses_no_trial(tmp_path):
    with open_storage(None, folder=tmp_path) as storage:
        study = open_study(storage)
        claimed = study.claim(max_trials=3)
        assert claimed is not None
        study._drop(claimed.number, OWNER_DIED)
        assert study.recover() == 0
        waiting = [t for t in study.trials() if t.state == TrialState.WAITING]
        assert [t.user_attrs[TASK] for t in waiting] == [f"continues {claimed.number}"]
        # Another process did the same at the same moment: the later one is dropped.
        study._enqueue_continuation(study.trials()[claimed.number])
        first, second = study.claim(max_trials=1), study.claim(max_trials=1)
        assert first is not None
        assert second is None
        assert [t.user_attrs.get(DROPPED) for t in study.trials()][-1] == DUPLICATE


def test_overtaken_worker_drops_its_trial(tmp_path, monkeypatch):
    with open_storage(None, folder=tmp_path) as storage:
        slow, quick = open_study(storage), open_study(storage)
        make = storage.create_new_trial

        def overtaken(*arguments, **options):
            monkeypatch.setattr(storage, "create_new_trial", make)
            assert quick.claim(max_trials=1) is not None
            return make(*arguments, **options)

        monkeypatch.setattr(storage, "create_new_trial", overtaken)
        assert slow.claim(max_trials=1) is None
        assert sum(map(counts, slow.trials())) == 1


def test_torn_line_at_the_end_of_a_journal_is_removed(tmp_path):
    with open_storage(None, folder=tmp_path) as storage:
        assert open_study(storage).claim(max_trials=3) is not None
    with (tmp_path / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"op_code": 4, "study_')
    with open_storage(None, folder=tmp_path) as storage:
        study = open_study(storage)
        assert study.claim(max_trials=3) is not None
    with open_storage(None, folder=tmp_path) as storage:
        assert len(open_study(storage).trials()) == 2


def test_silence_of_another_machine_with_a_simulated_clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("whet.hpo.study.time.monotonic", lambda: clock[0])
    other = {"owner": TrialOwner(host="elsewhere", pid=1, started=0.0).as_json(), "heartbeat": 1}
    silence = DeadOwnerDetector()
    assert not silence.is_dead(0, other)
    clock[0] = 59.0
    assert not silence.is_dead(0, other)
    assert not silence.is_dead(0, {**other, "heartbeat": 2})
    clock[0] = 118.0
    assert not silence.is_dead(0, {**other, "heartbeat": 2})
    clock[0] = 120.0
    assert silence.is_dead(0, {**other, "heartbeat": 2})
    reused = this_process().model_copy(update={"started": 1.0})
    assert silence.is_dead(1, {"owner": reused.as_json()}), "the pid belongs to another process now"


@pytest.mark.parametrize("url", ["", "x", "mysql://h/d", "postgresql", "sqlite:///x.db", "journal:no/x", "journal:."])
def test_invalid_storage_url_is_rejected_before_anything_is_written(tmp_path, url):
    with pytest.raises(UsageError):
        search("text", ["lr=1e-4..1e-3"], name="s", root=tmp_path / "runs", storage=url, stop=stopped())
    assert not list(tmp_path.iterdir())


def test_search_with_trials_in_another_storage_is_rejected(tmp_path):
    asked = prepare_search("text", ["lr=1e-4..1e-3"], name="s", root=tmp_path)
    stop = stopped()
    first, second = (run_search(asked, trials=1, stop=stop) for _ in range(2))
    assert second.seconds > first.seconds > 0, "all sessions count"
    with pytest.raises(UsageError, match="not in that storage"):
        run_search(asked, trials=1, stop=stop, storage=f"journal:{tmp_path}/trials.log")
    (tmp_path / "s" / "journal.log").write_bytes(b"xx\n{}\n")
    with pytest.raises(WhetError, match="is damaged"):
        run_search(asked, trials=1, stop=stop)
    (tmp_path / "s" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="contains a run"):
        run_search(asked, trials=1, stop=stop)


def test_shown_storage_url_has_no_password():
    assert without_password("postgresql+psycopg://me:secret@host/db") == "postgresql+psycopg://me:***@host/db"
    assert (
        without_password("postgresql://host/db?user=me&password=secret") == "postgresql://host/db?user=me&password=***"
    )


def test_mean_intervals_over_seeds():
    assert mean_interval([0.5]) is None
    low, high = mean_interval([0.8, 0.82, 0.84]) or (0, 0)
    assert low == pytest.approx(0.82 - 4.303 * 0.02 / 3**0.5)
    assert high == pytest.approx(0.82 + 4.303 * 0.02 / 3**0.5)
    # Student's t for 30, 60 and 120 degrees of freedom, from any table.
    for freedom, t in ((30, 2.0423), (60, 2.0003), (120, 1.9799)):
        values = [float(number) for number in range(freedom + 1)]
        low, high = mean_interval(values) or (0, 0)
        assert (high - low) / 2 / stdev(values) * (freedom + 1) ** 0.5 == pytest.approx(t, abs=2e-4)
    assert RUN == "run"


def test_candidate_that_diverges_with_a_seed_ranks_last(tmp_path):
    question = prepare_search("text", ["lr=1e-4..1e-3"], name="s", root=tmp_path).config
    lr, numbers = {"lr": optuna.distributions.FloatDistribution(1e-4, 1e-3)}, results.seed_distributions()

    def made(parameters, distributions, value):
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        return optuna.create_trial(state=state, params=parameters, distributions=distributions, value=value)

    with open_storage(None, folder=tmp_path) as storage:
        study, confirming = open_study(storage), open_study(storage, "s seeds")
        study.study.add_trials([made({"lr": 1e-3}, lr, 0.9), made({"lr": 5e-4}, lr, 0.8)])
        actual = {0: (0.95, None, 0.93), 1: (0.8, 0.81, 0.82)}
        confirming.study.add_trials(
            made({"trial": trial, "seed": seed}, numbers, value)
            for trial, values in actual.items()
            for seed, value in enumerate(values, 1)
        )
        result = collect_results(question, study, confirming, storage="", seconds=0.0)
    assert [(c.number, c.lost) for c in result.candidates] == [(1, 0), (0, 1)]
    assert result.is_confirmed, "seeds without a value do not block the search"
    assert "no value with 1 other seed" in render_search(result)


def test_stopped_trial_waits_with_its_settings(tmp_path):
    question = prepare_search("text", ["lr=1e-4..1e-3"], name="s", root=tmp_path).config
    with open_storage(None, folder=tmp_path) as storage:
        study = open_study(storage)
        claimed = study.claim(max_trials=1)
        assert claimed is not None
        study.give_up(claimed.number, STOPPED)
        result = collect_results(question, study, open_study(storage, "s seeds"), storage="", seconds=0.0)
        assert [(t.state, t.settings) for t in result.trials] == [("waiting", claimed.trial.params)]
        assert result.continued == 0
        study.claim(max_trials=1)
        assert collect_results(question, study, study, storage="", seconds=0.0).continued == 1


def test_damaged_run_folder_fails_one_trial_only(tmp_path, monkeypatch):
    (tmp_path / "trial-0").mkdir()
    (tmp_path / "trial-0" / "run.json").write_text("half")
    reported: list[FinishedTrial] = []
    with open_storage(None, folder=tmp_path) as storage:
        run_worker(
            open_study(storage),
            simulated_work(tmp_path, monkeypatch, [TrialExit(code=143, was_pruned=True)], reported=reported),
            max_trials=2,
        )
    assert [(ended.number, ended.state) for ended in reported] == [(0, "failed"), (1, "pruned")]
    assert "run.json is damaged" in reported[0].message


def simulated_work(folder: Path, monkeypatch, lives: list[TrialExit], *, reported: list[FinishedTrial]) -> WorkerConfig:
    """A worker whose trial processes are simulated: each ends like the next entry of `lives`."""
    coming = iter(lives)
    monkeypatch.setattr("whet.hpo.worker.run_trial_process", lambda *_, **__: next(coming))
    return WorkerConfig(
        target="nobody:nothing",
        goal="score",
        machine="simulated",
        prepare=lambda claimed: TrialTask(arguments={}, run=folder / f"trial-{claimed.number}"),
        should_stop=lambda: False,
        on_finished=reported.append,
    )


def test_end_states_of_trials_with_simulated_processes(tmp_path, monkeypatch):
    kill = TrialExit(code=-9)
    lives = [
        TrialExit(code=OUT_OF_MEMORY, failure="MPS backend out of memory"),
        *[kill] * 4,
        TrialExit(code=DIVERGED, failure="the loss is not a number"),
        TrialExit(code=143, was_pruned=True),
        TrialExit(code=1, failure="ValueError: yours"),
        TrialExit(code=0),
    ]
    reported: list[FinishedTrial] = []
    with open_storage(None, folder=tmp_path) as storage:
        study = open_study(storage)
        run_worker(study, simulated_work(tmp_path, monkeypatch, lives, reported=reported), max_trials=6)
        trials = study.trials()
    assert [ended.state for ended in reported] == ["infeasible", "infeasible", "pruned", "pruned", "failed", "failed"]
    assert reported[0].message == "out of memory: MPS backend out of memory"
    assert "killed 4 times" in reported[1].message
    assert reported[5].message == "score is None", "a run without the goal has no value"
    assert [t.state.name for t in trials] == ["PRUNED"] * 4 + ["FAIL"] * 2
    assert [bool(t.constraints) for t in trials] == [True] * 2 + [False] * 4, "infeasible, not bad"


def test_stops_change_neither_draws_nor_pruning_with_simulated_processes(tmp_path, monkeypatch):
    """A curve rises by 0.1 with every evaluation, from 0.5, 0.4, 0.55, 0.6 and 0.57.

    What is compared must be as early, and no trial may be compared with twice: the fifth is the second best of five,
    which is not enough; of six it would be.
    """

    def searched(folder: Path, *, stop_after: int | None) -> list[tuple[float, str, float | None]]:
        seen: dict[Path, list[float]] = {}
        reported: list[FinishedTrial] = []
        starts = iter((0.5, 0.4, 0.55, 0.6, 0.57))

        def lived(_target, arguments, *, on_evaluation, **_):
            if arguments["run"] not in seen:
                seen[arguments["run"]] = [next(starts)]
            begun = seen[arguments["run"]]
            for number in range(len(begun), 10):
                begun.append(begun[0] + number / 10)
                if not on_evaluation(number, begun[-1], number == 9):
                    return TrialExit(code=143, was_pruned=True)
                if len(seen) == 1 and number == stop_after:
                    return TrialExit(code=143, was_stopped=True)
            return TrialExit(code=0)

        def prepare(claimed) -> TrialTask:
            run = Path(claimed.run or folder / f"trial-{claimed.number}")
            return TrialTask(arguments={"run": run}, run=run)

        task = simulated_work(folder, monkeypatch, [], reported=reported)
        monkeypatch.setattr("whet.hpo.worker.run_trial_process", lived)
        monkeypatch.setattr("whet.hpo.worker._evaluations", lambda run, **_: list(enumerate(seen.get(run, [0])))[1:])
        monkeypatch.setattr("whet.hpo.worker._last_value", lambda run, **_: (seen[run][-1], 1))
        monkeypatch.setattr("whet.hpo.worker._is_done", lambda _run: False)
        folder.mkdir()
        with open_storage(None, folder=folder) as storage:
            run_worker(
                open_study(storage, pruner=make_pruner("SuccessiveHalvingPruner")),
                replace(task, prepare=prepare),
                max_trials=5,
            )
        return [(ended.parameters["x"], ended.state, ended.value) for ended in reported if ended.state != "stopped"]

    whole = searched(tmp_path / "whole", stop_after=None)
    assert [state for _, state, _ in whole] == ["complete", "pruned", "complete", "complete", "pruned"]
    for after in (1, 2, 5, 6):
        assert searched(tmp_path / f"stopped-{after}", stop_after=after) == whole


def test_three_failures_in_a_row_end_a_search_with_simulated_processes(tmp_path, monkeypatch):
    lives = [TrialExit(code=1, failure="ValueError: yours")] * 3
    with open_storage(None, folder=tmp_path) as storage, pytest.raises(WhetError, match="3 trials in a row failed"):
        run_worker(open_study(storage), simulated_work(tmp_path, monkeypatch, lives, reported=[]), max_trials=9)
