"""Evaluation: with the averaged weights if there are any, in eval mode, and without a trace in the training."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from whet.base.errors import UsageError
from whet.checkpoint.randomness import undisturbed
from whet.data.batch import Micro, Position
from whet.data.cut import Lengths
from whet.data.source import AbstractSource
from whet.engine.building import Parts, open_planned_source
from whet.engine.findings import read_findings
from whet.plan.plan import Plan

Evaluate = Callable[[nn.Module, Iterator[Micro]], Mapping[str, Any]]
"""Gives metrics, and perhaps what `whet.engine.findings` tells of."""


_MOST_SOURCES = 4
"""Data sets that stay open: who makes a new one for every evaluation must not collect workers."""


class Evaluator:
    """Evaluates one model on any data; each data set is opened once."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sources: dict[tuple[int, int], tuple[AbstractSource, Any]] = {}

    def run(self, evaluate: Evaluate, data: Any, *, plan: Plan) -> dict[str, Any]:
        """What was found; generators, modes and weights are as before when this returns."""
        model, ema = self._parts.stepper.model, self._parts.stepper.ema
        modes = [(module, module.training) for module in model.modules()]
        averaged = ema.in_place() if ema else contextlib.nullcontext()
        device = self._parts.device
        with torch.no_grad(), undisturbed(device), averaged, device.computing():
            model.eval()
            try:
                found = evaluate(model, self.batches(data, plan=plan))
                if not isinstance(found, Mapping):
                    raise UsageError("evaluate must return metrics", got=type(found).__name__, try_='{"accuracy": 0.9}')
                return read_findings(found)
            finally:
                for module, mode in modes:
                    module.training = mode

    def batches(self, data: Any, *, plan: Plan) -> Iterator[Micro]:
        """Data in its own order, on the device, as much at once as the plan evaluates."""
        device = self._parts.device
        size = plan.value("eval_batch")
        assert isinstance(size, int)
        how: Lengths = str(plan.value("lengths"))  # type: ignore[assignment]
        key = id(data), size
        if key not in self._sources:
            if len(self._sources) >= _MOST_SOURCES:
                oldest, _ = self._sources.pop(next(iter(self._sources)))
                oldest.close()
            # With the data itself, so that its id stays taken.
            self._sources[key] = (open_planned_source(data, device, plan, global_batch_size=size), data)
        source, _ = self._sources[key]
        for batch in source.batches(Position()):
            for micro in source.micros(batch, micro_batch=size, how=how):
                yield micro.moved(device.put)

    def close(self) -> None:
        """Ends the workers that read."""
        for source, _ in self._sources.values():
            source.close()
