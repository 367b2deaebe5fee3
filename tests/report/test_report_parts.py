"""The parts of a report: curves on every axis, timeline, evidence and advice. The runs are simulated."""

import json
from pathlib import Path

import pytest

from simulated_run import _waits_for_no_disk, plan, simulated_run, trial  # noqa: F401
from whet.base.errors import UsageError
from whet.report.comparison import MAX_COMPARED_RUNS, compare_runs
from whet.report.plan_evidence import plan_trials
from whet.report.run_report import RunReport, summarize
from whet.report.run_status import read_status
from whet.report.text import main_curves, render_text
from whet.run.events import EventLog
from whet.run.folder import Run, create_run

STEPS = 600


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return summarize(simulated_run(tmp_path_factory.mktemp("runs") / "text-001", steps=STEPS))


def bare(path: Path, **parts: object) -> Run:
    known = {"config": {}, "plan": {}, "machine": {}, "versions": {}, "command": ["whet", "train"], **parts}
    return create_run(path, recipe="text", **known)  # type: ignore[arg-type]


def test_page_json_is_strict_round_trips_and_has_no_path(report: RunReport, tmp_path: Path) -> None:
    page = report.for_page()
    text = json.dumps(page.as_json(), allow_nan=False)
    assert RunReport.from_json(json.loads(text), where="a page").as_json() == page.as_json()
    assert report.name == "text-001"
    assert str(tmp_path.parent.parent) not in text, "the path of the run is private"


