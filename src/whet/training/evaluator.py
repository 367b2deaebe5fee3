"""Evaluate a model without side effects on training."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError
from whet.checkpoint.snapshot import Snapshot, restore_model
from whet.data.adapters import AbstractSource
from whet.data.batch import MicroBatch, Position
from whet.data.split import LengthMode, RankShare
from whet.device.rng import preserve_rng
from whet.distributed.strategies import local_tensor
from whet.plan.plan import Plan
from whet.step.ema import named_tensors
from whet.step.step import Stepper
from whet.training.building import TrainingParts, open_source_for_plan
from whet.training.callback import State
from whet.training.checkpointer import Checkpointer
from whet.training.metrics import normalize_metrics


@contextmanager
def use_best_weights(stepper: Stepper, keeper: Checkpointer | None, progress: State) -> Iterator[int]:
    """While entered the model has the weights of the best step, which is given; its own where they are the best.

    Without a run folder, and where the checkpoint is gone or damaged, the newest ones stay in place.
    """
    best = None if keeper is None else keeper.best(progress)
    if best is None:
        yield progress.step
        return
    kept = {name: local_tensor(tensor).to("cpu", copy=True) for name, tensor in _live_tensors(stepper).items()}
    try:
        _load_snapshot(best, stepper)
        yield int(best.facts["step"])
    finally:
        with torch.no_grad():
            for name, tensor in _live_tensors(stepper).items():
                local_tensor(tensor).copy_(kept[name])


def _load_snapshot(best: Snapshot, stepper: Stepper) -> None:
    restore_model(best, stepper.model)
    if stepper.ema is None:
        return
    for name, average in stepper.ema.average.items():
        if f"ema/{name}" not in best.tensors:
            raise WhetError("the best checkpoint has no average", got=name, try_="ema as when the run was started")
        local_tensor(average).copy_(best.tensors[f"ema/{name}"])


def _live_tensors(stepper: Stepper) -> dict[str, Tensor]:
    """The weights and their average; looked up each time, since a forward pass may replace a buffer."""
    live = {f"model/{name}": tensor.detach() for name, tensor in named_tensors(stepper.model)}
    averages = {} if stepper.ema is None else stepper.ema.average
    return live | {f"ema/{name}": tensor for name, tensor in averages.items()}


Evaluate = Callable[[nn.Module, Iterator[MicroBatch]], Mapping[str, Any]]
"""Gives metrics, and perhaps what `whet.training.metrics` tells of."""


@runtime_checkable
class ShardedEvaluation(Protocol):
    """An evaluation that several processes can share: each tallies the samples it sees, one draws the conclusion."""

    def __call__(self, model: nn.Module, micro_batches: Iterator[MicroBatch], /) -> Mapping[str, Any]: ...

    def tally(self, model: nn.Module, micro_batches: Iterator[MicroBatch], /) -> Any:
        """What is known of these samples, as plain JSON; there may be none."""

    def conclude(self, model: nn.Module, tallies: list[Any], /) -> Mapping[str, Any]:
        """The metrics of all of them."""


_MAX_OPEN_SOURCES = 4
"""Data sets that stay open: who makes a new one for every evaluation must not collect workers."""


class Evaluator:
    """Evaluates one model on any data; each data set is opened once."""

    def __init__(self, parts: TrainingParts) -> None:
        self._parts = parts
        self._sources: dict[tuple[int, int, int], tuple[AbstractSource, Any]] = {}

    def run(self, evaluate: Evaluate, data: Any, *, plan: Plan) -> dict[str, Any]:
        """What was found; generators, modes and weights are as before when this returns."""
        model, ema = self._parts.stepper.model, self._parts.stepper.ema
        modes = [(module, module.training) for module in model.modules()]
        averaged = ema.in_place() if ema else contextlib.nullcontext()
        device, joining = self._parts.device, self._parts.stepper.strategy
        with torch.no_grad(), preserve_rng(device), averaged, joining.evaluating(), device.compute_context():
            model.eval()
            try:
                return self._found(evaluate, data, plan=plan)
            finally:
                for module, mode in modes:
                    module.training = mode

    def _found(self, evaluate: Evaluate, data: Any, *, plan: Plan) -> dict[str, Any]:
        """By one process on all of it; by several on a part each, where the evaluation can be put together again."""
        model, group = self._parts.stepper.model, self._parts.group
        if group.is_alone:
            return _validated_metrics(evaluate(model, self.batches(data, plan=plan)))
        if isinstance(evaluate, ShardedEvaluation):
            tallies = group.gather(evaluate.tally(model, self._own_batches(data, plan=plan)))
            found = _validated_metrics(evaluate.conclude(model, tallies)) if group.is_first else None
        else:
            found = _validated_metrics(evaluate(model, self.batches(data, plan=plan))) if group.is_first else None
        told: dict[str, Any] = group.share(found)
        return told

    def batches(self, data: Any, *, plan: Plan) -> Iterator[MicroBatch]:
        """Data in its own order, on the device, as much at once as the plan evaluates."""
        return self._micros(data, plan=plan, share=RankShare())

    def _own_batches(self, data: Any, *, plan: Plan) -> Iterator[MicroBatch]:
        """What this process evaluates: with what the others do, every sample once."""
        world = self._parts.group.world
        micro_batches = self._micros(data, plan=plan, share=RankShare(rank=world.rank, size=world.size))
        return (micro for micro in micro_batches if micro.is_counted)

    def _micros(self, data: Any, *, plan: Plan, share: RankShare) -> Iterator[MicroBatch]:
        device = self._parts.device
        size = plan.eval_batch
        assert isinstance(size, int)
        length_mode: LengthMode = plan.lengths
        key = id(data), size, share.size
        if key not in self._sources:
            if len(self._sources) >= _MAX_OPEN_SOURCES:
                oldest, _ = self._sources.pop(next(iter(self._sources)))
                oldest.close()
            # With the data itself, so that its id stays taken.
            opened = open_source_for_plan(data, device, plan, global_batch_size=size * share.size, share=share)
            self._sources[key] = opened, data
        source, _ = self._sources[key]
        for batch in source.batches(Position()):
            for micro in source.micro_batches(batch, micro_batch=size, length_mode=length_mode):
                yield micro.map_tensors(device.put)

    def close(self) -> None:
        """Ends the workers that read."""
        for source, _ in self._sources.values():
            source.close()


def _validated_metrics(found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise UsageError("evaluate must return metrics", got=type(found).__name__, try_='{"accuracy": 0.9}')
    return normalize_metrics(found)
