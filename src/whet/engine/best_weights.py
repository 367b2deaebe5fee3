"""Which weights does the test part judge? The best by the goal, put into the model for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.checkpoint.snapshot import Snapshot, restore_model
from whet.engine.keeper import Keeper
from whet.engine.progress import Progress
from whet.step.ema import named_tensors
from whet.step.step import Stepper
from whet.world.rows import held


@contextmanager
def best_weights(stepper: Stepper, keeper: Keeper | None, progress: Progress) -> Iterator[int]:
    """While entered the model has the weights of the best step, which is given; its own where they are the best.

    Without a run folder, and where the checkpoint is gone or damaged, the newest ones stay in place.
    """
    best = None if keeper is None else keeper.best(progress)
    if best is None:
        yield progress.step
        return
    kept = {name: held(tensor).to("cpu", copy=True) for name, tensor in _live(stepper).items()}
    try:
        _put(best, stepper)
        yield int(best.facts["step"])
    finally:
        with torch.no_grad():
            for name, tensor in _live(stepper).items():
                held(tensor).copy_(kept[name])


def _put(best: Snapshot, stepper: Stepper) -> None:
    restore_model(best, stepper.model)
    if stepper.ema is None:
        return
    for name, average in stepper.ema.average.items():
        if f"ema/{name}" not in best.tensors:
            raise WhetError("the best checkpoint has no average", got=name, try_="ema as when the run was started")
        held(average).copy_(best.tensors[f"ema/{name}"])


def _live(stepper: Stepper) -> dict[str, Tensor]:
    """The weights and their average; looked up each time, since a forward pass may replace a buffer."""
    live = {f"model/{name}": tensor.detach() for name, tensor in named_tensors(stepper.model)}
    averages = {} if stepper.ema is None else stepper.ema.average
    return live | {f"ema/{name}": tensor for name, tensor in averages.items()}
