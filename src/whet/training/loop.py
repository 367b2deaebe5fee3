"""train(): the training loop as one call, written on the public methods of Session."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.distributed.ranks import read_rank_info
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice
from whet.training.callbacks.event_log import EventHandler
from whet.training.callbacks.notifications import DesktopNotifier
from whet.training.callbacks.progress import ProgressLine
from whet.training.evaluator import Evaluate
from whet.training.session import Session
from whet.training.tune import OpenStepBench, resolve_auto_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How a sitting ended."""

    path: Path | None
    """The run folder."""
    state: str
    """"done", or "stopped" when it was asked to stop: the same call goes on."""
    step: int
    metrics: dict[str, float]
    """What the last evaluation gave."""
    exit_code: int


def train(
    model: nn.Module,
    data: Any,
    *,
    loss: LossFunction,
    optimizer: Optimizer | OptimizerChoice,
    evaluate: Evaluate | None = None,
    val: Any = None,
    test: Any = None,
    show: EventHandler | Literal["line"] | None = "line",
    notify: bool = False,
    measure: bool = True,
    open_bench: OpenStepBench | None = None,
    **options: Any,
) -> TrainResult:
    """Trains a model: probes, plans, trains, checkpoints; call it again with the same `run` and it resumes.

    `loss` receives a micro-batch and returns a mean over its samples, or a pair (sum, weight). `evaluate` receives the
    model and micro-batches of `val` and returns metrics, perhaps a confusion matrix and samples too
    (training/metrics.py); of `test` too, once, when all steps are done, with the weights that were best on `val` by
    `goal`. `show` is told of every event: a line on
    standard error unless you give a function, or None for silence. `notify` tells the desktop, or the terminal, when
    the run ends or needs attention. A new run that is long
    enough to earn it back is measured first, in steps that leave no trace (docs/measure.md), unless `measure` is
    False; `open_bench` opens the same training in a process of its own for that. All other options are Session's: run,
    device, wishes, plan, goal, init_from, outputs (of a causal model), and what `training/training_config.py` lists
    (global_batch_size, epochs, max_steps, seed, schedule, warmup_steps, clip, ema, eval_every, patience, ...).

    global_batch_size="auto" measures which batch uses this machine well, and scales your learning rate, which is taken
    to be meant for `lr_batch` samples (32); the run keeps both numbers.
    """
    if (evaluate is None) != (val is None):
        raise UsageError("evaluate and dev belong together", got="one of them", try_="evaluate=..., dev=...")
    line = ProgressLine(epochs=options.get("epochs", 1))
    is_first = read_rank_info().is_first
    told = line if show == "line" else show
    if not is_first:
        told = None
    elif notify:
        told = DesktopNotifier("train", show=told, say=line.say)
    given = resolve_auto_batch_size(
        model, data, loss=loss, optimizer=optimizer, options=options, may_measure=measure, show=told
    )
    with given as (optimizer, options):
        session = Session(model, optimizer, data, show=told, **options)
        if measure:
            session.tune(loss, open_bench=open_bench)
        metrics = _train(session, loss, evaluate, val=val, test=test)
    result = TrainResult(
        path=None if session.run is None else session.run.path,
        state="done" if session.is_finished else "stopped",
        step=session.progress.step,
        metrics=metrics,
        exit_code=session.exit_code,
    )
    if show == "line" and is_first and result.state == "done":
        line.say(_summary(result))
    return result


def _train(session: Session, loss: LossFunction, evaluate: Evaluate | None, *, val: Any, test: Any) -> dict[str, float]:
    """The loop itself; what the last evaluation gave."""
    metrics: dict[str, float] = {}
    with session:
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
    shown = "".join(f", {name} {value:.4g}" for name, value in result.metrics.items())
    kept = f"; kept in {result.path}: whet report, or whet.open_run(...).plot()" if result.path else ""
    return f"train: done at step {result.step:,}{shown}{kept}"
