"""Evaluation of a model, without side effects on training."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError
from whet.checkpoint.snapshot import Snapshot, copy_model
from whet.checkpoint.snapshot_restore import restore_model
from whet.data.batch import MicroBatch, Position
from whet.data.source import AbstractSource
from whet.data.split import RankShare
from whet.device.rng import preserve_rng
from whet.distributed.strategies import local_tensor
from whet.step.apply_plan import open_planned_source
from whet.step.loss import MicroLoss, parse_loss
from whet.step.step import Stepper
from whet.training.metrics import normalize_metrics
from whet.training.workload import pad_token_id

if TYPE_CHECKING:
    from whet.training.run_context import RunContext


Evaluate = Callable[[nn.Module, Iterator[Any]], Mapping[str, Any]]
"""A function of the model and an iterator of micro-batches, which have the type of the user's batch.

It returns metrics and optionally a confusion matrix, scores by class, and samples (metrics.py).
"""

_MAX_OPEN_SOURCES = 4
"""Maximum number of open datasets. A user may pass a new one to each evaluation, and each may start workers."""


@runtime_checkable
class ShardedEvaluation(Protocol):
    """An evaluation that is divided between ranks.

    Each rank evaluates its samples; rank 0 merges the partial metrics.
    """

    def __call__(self, model: nn.Module, micro_batches: Iterator[Any], /) -> Mapping[str, Any]: ...

    def partial_metrics(self, model: nn.Module, micro_batches: Iterator[Any], /) -> Any:
        """Return the partial metrics of these samples as plain JSON. The iterator may be empty."""

    def merge_metrics(self, model: nn.Module, parts: list[Any], /) -> Mapping[str, Any]:
        """Merge the partial metrics of all ranks."""


class LossEvaluation:
    """The loss function as an evaluation: a mean over all samples, or the sum of losses divided by the sum of weights.

    Unlike a user's evaluation, it receives MicroBatch objects, because it needs their number of samples.
    """

    def __init__(self, loss: MicroLoss, autocast: Callable[[], AbstractContextManager[object]]) -> None:
        self._loss = loss
        self._autocast = autocast

    def __call__(self, model: nn.Module, micro_batches: Iterator[MicroBatch], /) -> dict[str, float]:
        return self.merge_metrics(model, [self.partial_metrics(model, micro_batches)])

    def partial_metrics(self, _model: nn.Module, micro_batches: Iterator[MicroBatch], /) -> tuple[float, float]:
        """Return the sum of losses and the sum of weights."""
        totals: list[Tensor] = []
        weights: list[Tensor] = []
        for micro in micro_batches:
            with self._autocast():
                total, weight = parse_loss(self._loss(micro))
            weights.append(torch.as_tensor(len(micro) if weight is None else weight))
            totals.append(total * len(micro) if weight is None else total)
        # Read the values at the end: reading each loss would wait for the device in every micro-batch. They are summed
        # on the host in float64, which MPS does not support.
        return _sum_on_host(totals), _sum_on_host(weights)

    def merge_metrics(self, _model: nn.Module, parts: list[Any], /) -> dict[str, float]:
        weight = math.fsum(part[1] for part in parts)
        return {"loss": math.fsum(part[0] for part in parts) / weight if weight > 0 else 0.0}


def _sum_on_host(values: list[Tensor]) -> float:
    return math.fsum(value.item() for value in values)


class Evaluator:
    """Evaluates the model of a run on any data. Datasets stay open for later evaluations."""

    def __init__(self, run: "RunContext") -> None:
        self._run = run
        self._sources: dict[tuple[int, int, int], tuple[AbstractSource, Any]] = {}

    def run(self, evaluate: Evaluate, data: Any) -> dict[str, Any]:
        """Evaluate in eval mode with the averaged weights, then restore weights, modes and random generators.

        A precision that the user has set applies too.
        """
        stepper, device = self._run.stepper, self._run.device
        model, ema = stepper.model, stepper.ema
        # Save the mode of each module: model.train() would also switch modules that were in eval mode before.
        modes = [(module, module.training) for module in model.modules()]
        averaged = ema.in_place() if ema else contextlib.nullcontext()
        with (
            torch.no_grad(),
            preserve_rng(device),
            averaged,
            stepper.strategy.evaluation_context(),
            device.compute_context(),
            self._run.users_autocast(),
        ):
            model.eval()
            try:
                return self._metrics(evaluate, data)
            finally:
                for module, mode in modes:
                    module.training = mode

    def batches(self, data: Any) -> Iterator[Any]:
        """Yield micro-batches of `data` on the device, in original order and with the planned evaluation batch size."""
        return (micro.data for micro in self._micro_batches(data, RankShare()))

    def close(self) -> None:
        """Stop the data workers."""
        for source, _ in self._sources.values():
            source.close()

    def _metrics(self, evaluate: Evaluate, data: Any) -> dict[str, Any]:
        """Evaluate all data.

        Several ranks share the work if the evaluation supports that; otherwise rank 0 does it all.
        """
        model, group = self._run.model, self._run.group
        if group.is_single_process:
            return _normalized(evaluate(model, _as_data(evaluate, self._micro_batches(data, RankShare()))))
        if isinstance(evaluate, ShardedEvaluation):
            parts = group.all_gather(evaluate.partial_metrics(model, _as_data(evaluate, self._own_batches(data))))
            metrics = _normalized(evaluate.merge_metrics(model, parts)) if group.is_rank_zero else None
        else:
            metrics = _normalized(evaluate(model, self.batches(data))) if group.is_rank_zero else None
        shared: dict[str, Any] = group.broadcast(metrics)
        return shared

    def _own_batches(self, data: Any) -> Iterator[MicroBatch]:
        """Yield the part of the data that this rank evaluates. Together, the ranks see every sample once."""
        ranks = self._run.group.ranks
        micro_batches = self._micro_batches(data, RankShare(rank=ranks.rank, size=ranks.size))
        # Micro-batches that are not counted are repetitions, which only training needs to keep the ranks in step.
        return (micro for micro in micro_batches if micro.is_counted)

    def _micro_batches(self, data: Any, share: RankShare) -> Iterator[MicroBatch]:
        """Yield micro-batches. Autocast is off while they are read, because a dataset may compute something too."""
        micro_batches = self._read(data, share)
        while True:
            with torch.autocast(self._run.device.torch_device.type, enabled=False):
                micro = next(micro_batches, None)
            if micro is None:
                return
            yield micro

    def _read(self, data: Any, share: RankShare) -> Iterator[MicroBatch]:
        device, plan = self._run.device, self._run.plan
        size = plan.eval_batch
        key = id(data), size, share.size
        if key not in self._sources:
            if len(self._sources) >= _MAX_OPEN_SOURCES:
                oldest, _ = self._sources.pop(next(iter(self._sources)))
                oldest.close()
            source = open_planned_source(
                data,
                device,
                plan,
                global_batch_size=size * share.size,
                share=share,
                # A DataLoader has its own collate function. All other data uses the collate function of the training
                # data.
                collate_fn=self._run.config.training.collate_fn,
                pad_token_id=pad_token_id(self._run.model),
            )
            # Keep a reference to the data, so that its id cannot be reused by another object.
            self._sources[key] = source, data
        source, _ = self._sources[key]
        for batch in source.batches(Position()):
            # A loss that needs whole batches is evaluated on whole batches too.
            micro_batch = size if self._run.divides_batches else len(batch)
            for micro in source.micro_batches(batch, micro_batch=micro_batch, length_mode=plan.lengths):
                yield micro.map_tensors(device.put)


def _as_data(evaluate: Evaluate, micro_batches: Iterator[MicroBatch]) -> Iterator[Any]:
    return micro_batches if isinstance(evaluate, LossEvaluation) else (micro.data for micro in micro_batches)


def _normalized(metrics: Any) -> dict[str, Any]:
    if not isinstance(metrics, Mapping):
        raise UsageError("evaluate must return metrics", got=type(metrics).__name__, try_='{"accuracy": 0.9}')
    return normalize_metrics(metrics)


@contextmanager
def use_best_weights(run: "RunContext") -> Iterator[int]:
    """Load the weights of the best step inside the `with` block, and yield that step.

    Without a run folder, or if the checkpoint is missing or damaged, the newest weights are kept.
    """
    best = None if run.checkpointer is None else run.checkpointer.best()
    if best is None:
        yield run.state.step
        return
    stepper = run.stepper
    before = copy_model(stepper.model)
    averages = {} if stepper.ema is None else stepper.ema.average
    saved = {name: local_tensor(tensor).to("cpu", copy=True) for name, tensor in averages.items()}
    try:
        _load_snapshot(best, stepper)
        yield int(best.facts["step"])
    finally:
        restore_model(before, stepper.model)
        if stepper.ema is not None:
            stepper.ema.average = averages
        for name, tensor in averages.items():
            local_tensor(tensor).copy_(saved[name])


def _load_snapshot(best: Snapshot, stepper: Stepper) -> None:
    restore_model(best, stepper.model)
    if stepper.ema is None:
        return
    stepper.ema.follow_model()
    for name, average in stepper.ema.average.items():
        if f"ema/{name}" not in best.tensors:
            raise WhetError(
                "the best checkpoint has no EMA weights", got=name, try_="ema=False, as when the run was started"
            )
        local_tensor(average).copy_(best.tensors[f"ema/{name}"])