def test_every_curve_lies_on_all_three_axes(report: RunReport) -> None:
    assert [track.source for track in report.tracks] == ["step", "eval", "health", "epoch"]
    for track in report.tracks:
        assert len(track.step) == len(track.seconds) == len(track.samples)
        assert list(track.step) == sorted(track.step)
        assert list(track.seconds) == sorted(track.seconds)
        assert all(
            samples == pytest.approx(32 * step, abs=32) for step, samples in zip(track.step, track.samples, strict=True)
        )
        assert all(len(line.mean) == len(track.step) for line in track.lines)
    names = {line.name for track in report.tracks for line in track.lines}
    assert {"loss", "lr", "grad_norm", "samples_per_second", "accuracy", "memory/limit", "utilization/gpu"} <= names
    loss = report.track("step").line("loss")  # type: ignore[union-attr]
    assert loss is not None
    assert loss.nonfinite == 1
    assert loss.mean[STEPS // 5 - 1] is None


def test_time_between_sessions_is_not_training_time(report: RunReport) -> None:
    steps = report.track("step")
    assert steps is not None
    assert steps.seconds[-1] < 120
    assert report.wall_seconds > 8 * 3600
    assert [session.step for session in report.sessions] == [0, STEPS // 2]
    assert all(entry.seconds < 120 for entry in report.timeline)


def test_speed_is_samples_in_the_time_of_steps(tmp_path: Path) -> None:
    run = bare(tmp_path / "r")
    with EventLog(run) as log:
        for step in range(1, 11):
            seconds = {"data": 0.1, "forward": 0.3, "evaluate": 100.0, "save": 100.0}
            log.append("step", step=step, loss=1.0, samples=8 * step, seconds=seconds)
    speed = summarize(run).track("step").line("samples_per_second")  # type: ignore[union-attr]
    assert speed is not None
    assert speed.mean == tuple([20.0] * 10)


def test_a_spike_survives_downsampling(tmp_path: Path) -> None:
    run = bare(tmp_path / "r")
    with EventLog(run) as log:
        for step in range(1, 5001):
            log.append("step", step=step, loss=99.0 if step == 2345 else 1.0)
    track = summarize(run, points=100).track("step")
    assert track is not None
    line = track.line("loss")
    assert line is not None
    assert line.high is not None
    assert len(track.step) <= 100
    assert max(value for value in line.high if value is not None) == 99.0


def test_only_clearly_slow_steps_are_a_slow_period(report: RunReport) -> None:
    # Memory pressure without slower steps is in the timeline only.
    assert [(s.cause, s.level, s.from_step, s.to_step) for s in report.slow_periods] == [("heat", "hot", 180, 270)]
    assert report.slow_periods[0].factor == pytest.approx(1.4, rel=0.1)


@pytest.mark.parametrize(
    ("slowdown", "seconds", "until", "is_shown"),
    [(1.5, 1.0, 40, True), (1.2, 1.0, 40, False), (1.5, 0.1, 40, False), (1.5, 1.0, 100, True), (1.5, 1.0, 19, False)],
    ids=["clearly slower", "1.2x", "a moment", "to the end", "the whole run"],
)
def test_a_slow_period_needs_slower_steps_for_a_while(
    tmp_path: Path, slowdown: float, seconds: float, until: int, is_shown: bool
) -> None:
    now = [1_790_000_000.0]

    def clock() -> float:
        now[0] += seconds
        return now[0]

    run = bare(tmp_path / "r")
    first = 20 if until > 20 else 1
    with EventLog(run, clock=clock) as log:
        log.append("start", step=0, total_steps=100)
        for step in range(1, 101):
            is_slow = first <= step < until or (first == 1)
            log.append("step", step=step, loss=1.0, samples=8 * step, seconds={"forward": slowdown if is_slow else 1.0})
            if step == first:
                log.append("throttle", step=step, cause="heat", state="hot", reason="slower", factor=slowdown)
            elif step == until and first > 1:
                log.append("throttle", step=step, cause="heat", state="cool", reason="as before")
    assert bool(summarize(run).slow_periods) is is_shown


def test_timeline(report: RunReport) -> None:
    logged = [(m.kind, m.tone) for m in report.timeline if m.kind != "checkpoint"]
    assert logged == [
        ("start", "plain"),
        ("throttle", "warn"),
        ("throttle", "good"),
        ("oom", "bad"),
        ("resume", "plain"),
        ("pressure", "warn"),
        ("pressure", "good"),
        ("end", "good"),
    ]
    assert report.timeline_omitted == 0
    assert [m.label for m in report.timeline if m.label] == ["out of memory", "resumed"]


def test_a_long_timeline_is_truncated_in_the_middle(tmp_path: Path) -> None:
    run = bare(tmp_path / "r")
    with EventLog(run) as log:
        for step in range(1000):
            log.append("spike", step=step, reason="x" * 5000, samples=[])
    result = summarize(run)
    assert len(result.timeline) + result.timeline_omitted == 1000
    assert (result.timeline[0].step, result.timeline[-1].step, len(result.timeline)) == (0, 999, 300)
    assert max(len(entry.text) for entry in result.timeline) <= 2000


def test_the_time_breakdown_adds_up(report: RunReport) -> None:
    assert sum(phase.share for phase in report.phases) == pytest.approx(1)
    assert [phase.name for phase in report.phases] == ["data", "transfer", "forward", "backward", "optimizer", "save"]


def test_evidence_lists_trials_and_the_chosen_value(report: RunReport) -> None:
    groups = {group.setting: group for group in report.evidence}
    assert list(groups)[-1] == "plan"
    assert [(one.label, one.chosen) for one in groups["micro_batch"].trials] == [
        ("micro_batch=16", True),
        ("micro_batch=8", False),
    ]
    winner = groups["micro_batch"].trials[0]
    assert winner.interval is not None
    assert winner.speedup is not None
    assert winner.interval[0] < winner.speedup < winner.interval[1]


def test_planned_and_actual_figures(report: RunReport) -> None:
    figures = {one.name: one for one in report.planned_vs_actual}
    assert figures["speed"].planned == pytest.approx(32 * 1.16 / 0.04)
    assert figures["speed"].actual == pytest.approx(
        32 * STEPS / sum(p.seconds for p in report.phases if p.name != "save")
    )
    assert figures["time of all steps"].planned == pytest.approx(1.0 + STEPS * 0.04 / 1.16)
    assert figures["memory of a step"].planned == 3 * 1024**3
    assert figures["steps"].actual == STEPS


def test_advice_names_its_measurement(report: RunReport) -> None:
    logged = {one.try_: one.measured for one in report.advice}
    assert logged["workers=2 instead of 0, which you asked for"] == "workers=2: faster"
    assert any("cross_entropy was lowest, 0.7375 at step 300" in measured for measured in logged.values())
    assert len(logged) == 2


def test_without_a_measurement_there_is_no_advice(tmp_path: Path) -> None:
    run = bare(
        tmp_path / "r", plan=plan(trials=[trial("workers", 2, "no gain", 1.01), trial("compile", "on", "failed", None)])
    )
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=3, goal="accuracy", mode="max")
        for step in range(1, 4):
            log.append("step", step=step, loss=1 / step, seconds={"data": 0.01, "forward": 1.0})
            log.append("eval", step=step, accuracy=step / 4, cross_entropy=1 / step)
    assert summarize(run).advice == ()


def slow_data(path: Path, *, speedup: float | None, seconds: float = 90.0, state: str = "done") -> Run:
    """A run that waited for data in 38 % of its time."""
    times = iter((0.0, 0.0, seconds))
    settings = {"workers": {"value": 0, "reason": "", "source": "rule", "evidence": {}}}
    trials = [] if speedup is None else [trial("workers", 2, "not worth it", speedup)]
    run = bare(path, plan={"settings": settings, "trials": trials})
    with EventLog(run, clock=lambda: 1e9 + next(times)) as log:
        log.append("start", step=0, total_steps=1)
        log.append("step", step=1, loss=1.0, seconds={"data": 0.38, "forward": 0.62})
        log.append("end", step=1, state=state, reason="failed: ValueError: x", traceback="Traceback: x")
    return run


def test_slow_data_suggests_measured_workers(tmp_path: Path) -> None:
    took = "waiting for data took 38 % of the time of the steps"
    advice = {
        speedup: [
            (one.try_, one.measured) for one in summarize(slow_data(tmp_path / f"{speedup}", speedup=speedup)).advice
        ]
        for speedup in (None, 1.3, 1.04)
    }
    assert advice == {
        None: [("more data workers, or less work per sample", took)],
        1.3: [("workers=2", f"{took}; workers=2 was 1.30x")],
        1.04: [("less work per sample", f"{took}, and no number of workers was clearly faster")],
    }


def test_a_short_or_failed_run_gets_no_advice(tmp_path: Path) -> None:
    assert summarize(slow_data(tmp_path / "long", speedup=None)).advice
    assert summarize(slow_data(tmp_path / "short", speedup=None, seconds=59.0)).advice == ()
    failed = summarize(slow_data(tmp_path / "failed", speedup=None, state="failed"))
    assert (failed.state, failed.advice, failed.traceback) == ("failed", (), "Traceback: x")


def test_the_loss_of_each_optimizer_is_a_curve_of_its_own(tmp_path: Path) -> None:
    run = bare(tmp_path / "gan")
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=8, optimizers=["d", "g"])
        for step in range(1, 9):
            # g steps on every fourth batch only.
            losses = {"loss_d": 1.0 / step} | ({"loss_g": 2.0} if step % 4 == 0 else {})
            log.append("step", step=step, loss=sum(losses.values()), **losses)
    result = summarize(run)
    assert result.losses == {"loss_d": 0.125, "loss_g": 2.0}
    assert [name for name, _ in main_curves(result)] == ["loss_d (lower is better)", "loss_g (lower is better)"]
    text = render_text(result)
    assert "loss      last d 0.125, g 2" in text
    assert "2.125" not in text


