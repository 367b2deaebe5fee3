"""How do machines compare? Their benchmarks of the same workload in one table."""

from collections.abc import Iterator, Sequence

from whet.base.errors import UsageError
from whet.base.units import show_count
from whet.plan.words import show_value
from whet.report.bench_words import Cells, machine_name, memory, rate
from whet.run.bench_result import BenchResult

_SAME = ("recipe", "num_parameters", "global_batch_size", "max_length")
"""What must be equal: otherwise a step is another step."""
_ALIKE = ("num_samples", "mean_length", "lengths_vary", "has_dropout")
"""What may differ with the data of a machine, and is said."""


def merged_table(results: Sequence[BenchResult]) -> Cells:
    """One line for each device of each machine, fastest first; the slowest is 1. Other workloads are refused."""
    first = results[0]
    for other in results[1:]:
        differing = [name for name in _SAME if getattr(other.workload, name) != getattr(first.workload, name)]
        if differing:
            raise UsageError(
                "these are benchmarks of different workloads, so their speeds cannot be compared",
                got=f"{workload_words(first)} and {workload_words(other)}",
                try_=f"the same {', '.join(differing)} on each machine",
            )
    found = [
        (result, row, row.samples_per_second)
        for result in results
        for row in result.best_by_device()
        if row.samples_per_second is not None
    ]
    if not found:
        raise UsageError("nothing was measured in these benchmarks", got="no row", try_="whet bench RECIPE again")
    slowest = min(speed.middle for _, _, speed in found)
    lines = [
        (
            machine_name(result),
            show_value(row.execution.get("device")),
            show_value(row.execution.get("precision")),
            show_value(row.execution.get("micro_batch")),
            rate(speed),
            f"{speed.middle / slowest:.1f}x",
            memory(row),
            result.machine.torch.version or "unknown",
            result.created,
        )
        for result, row, speed in sorted(found, key=lambda one: -one[2].middle)
    ]
    return [_HEAD, *lines]


_HEAD = ("machine", "device", "precision", "micro-batch", "samples/s", "relative", "memory", "torch", "measured")


def merged_notes(results: Sequence[BenchResult]) -> Iterator[str]:
    """What must be known to read the table."""
    yield f"workload: {workload_words(results[0])}; relative: against the slowest line"
    yield "machines were measured one by one, not in pairs: their ratios carry the noise of both"
    simulated = dict.fromkeys(result.machine.name for result in results if result.is_simulated)
    if simulated:
        yield f"simulated, so nothing is known about the real machine: {', '.join(simulated)}"
    empty = [machine_name(result) for result in results if not any(result.best_by_device())]
    if empty:
        yield f"nothing was measured, so without a line: {', '.join(empty)}"
    differing = [name for name in _ALIKE if len({getattr(result.workload, name) for result in results}) > 1]
    if differing:
        yield f"the data is not the same on all machines: {', '.join(differing)} differ"
    if len({result.versions.get("whet") for result in results}) > 1:
        yield "not all were measured by the same whet"


def workload_words(result: BenchResult) -> str:
    """The workload as far as it must be the same on all machines."""
    workload = result.workload
    return (
        f"{workload.recipe}, {show_count(workload.num_parameters)} parameters, "
        f"global batch {workload.global_batch_size}, lengths up to {workload.max_length}"
    )
