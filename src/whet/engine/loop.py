"""train(): the loop, top to bottom, written on Session and on nothing else."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.data.batch import Micro
from whet.engine.session import Session
from whet.step.loss import LossFunction
from whet.step.optimizer import OptimizerChoice

Evaluate = Callable[[nn.Module, Iterator[Micro]], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
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
    dev: Any = None,
    test: Any = None,
    **options: Any,
) -> Result:
    """Trains a model: probes, plans, trains, checkpoints; call it again with the same `run` and it resumes.

    `loss` receives a micro-batch and returns a mean over its samples, or a pair (sum, weight). `evaluate` receives the
    model and micro-batches of `dev` and returns metrics; of `test` too, once, when all steps are done. All other
    options are Session's: global_batch_size, epochs, run, device, seed, schedule, clip, ema, ...
    """
    metrics: dict[str, float] = {}
    with Session(model, optimizer, data, **options) as session:
        for batch in session:
            session.step(loss, batch)
            if evaluate is not None and session.due("evaluate"):
                metrics |= session.evaluate(evaluate, dev)
        if evaluate is not None and test is not None and session.is_finished:
            metrics |= session.evaluate(evaluate, test, prefix="test_")
    return Result(
        path=None if session.run is None else session.run.path,
        state="done" if session.is_finished else "stopped",
        step=session.progress.step,
        metrics=metrics,
        exit_code=session.exit_code,
    )