def test_a_run_from_python_is_called_after_its_script(tmp_path: Path) -> None:
    run = create_run(
        tmp_path / "r", recipe="session", config={}, plan={}, machine={}, versions={}, command=[],
        script="/home/me/fine_tune.py:main",
    )  # fmt: skip
    assert summarize(run).recipe == "fine_tune.py"
    assert read_status(run).recipe == "fine_tune.py"


def test_confusion_and_samples_are_the_newest(report: RunReport) -> None:
    (matrix,) = report.details.confusions
    assert (matrix.split, matrix.step, len(matrix.labels), len(matrix.counts)) == ("val", STEPS, 6, 6)
    (scores,) = report.details.classes
    assert (scores.split, scores.step, scores.columns) == ("val", STEPS, ("f1", "support"))
    assert (scores.labels, scores.rows[1]) == (matrix.labels, (0.65, 149.0))
    (table,) = report.details.samples
    assert table.columns == ("input", "expected", "predicted")
    assert table.rows[0][0] == "Return the <b>eigenvalues</b> of a matrix."


@pytest.mark.parametrize(
    "damaged",
    [
        {"labels": ["a"], "counts": [[1, 2]]},
        {"labels": ["a", "b"], "counts": [[1, 2]]},
        {"labels": ["a"], "counts": [[-1]]},
        {"labels": ["a"], "counts": [["1"]]},
        {"labels": "ab", "counts": [[1]]},
        {"labels": [str(n) for n in range(100)], "counts": [[0] * 100] * 100},
        [],
    ],
)
def test_a_malformed_confusion_matrix_is_left_out(tmp_path: Path, damaged: object) -> None:
    run = bare(tmp_path / "r")
    with EventLog(run) as log:
        log.append("eval", step=1, confusion=damaged, classes=damaged, samples=[1, "x", None])
    result = summarize(run).details
    assert (result.confusions, result.classes, result.samples) == ((), (), ())


