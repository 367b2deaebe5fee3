"""The training loop as a single call, train(), built on the public methods of Session."""

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Never

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from whet.base.errors import UsageError
from whet.config.goal import resolve_mode
from whet.config.options import SchedulerObject
from whet.data.loader import describe_non_finite_data, with_loader_options
from whet.distributed.ranks import read_rank_info
from whet.machine.pressure import ReadSystemState
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.run.folder import shell_path
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice
from whet.training import checks, intercept
from whet.training.auto_batch_size import resolve_auto_batch_size
from whet.training.callback import Callback
from whet.training.callbacks.event_log import EventHandler, emit_event
from whet.training.callbacks.progress_line import ProgressLine
from whet.training.callbacks.progress_screen import is_notebook
from whet.training.evaluator import Evaluate
from whet.training.keywords import SessionKeywords
from whet.training.measurement import MeasurementStoppedError
from whet.training.progress import BestStep
from whet.training.run_config import make_run_config
from whet.training.session import Session
from whet.training.tune import OpenStepBench, report_unmeasured, with_measured_plan

VAL_LOSS = "val_loss"
"""The metric that is reported if `val` is given without `evaluate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The result of `train`: final step, metrics, run folder and the reason why it ended."""

    path: Path | None
    """The run folder; None if nothing was written."""
    state: str
    """"done", or "stopped" if a stop was requested; in that case, the same call resumes the run."""
    step: int
    """Number of completed optimizer steps."""
    reason: str
    """Why the session ended: "all 3 epochs done", "stopped early: no better val_loss in 3 evaluations", ..."""
    metrics: dict[str, float]
    """The metrics of the last evaluation, and of the test data if it was evaluated."""
    best: BestStep | None
    """The best evaluation of the goal (step, metric and value); None without a goal."""
    exit_code: int
    """0, or the exit code for the signal that stopped the run."""


def train(
    model: nn.Module,
    data: Any,
    *,
    loss: LossFunction,
    optimizer: Optimizer | OptimizerChoice,
    evaluate: Evaluate | None = None,
    val: Any = None,
    test: Any = None,
    on_event: EventHandler | Literal["line"] | None = "line",
    measure: bool = True,
    open_bench: OpenStepBench | None = None,
    # begin generated keywords (tools/keywords.py)
    global_batch_size: int | Literal["auto"] | None = None,
    epochs: int = 1,
    max_steps: int | None = None,
    schedule: Literal["constant", "linear", "cosine", "plateau"]
    | Callable[[int], float]
    | SchedulerObject
    | dict[str, Any] = "constant",
    warmup_steps: int = 0,
    clip: float | None = None,
    ema: bool = False,
    verify_resume: bool = False,
    seed: int = 0,
    eval_every: int | Literal["auto"] = "auto",
    patience: int | None = None,
    epochs_per_session: int | None = None,
    schedule_interval: Literal["step", "epoch", "auto"] = "auto",
    shuffle: bool | Literal["auto"] = "auto",
    collate_fn: Callable[[Any], Any] | None = None,
    split_batch: bool | Literal["auto"] = "auto",
    lr_batch: int = 32,
    run: str | Path | None = None,
    device: str = "auto",
    overrides: Mapping[str, Scalar] | None = None,
    plan: Plan | None = None,
    workload: Workload | None = None,
    goal: str | None = None,
    mode: Literal["auto", "min", "max"] = "auto",
    init_from: str | Path | None = None,
    allow: Collection[str] = (),
    callbacks: Sequence[Callback] = (),
    register: Mapping[str, Any] | None = None,
    read_sensors: ReadSystemState | None = None,
    outputs: Callable[[Any], Any] | None = None,
    # end generated keywords
    **unknown: Never,
) -> TrainResult:
    """Train a model. See `whet.train` for the arguments."""
    keywords = SessionKeywords.from_call({**locals(), "on_event": None})
    try:
        return train_run(
            model,
            data,
            keywords,
            loss=loss,
            optimizer=optimizer,
            evaluate=evaluate,
            val=val,
            test=test,
            on_event=on_event,
            measure=measure,
            open_bench=open_bench,
        )
    except MeasurementStoppedError as stop:
        return measurement_stopped(stop)


def measurement_stopped(stop: MeasurementStoppedError) -> TrainResult:
    """Return the result of a run that Ctrl-C ended before its first step. In a notebook, raise the exception instead.

    The same call starts the run again.
    """
    if is_notebook():
        raise stop
    return TrainResult(
        path=None, state="stopped", step=0, reason=str(stop), metrics={}, best=None, exit_code=128 + signal.SIGINT
    )


