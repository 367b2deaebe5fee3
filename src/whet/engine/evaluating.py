"""Evaluation: with the averaged weights if there are any, in eval mode, and without a trace in the training."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from whet.base.errors import UsageError
from whet.checkpoint.randomness import undisturbed
from whet.data.batch import Micro, Position
from whet.data.cut import Lengths
from whet.data.share import Share
from whet.data.source import AbstractSource
from whet.engine.building import Parts, open_planned_source
from whet.engine.findings import read_findings
from whet.plan.plan import Plan

Evaluate = Callable[[nn.Module, Iterator[Micro]], Mapping[str, Any]]
"""Gives metrics, and perhaps what `whet.engine.findings` tells of."""


@runtime_checkable
class Shared(Protocol):
    """An evaluation that several processes can share: each tallies the samples it sees, one draws the conclusion."""

    def __call__(self, model: nn.Module, micros: Iterator[Micro], /) -> Mapping[str, Any]: ...

    def tally(self, model: nn.Module, micros: Iterator[Micro], /) -> Any:
        """What is known of these samples, as plain JSON; there may be none."""

    def conclude(self, model: nn.Module, tallies: list[Any], /) -> Mapping[str, Any]:
        """The metrics of all of them."""


_MOST_SOURCES = 4
"""Data sets that stay open: who makes a new one for every evaluation must not collect workers."""


class Evaluator:
    """Evaluates one model on any data; each data set is opened once."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sources: dict[tuple[int, int, int], tuple[AbstractSource, Any]] = {}

    def run(self, evaluate: Evaluate, data: Any, *, plan: Plan) -> dict[str, Any]:
        """What was found; generators, modes and weights are as before when this returns."""
        model, ema = self._parts.stepper.model, self._parts.stepper.ema
        modes = [(module, module.training) for module in model.modules()]
        averaged = ema.in_place() if ema else contextlib.nullcontext()
        device, joining = self._parts.device, self._parts.stepper.joining
        with torch.no_grad(), undisturbed(device), averaged, joining.evaluating(), device.computing():
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
            return _read(evaluate(model, self.batches(data, plan=plan)))
        if isinstance(evaluate, Shared):
            tallies = group.gather(evaluate.tally(model, self._own_batches(data, plan=plan)))
            found = _read(evaluate.conclude(model, tallies)) if group.is_first else None
        else:
            found = _read(evaluate(model, self.batches(data, plan=plan))) if group.is_first else None
        told: dict[str, Any] = group.share(found)
        return told

    def batches(self, data: Any, *, plan: Plan) -> Iterator[Micro]:
        """Data in its own order, on the device, as much at once as the plan evaluates."""
        return self._micros(data, plan=plan, share=Share())

    def _own_batches(self, data: Any, *, plan: Plan) -> Iterator[Micro]:
        """What this process evaluates: with what the others do, every sample once."""
        world = self._parts.group.world
        micros = self._micros(data, plan=plan, share=Share(rank=world.rank, size=world.size))
        return (micro for micro in micros if micro.counts)

    def _micros(self, data: Any, *, plan: Plan, share: Share) -> Iterator[Micro]:
        device = self._parts.device
        size = plan.value("eval_batch")
        assert isinstance(size, int)
        how: Lengths = str(plan.value("lengths"))  # type: ignore[assignment]
        key = id(data), size, share.size
        if key not in self._sources:
            if len(self._sources) >= _MOST_SOURCES:
                oldest, _ = self._sources.pop(next(iter(self._sources)))
                oldest.close()
            # With the data itself, so that its id stays taken.
            opened = open_planned_source(data, device, plan, global_batch_size=size * share.size, share=share)
            self._sources[key] = opened, data
        source, _ = self._sources[key]
        for batch in source.batches(Position()):
            for micro in source.micros(batch, micro_batch=size, how=how):
                yield micro.moved(device.put)

    def close(self) -> None:
        """Ends the workers that read."""
        for source, _ in self._sources.values():
            source.close()


def _read(found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise UsageError("evaluate must return metrics", got=type(found).__name__, try_='{"accuracy": 0.9}')
    return read_findings(found)