def test_a_run_with_missing_parts_is_still_reported(tmp_path: Path) -> None:
    empty = summarize(bare(tmp_path / "empty"))
    assert (empty.tracks, empty.timeline, empty.advice, empty.planned_vs_actual) == ((), (), (), ())
    odd = {"settings": "none", "trials": [{"setting": 1}, 5, trial("workers", 2, "faster", 1.2)], "warnings": "x"}
    run = bare(tmp_path / "r", plan=odd)
    with EventLog(run) as log:
        log.append("step", step=1, loss=1.0)
        log.append("epoch", step=1, epoch=1, epoch_seconds=1.0, memory={"allocated": 5, "limit": 10})
    result = summarize(run)
    assert [track.source for track in result.tracks] == ["step", "epoch"]
    assert len(plan_trials(odd)) == 1


@pytest.mark.torch
def test_the_fingerprint_of_the_data_is_that_of_the_newest_checkpoint(tmp_path: Path) -> None:
    from whet.checkpoint.manifest import CheckpointInfo, CheckpointManifest

    run = bare(tmp_path / "r")
    for step in (1, 2):
        info = CheckpointInfo(data={"fingerprint": f"print {step}", "num_samples": 7})
        folder = run.checkpoints / f"step-{step:09d}"
        folder.mkdir()
        manifest = CheckpointManifest(step=step, files={}, tensors={}, info=info)
        (folder / "manifest.json").write_bytes(manifest.to_bytes())
    provenance = summarize(run).provenance
    assert (provenance.data, provenance.num_samples) == ("print 2", 7)


def test_a_comparison_lists_differences_first(tmp_path: Path) -> None:
    reports = [
        summarize(simulated_run(tmp_path / where / "same", steps=60, seed=n, lr=lr))
        for n, (where, lr) in enumerate((("a", 0.1), ("b", 0.2)))
    ]
    result = compare_runs(reports)
    assert result.labels == ("same", "same (2)")
    assert [(row.name, row.values) for row in result.config if row.differs] == [
        ("seed", ("0", "1")),
        ("lr", ("0.1", "0.2")),
    ]
    assert not result.config[-1].differs
    assert "arch.layers" in {row.name for row in result.config}
    assert not any(row.differs for row in result.settings)
    for count in (1, MAX_COMPARED_RUNS + 1):
        with pytest.raises(UsageError):
            compare_runs(reports[:1] * count)
