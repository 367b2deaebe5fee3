"""Goals, the validation loss, and the reason why a run ended."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whet
from small_models import convnet, images
from small_training import cross_entropy, sgd, train
from whet.base.errors import UsageError, WhetError
from whet.report.text import render_text
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch


def end_reasons(run: Path) -> list[str]:
    return [str(event.get("reason")) for event in read_events(open_run(run), kinds=("end",))]


# --- the direction of a goal ------------------------------------------------------------------------------------------


def test_a_loss_is_minimized_unasked(tmp_path: Path) -> None:
    """A falling loss must not end the run, and the lowest value is the best one."""
    losses = iter([0.9, 0.5, 0.4, 0.6, 0.7, 0.1])
    result = train(
        convnet(),
        images(16, seed=0),
        evaluate=lambda model, micro_batches: {"val_loss": next(losses)},
        val=images(4, seed=1),
        goal="val_loss",
        patience=2,
        epochs=6,
        run=tmp_path / "run",
    )
    assert result.step == 10, "five epochs of two steps"
    assert result.best is not None
    assert (result.best.step, result.best.metric, result.best.value) == (6, "val_loss", 0.4)
    assert result.reason == "stopped early: no better val_loss in 2 evaluations, best 0.4 at step 6"
    report = whet.summarize(tmp_path / "run")
    assert (report.goal_mode, report.best_goal, report.reason) == ("min", 0.4, result.reason)
    assert f"ended     {result.reason}" in render_text(report, width=120, unicode=False)


def test_a_goal_of_unknown_direction_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    steps: list[int] = []
    model = convnet()

    def loss(micro: Any) -> torch.Tensor:
        steps.append(1)
        return cross_entropy(model)(micro)

    options = {"evaluate": lambda model, micro_batches: {"closeness": 1.0}, "val": images(4, seed=1)}
    with pytest.raises(UsageError, match="does not imply whether lower or higher"):
        train(model, images(16, seed=0), loss, **options, goal="closeness", run=tmp_path / "run")
    assert (steps, (tmp_path / "run").exists()) == ([], False)
    assert train(model, images(16, seed=0), loss, **options, goal="closeness", mode="min").best is not None
    with pytest.raises(UsageError, match="does not imply whether lower or higher"):
        whet.Session(model, sgd(model), images(8, seed=0), global_batch_size=8, goal="closeness")


@pytest.mark.parametrize("option", [{"patience": 2}, {"schedule": "plateau"}])
def test_an_option_that_watches_nothing_is_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    model, data = convnet(), images(16, seed=0)
    with pytest.raises(UsageError, match="needs a goal metric, but none is evaluated"):
        train(model, data, run=tmp_path / "run", **option)
    with pytest.raises(UsageError, match="needs a goal metric, but none is evaluated"):
        train(model, data, run=tmp_path / "run", goal="accuracy", **option)
    evaluation = {"evaluate": lambda model, micro_batches: {"accuracy": 1.0}, "val": images(4, seed=1)}
    with pytest.raises(UsageError, match="needs a goal metric, but none is evaluated"):
        train(model, data, run=tmp_path / "run", **evaluation, **option)
    with pytest.raises(UsageError, match="needs a goal metric, but none is evaluated"):
        whet.Session(model, sgd(model), data, global_batch_size=8, run=tmp_path / "run", **option)
    assert not (tmp_path / "run").exists()
    assert train(model, data, val=images(4, seed=1), **option).state == "done"


# --- the validation loss ----------------------------------------------------------------------------------------------


def test_val_alone_reports_the_validation_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, val, test = convnet(dropout=0.5), images(13, seed=1), images(7, seed=2)
    result = train(model, images(16, seed=0), val=val, test=test, epochs=2, run=tmp_path / "run")
    assert model.training
    model.eval()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(val[0]), val[1]).item()
    assert result.metrics["val_loss"] == pytest.approx(expected, rel=1e-5), "eval mode, every sample once"
    assert set(result.metrics) == {"val_loss", "test_loss"}
    report = whet.summarize(tmp_path / "run")
    assert (report.goal, report.goal_mode) == ("val_loss", "min")
    assert len([e for e in report.evaluations if "val_loss" in e.metrics]) == 2
    assert result.best is not None
    assert result.best.metric == "val_loss"


def test_the_validation_loss_has_the_weights_of_the_loss() -> None:
    """The sum over the sum of weights, not the mean of the means of uneven micro-batches."""
    x = torch.arange(1.0, 8.0)[:, None]
    model = nn.Linear(1, 1)

    def loss(micro: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weight = micro.x.sum()
        return (model(micro.x) * 0 + micro.x * micro.x).sum(), weight

    result = train(model, {"x": x}, loss, val={"x": x}, global_batch_size=7, overrides={"eval_batch": 2})
    assert result.metrics["val_loss"] == pytest.approx(float((x * x).sum() / x.sum()))


def test_the_mean_of_uneven_micro_batches_is_over_samples() -> None:
    x = torch.arange(1.0, 8.0)[:, None]
    model = nn.Linear(1, 1)
    loss = lambda micro: (model(micro.x) * 0 + micro.x).mean()  # noqa: E731
    result = train(model, {"x": x}, loss, val={"x": x}, global_batch_size=7, overrides={"eval_batch": 3})
    assert result.metrics["val_loss"] == pytest.approx(4.0)


def test_the_validation_loss_disturbs_nothing() -> None:
    finals = []
    for extra in ({}, {"val": images(10, seed=1), "eval_every": 1}):
        torch.manual_seed(0)
        model = convnet(dropout=0.5)
        train(model, images(40, seed=0), seed=4, **extra)
        finals.append(model.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


def test_another_goal_than_the_validation_loss_needs_evaluate() -> None:
    with pytest.raises(UsageError, match="the goal is not among the metrics"):
        train(convnet(), images(16, seed=0), val=images(4, seed=1), goal="accuracy")


def test_a_custom_loop_evaluates_the_loss(tmp_path: Path) -> None:
    model = convnet()
    with whet.Session(
        model, sgd(model), images(16, seed=0), global_batch_size=8, goal="val_loss", run=tmp_path / "run"
    ) as session:
        for batch in session:
            session.step(cross_entropy(model), batch)
            if session.due("evaluate"):
                metrics = session.evaluate_loss(cross_entropy(model), images(4, seed=1))
    assert session.best is not None
    assert {"val_loss": session.best.value} == metrics


# --- why a run ended --------------------------------------------------------------------------------------------------


def test_the_reasons_of_a_finished_run(tmp_path: Path) -> None:
    assert train(convnet(), images(16, seed=0), epochs=3).reason == "all 3 epochs done"
    assert train(convnet(), images(16, seed=0)).reason == "1 epoch done"
    result = train(convnet(), images(16, seed=0), epochs=3, max_steps=4, run=tmp_path / "run")
    assert (result.reason, result.best) == ("all 4 steps done", None)
    assert train(convnet(), images(16, seed=0), epochs=3, max_steps=4, run=tmp_path / "run").reason == result.reason
    assert end_reasons(tmp_path / "run") == [result.reason], "the second call has nothing to do"


def test_the_reason_of_epochs_per_session() -> None:
    result = train(convnet(), images(16, seed=0), epochs=6, epochs_per_session=2)
    assert (result.state, result.reason) == ("stopped", "stopped after 2 of 6 epochs: epochs_per_session=2")


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGINT, "stopped by Ctrl-C"), (signal.SIGTERM, "stopped by SIGTERM")]
)
def test_the_reason_of_a_signal(tmp_path: Path, number: int, reason: str) -> None:
    model, calls = convnet(), []

    def loss(micro: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return cross_entropy(model)(micro)

    options = {"run": tmp_path / "run", "epochs": 9, "overrides": {"micro_batch": 8, "verify": "off"}}
    result = train(model, images(16, seed=0), loss, **options)
    assert (result.state, result.reason, result.exit_code) == ("stopped", reason, 128 + number)
    assert end_reasons(tmp_path / "run") == [reason]
    assert train(model, images(16, seed=0), loss, **options).reason == "all 9 epochs done"


@pytest.mark.parametrize("hook", ["after_step", "on_epoch_end", "on_evaluate"])
def test_the_reason_of_a_callback(tmp_path: Path, hook: str) -> None:
    stopping = type("Stopping", (whet.Callback,), {hook: lambda *_: whet.Action.STOP("good enough")})
    result = train(
        convnet(), images(16, seed=0), epochs=9, callbacks=[stopping()], val=images(4, seed=1), run=tmp_path / "run"
    )
    assert (result.state, result.reason) == ("stopped", "stopped: good enough")
    report = whet.summarize(tmp_path / "run")
    assert report.reason == result.reason
    assert report.timeline[-1].text == result.reason


def test_the_reason_of_a_failure_and_of_a_loop_that_was_left(tmp_path: Path) -> None:
    model = convnet()
    for number, leaves in enumerate((True, False)):
        run = tmp_path / f"run{number}"
        try:
            with whet.Session(model, sgd(model), images(32, seed=0), global_batch_size=8, run=run) as session:
                for batch in session:
                    session.step(cross_entropy(model), batch)
                    if leaves:
                        break
                    raise WhetError("the disk caught fire", got="smoke", try_="water")
        except WhetError:
            pass
    assert end_reasons(tmp_path / "run0") == ["stopped: the loop was left after step 1"]
    assert end_reasons(tmp_path / "run1") == ["failed: the disk caught fire: smoke"]
    assert whet.summarize(tmp_path / "run1").reason == "failed: the disk caught fire: smoke"


def test_a_killed_process_leaves_no_reason_of_its_own(tmp_path: Path) -> None:
    from whet.run.events import EventLog
    from whet.run.folder import create_run

    facts: dict[str, Any] = {"config": {}, "plan": {}, "machine": {}, "versions": {}, "command": []}
    run = create_run(tmp_path / "run", recipe="session", **facts)
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=9)
        log.append("step", step=1, loss=1.0)
    assert whet.summarize(tmp_path / "run").reason == "stopped: the process died"


def test_a_failed_run_keeps_the_traceback_of_the_users_code(tmp_path: Path) -> None:
    def loss(micro: Any) -> torch.Tensor:
        raise KeyError("label")

    with pytest.raises(KeyError):
        train(convnet(), images(16, seed=0), loss, run=tmp_path / "run")
    report = whet.summarize(tmp_path / "run")
    assert (report.state, report.advice) == ("failed", ())
    assert report.traceback is not None
    assert "KeyError: 'label'" in report.traceback
    assert "in loss\n" in report.traceback
    assert "whet/training" not in report.traceback
    assert report.traceback in render_text(report, width=60)


def test_a_finished_run_that_is_called_again_is_no_session(tmp_path: Path) -> None:
    options = {"run": tmp_path / "run", "val": images(4, seed=1)}
    shown: list[str] = []
    for _ in range(2):
        train(convnet(), images(16, seed=0), **options, on_event=lambda kind, _fields: shown.append(kind))
    events = [event.kind for event in read_events(open_run(tmp_path / "run"))]
    assert (events.count("start"), events.count("resume"), events.count("end")) == (1, 0, 1)
    assert shown[-2:] == ["resume", "end"], "on_event receives the end of the earlier session"
    assert len(whet.summarize(tmp_path / "run").sessions) == 1
    # A longer training of the same run is one.
    train(convnet(), images(16, seed=0), **options, epochs=2)
    report = whet.summarize(tmp_path / "run")
    assert (report.state, len(report.sessions)) == ("done", 2)


def test_a_run_that_died_after_its_last_step_is_ended_by_the_next_call(tmp_path: Path) -> None:
    train(convnet(), images(16, seed=0), run=tmp_path / "run")
    log = tmp_path / "run" / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    assert b'"kind":"end"' in lines[-1]
    log.write_bytes(b"".join(lines[:-1]))
    assert whet.summarize(tmp_path / "run").state == "stopped"
    train(convnet(), images(16, seed=0), run=tmp_path / "run")
    assert whet.summarize(tmp_path / "run").state == "done"


def test_another_goal_than_the_runs_is_refused(tmp_path: Path) -> None:
    """Scores of accuracy and of a loss cannot be compared: the run would stop early, or never improve."""
    options = {"val": images(4, seed=1), "run": tmp_path / "run"}
    first = train(convnet(), images(16, seed=0), **options)
    accuracy = {"evaluate": lambda model, micro_batches: {"accuracy": 0.5}, "goal": "accuracy"}
    with pytest.raises(UsageError, match="started with a different goal") as refused:
        train(convnet(), images(16, seed=0), **options, **accuracy, epochs=2)
    assert "accuracy (max); the run has val_loss (min)" in str(refused.value)
    again = train(convnet(), images(16, seed=0), **options, epochs=2)
    assert again.best is not None
    assert first.best is not None
    assert again.best.value <= first.best.value


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_is_current_and_read_only() -> None:
    model, seen = convnet(), []
    with whet.Session(model, sgd(model), images(16, seed=0), global_batch_size=8, epochs=2) as session:
        progress = session.progress
        for batch in session:
            session.step(cross_entropy(model), batch)
            seen.append((progress.step, progress.epoch, progress.samples, progress.total_steps))
        with pytest.raises(AttributeError):
            progress.step = 7
    assert seen == [(1, 0, 8, 4), (2, 1, 16, 4), (3, 1, 24, 4), (4, 2, 32, 4)]
    assert repr(progress) == "Progress(step=4, epoch=2, samples=32, total_steps=4)"
