"""train(): the training loop as one call, built on the public methods of Session."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.distributed.ranks import read_rank_info
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice
from whet.training.callbacks.event_log import EventHandler
from whet.training.callbacks.progress import DesktopNotifier, ProgressLine
from whet.training.evaluator import Evaluate
from whet.training.keywords import SessionKeywords
from whet.training.session import Session
from whet.training.tune import OpenStepBench, resolve_auto_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The result of a session."""

    path: Path | None
    """The run folder; None if nothing was written."""
    state: str
    """"done", or "stopped" if a stop was requested; the same call then resumes the run."""
    step: int
    """Number of completed optimizer steps."""
    metrics: dict[str, float]
    """The metrics of the last evaluation, and of the test data if it was evaluated."""
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
    notify: bool = False,
    measure: bool = True,
    open_bench: OpenStepBench | None = None,
    **options: Unpack[SessionKeywords],
) -> TrainResult:
    """Train a model: probe the machine, plan, train and save checkpoints. The same call with the same `run` resumes.

    `loss` receives a micro-batch and returns the mean over its samples, or a pair (sum, weight). `evaluate` receives
    the model and micro-batches of `val`, and returns metrics, optionally with a confusion matrix and samples
    (training/metrics.py). After the last step, `evaluate` runs once on `test`, with the weights of the best `goal` on
    `val`. `on_event` receives every event: "line" draws a progress line on standard error, a function replaces it, and
    None is silent. `notify` sends a desktop notification when the run ends or needs attention. With `measure`, a new
    run that is long enough first measures which plan is fastest; the measured steps do not affect training
    (docs/measure.md). `open_bench` opens the same training in a separate process for that. All other options are those
    of `Session`: run, device, overrides, plan, goal, callbacks, init_from, outputs (for a causal model), and the fields
    of `TrainingConfig` (global_batch_size, epochs, max_steps, seed, schedule, warmup_steps, clip, ema, ...).

    global_batch_size="auto" measures which batch size uses this machine well, and scales your learning rate from
    `lr_batch` samples (default 32) to that size. The run keeps both numbers.
    """
    if (evaluate is None) != (val is None):
        raise UsageError("evaluate and val belong together", got="one of them", try_="evaluate=..., val=...")
    line = ProgressLine(epochs=options.get("epochs", 1))
    is_rank_zero = read_rank_info().is_rank_zero
    handler = line if on_event == "line" else on_event
    if not is_rank_zero:
        handler = None
    elif notify:
        handler = DesktopNotifier("train", on_event=handler, print_line=line.print_line)
    resolved = resolve_auto_batch_size(
        model, data, loss=loss, optimizer=optimizer, options={**options}, may_measure=measure, on_event=handler
    )
    with resolved as (optimizer, session_options):
        session = Session(model, optimizer, data, on_event=handler, **session_options)
        if measure:
            session.tune(loss, open_bench=open_bench)
        metrics = _train(session, loss, evaluate, val=val, test=test)
    result = TrainResult(
        path=session.run.path,
        state="done" if session.is_finished else "stopped",
        step=session.state.step,
        metrics=metrics,
        exit_code=session.exit_code,
    )
    if on_event == "line" and is_rank_zero and result.state == "done":
        line.print_line(_summary(result))
    return result


def _train(session: Session, loss: LossFunction, evaluate: Evaluate | None, *, val: Any, test: Any) -> dict[str, float]:
    """Run the training loop and return the metrics of the last evaluation."""
    metrics: dict[str, float] = {}
    with session:
        # A run that stopped before an evaluation that was due makes it up here.
        if evaluate is not None and session.due("evaluate"):
            metrics |= session.evaluate(evaluate, val)
        for batch in session:
            session.step(loss, batch)
            if evaluate is not None and session.due("evaluate"):
                metrics |= session.evaluate(evaluate, val)
        if evaluate is not None and test is not None and session.is_finished and not session.has_logged("test_"):
            metrics |= session.evaluate(evaluate, test, prefix="test_", use_best=True)
    return metrics


def _summary(result: TrainResult) -> str:
    metrics = "".join(f", {name} {value:.4g}" for name, value in result.metrics.items())
    where = f"; kept in {result.path}: whet report, or whet.open_run(...).plot()" if result.path else ""
    return f"train: done at step {result.step:,}{metrics}{where}"