def train_run(
    model: nn.Module,
    data: Any,
    keywords: SessionKeywords,
    *,
    loss: LossFunction,
    optimizer: Optimizer | OptimizerChoice,
    evaluate: Evaluate | None = None,
    val: Any = None,
    test: Any = None,
    on_event: EventHandler | Literal["line"] | None = None,
    measure: bool = False,
    open_bench: OpenStepBench | None = None,
) -> TrainResult:
    """Train a model with the keywords of a call, which have already been collected."""
    if evaluate is not None and val is None:
        raise UsageError(
            "evaluate has no data to evaluate", got="evaluate without val", try_="val=..., with or without evaluate"
        )
    checks.check_one_optimizer(optimizer)
    goal = _goal(keywords.goal, evaluate=evaluate, val=val)
    resolve_mode(goal, keywords.mode)
    checks.check_goal_is_evaluated(
        keywords.training,
        goal=goal,
        is_evaluated=val is not None,
        hint="val=..., which reports val_loss" if val is None else 'goal="accuracy", a metric that evaluate returns',
    )
    keywords = replace(keywords, goal=goal, training=with_loader_options(data, keywords.training))
    line = ProgressLine(epochs=keywords.training.get("epochs", 1))
    is_rank_zero = read_rank_info().is_rank_zero
    handler = line if on_event == "line" else on_event
    if not is_rank_zero:
        handler = None
    if isinstance(data, DataLoader) and (problems := describe_non_finite_data(data)):
        emit_event(handler, "data", {"notes": [problems]})
    resolved = resolve_auto_batch_size(
        model, data, replace(keywords, on_event=handler), loss=loss, optimizer=optimizer, may_measure=measure
    )
    with resolved as (optimizer, keywords):
        config = replace(make_run_config(model, optimizer, data, keywords), loss=loss, evaluate=evaluate)
        if measure:
            config = with_measured_plan(config, loss, open_bench=open_bench)
        else:
            report_unmeasured(config)
        session = Session.from_config(config)
        if (interception := intercept.active()) is not None:
            interception.before_step(session.config, loss)
        metrics = _train(session, loss, evaluate, val=val, test=test)
    assert session.end_reason is not None
    result = TrainResult(
        path=session.run.path,
        state="done" if session.is_finished else "stopped",
        step=session.state.step,
        reason=session.end_reason,
        metrics=metrics,
        best=session.best,
        exit_code=session.exit_code,
    )
    if on_event == "line" and is_rank_zero and result.state == "done":
        line.print_line(describe_result(result))
    return result


def _goal(goal: str | None, *, evaluate: Evaluate | None, val: Any) -> str | None:
    """Return the goal metric, which is the validation loss if there is no evaluate function."""
    if evaluate is not None or val is None:
        return goal
    if goal not in (None, VAL_LOSS):
        raise UsageError(
            "the goal is not among the metrics",
            got=f"goal={goal!r}, and val without evaluate reports {VAL_LOSS}",
            try_=f"goal={VAL_LOSS!r}, or an evaluate function that returns {goal!r}",
        )
    return VAL_LOSS


def _train(session: Session, loss: LossFunction, evaluate: Evaluate | None, *, val: Any, test: Any) -> dict[str, float]:
    """Run the training loop and return the metrics of the last evaluation."""

    def run_evaluation(data: Any, **how: Any) -> dict[str, float]:
        if evaluate is None:
            return session.evaluate_loss(loss, data, **how)
        return session.evaluate(evaluate, data, **how)

    metrics: dict[str, float] = {}
    with session:
        # If a run stopped before an evaluation that was due, it is evaluated here.
        if val is not None and session.due("evaluate"):
            metrics |= run_evaluation(val)
        for batch in session:
            session.step(loss, batch)
            if val is not None and session.due("evaluate"):
                metrics |= run_evaluation(val)
        if test is not None and session.is_finished and not session.run.has_logged("test_"):
            metrics |= run_evaluation(test, prefix="test_", use_best=True)
        # A run that had already finished was evaluated in an earlier session.
        return metrics or session.run.last_metrics()


def describe_result(result: TrainResult) -> str:
    """Format the result of `train` as the line that is printed at the end."""
    metrics = "".join(f", {name} {value:.4g}" for name, value in result.metrics.items())
    where = f"; whet report {shell_path(result.path)} shows the run" if result.path else ""
    return f"train: {result.reason} at step {result.step:,}{metrics}{where}"
