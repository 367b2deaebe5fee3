"""Bit-exact comparison of the results of two runs."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.checkpoint import encoding, store
from whet.checkpoint.encoding import as_bytes
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.run.proof import ComparedCounts, ProofDifference

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The last checkpoint of a finished run, its losses and its metrics."""

    tensors: "dict[str, Tensor]"
    """The tensors of the model, EMA, optimizer and random generators."""
    facts: dict[str, Any]
    """The JSON part of the checkpoint: everything that is not a tensor."""
    losses: dict[int, float | None]
    """The loss of each step."""
    metrics: dict[tuple[int, str], Any]
    """The metrics by step and name."""

    def compared(self, *, runs: int, ignored_metrics: Collection[str]) -> ComparedCounts:
        """Return the numbers of tensors, losses and metrics that a comparison with this result covers."""
        return ComparedCounts(
            tensors=len(self.tensors),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values()),
            losses=len(self.losses),
            metrics=sum(name not in ignored_metrics for _, name in self.metrics),
            runs=runs,
            left_out=tuple(sorted(ignored_metrics)),
        )


def read_result(run: Path) -> RunResult:
    """Read the last checkpoint, the losses and the metrics of a finished run."""
    opened = open_run(run)
    newest = store.load_newest(opened.checkpoints, run_id=opened.header.id)
    assert newest is not None, "a finished run has a checkpoint"
    return RunResult(
        tensors=newest.snapshot.tensors,
        facts=newest.snapshot.facts,
        losses={event.step: event.number("loss") for event in read_events(opened, kinds=("step",))},
        metrics={(e.step, name): v for e in read_events(opened, kinds=("eval",)) for name, v in e.fields.items()},
    )


def nondeterministic_metrics(one: RunResult, other: RunResult) -> set[str]:
    """Return the names of metrics that differ between two uninterrupted runs, such as durations."""
    keys = one.metrics.keys() | other.metrics.keys()
    return {key[1] for key in keys if not _is_same(one.metrics.get(key), other.metrics.get(key))}


def first_difference(
    expected: RunResult, got: RunResult, *, ignored_metrics: Collection[str] = ()
) -> ProofDifference | None:
    """Return the first difference between two results, or None if every bit is equal."""
    names = sorted(expected.tensors.keys() | got.tensors.keys())
    unequal = [name for name in names if not _has_equal_bits(expected, got, name)]
    steps = sorted(expected.losses.keys() | got.losses.keys())
    step = next((s for s in steps if not _is_same(expected.losses.get(s, "none"), got.losses.get(s, "none"))), None)
    if unequal:
        name = unequal[0]
        a, b = expected.tensors.get(name), got.tensors.get(name)
        largest = None if a is None or b is None or a.shape != b.shape else float((a.double() - b.double()).abs().max())
        by = "" if largest is None else f", by up to {largest:.3g}"
        at = "" if step is None else f"; losses differ from step {step:,} on"
        count = f"{len(unequal)} of {len(expected.tensors)} tensors differ"
        return ProofDifference(what=f"{count}, {name} first{by}{at}", tensor=name, largest=largest, step=step)
    if step is not None:
        before, now = expected.losses.get(step), got.losses.get(step)
        return ProofDifference(what=f"the loss of step {step:,} is {now!r} instead of {before!r}", step=step)
    if encoding.dump_json(expected.facts) != encoding.dump_json(got.facts):
        return ProofDifference(
            what=f"the facts of the last checkpoint differ: {_first_fact(expected.facts, got.facts)}"
        )
    for key in sorted(expected.metrics.keys() | got.metrics.keys()):
        if key[1] not in ignored_metrics and not _is_same(expected.metrics.get(key), got.metrics.get(key)):
            values = f"{got.metrics.get(key)!r} instead of {expected.metrics.get(key)!r}"
            return ProofDifference(what=f"the metric {key[1]} at step {key[0]:,} is {values}", step=key[0])
    return None


def detects_differences(result: RunResult) -> bool:
    """Return whether the comparison detects one flipped bit in a tensor, and a loss that differs by one ulp."""
    name = next((name for name, tensor in sorted(result.tensors.items()) if tensor.numel()), None)
    if name is None or not result.losses:
        return False
    flipped = result.tensors[name].clone()
    as_bytes(flipped)[0] ^= 1
    step, loss = next(iter(result.losses.items()))
    other_tensor = replace(result, tensors={**result.tensors, name: flipped})
    other_loss = replace(result, losses={**result.losses, step: math.nextafter(loss or 0.0, math.inf)})
    differences = [first_difference(result, other) for other in (result, other_tensor, other_loss)]
    return [None if difference is None else (difference.tensor, difference.step) for difference in differences] == [
        None,
        (name, None),
        (None, step),
    ]


def _has_equal_bits(expected: RunResult, got: RunResult, name: str) -> bool:
    a, b = expected.tensors.get(name), got.tensors.get(name)
    if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.numel() == 0 or as_bytes(a) == as_bytes(b)


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two values have the same type and representation. NaN equals NaN, and 0.0 differs from -0.0."""
    return type(a) is type(b) and (
        repr(a) == repr(b) if isinstance(a, float) and math.isfinite(a) else str(a) == str(b)
    )


def _first_fact(expected: Any, got: Any, *, path: str = "") -> str:
    """Describe the first difference between two JSON values, with its path."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for name in sorted(expected.keys() | got.keys()):
            if expected.get(name) != got.get(name):
                return _first_fact(expected.get(name), got.get(name), path=f"{path}/{name}" if path else name)
    return f"{path} is {got!r} instead of {expected!r}"[:300]
