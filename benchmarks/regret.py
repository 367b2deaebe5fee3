"""Regret of the plan that whet finds within its budget, relative to the best of a grid, measured in one run.

    python benchmarks/regret.py [text chat conv] [--budget 60] [--device auto] [--rounds 10] [--no-compile] [--out FILE]

First the search of `whet plan --measure`. Then every cell of a grid over precision, micro-batch, lengths, optimizer
kernels and threads, in random order, with a few steps each; the three best are also compiled. Finally the plan and the
three best cells alternate `--rounds` times on the same batches: ratios are computed within each round, and the table
shows their median with its 95 % bootstrap interval. Half precision counts in the grid only where it computes the same
(whet's own bound).
"""

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from results import BELOW_TARGET, at_least
from workloads import TASKS, process_bench

from whet.autotune.candidates import device_kind
from whet.autotune.search import search
from whet.autotune.step_bench import ProbeFailedError
from whet.plan.setting import Scalar
from whet.training.step_bench import LocalPreparedStep, LocalStepBench

STEPS = 8
BEST = 3
BOUND = 0.05
Settings = Mapping[str, Scalar]


@dataclass(frozen=True)
class Cell:
    settings: Settings
    seconds: float = math.inf
    problem: str = ""


def grid(bench: LocalStepBench) -> list[Settings]:
    """Return the combinations that apply to the device."""
    plan = bench.plan
    kind, whole = device_kind(plan), plan.workload.global_batch_size
    axes: dict[str, list[Scalar]] = {
        "precision": ["fp32", "bf16"] if kind == "cpu" else ["fp32", "tf32", "bf16", "fp16"],
        "micro_batch": [max(1, whole // parts) for parts in (1, 2, 4, 8, 16)],
        "optimizer_kernels": ["fused", "foreach", "loop"],
    }
    if plan.workload.lengths_vary and kind == "cuda":
        axes["optimizer_kernels"] = ["fused", "foreach"]
    if plan.workload.lengths_vary:
        axes["lengths"] = ["fixed", "sorted", "bucketed", *(["packed"] if plan.workload.can_pack else [])]
        axes["micro_batch"] = axes["micro_batch"][:3]
    if kind == "cpu":
        axes["threads"] = list(dict.fromkeys([1, max(1, torch.get_num_threads() // 2), torch.get_num_threads()]))
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def measure(bench: LocalStepBench, settings: Settings) -> Cell:
    try:
        prepared = bench.prepare(settings, seconds=120)
        seconds = statistics.median(prepared.step(index) for index in range(STEPS))
        prepared.close()
    except ProbeFailedError as error:
        return Cell(settings, problem=error.reason)
    return Cell(settings, seconds)


def usable(bench: LocalStepBench, cells: list[Cell]) -> list[Cell]:
    """Drop cells in a precision that does not compute the same."""
    verdicts: dict[Scalar, bool] = {"fp32": True}
    for cell in cells:
        precision = cell.settings["precision"]
        if precision not in verdicts:
            verdicts[precision] = bench.agreement(cell.settings, seconds=60).agrees
    return [cell for cell in cells if verdicts[cell.settings["precision"]] and not cell.problem]


def alternate(ready: list[LocalPreparedStep], *, rounds: int, seed: int) -> list[list[float]]:
    """Return the seconds per step of each cell in each round."""
    coin, result = random.Random(seed), [[] for _ in ready]
    for number in range(rounds):
        order = list(range(len(ready)))
        coin.shuffle(order)
        for which in order:
            result[which].append(statistics.mean(ready[which].step(STEPS * number + index) for index in range(STEPS)))
    return result


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % bootstrap interval."""
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def shown(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "the rules' own"


def report(name: str, *, device: str, budget: float, rounds: int, compiles: bool) -> Iterator[str]:
    task = TASKS[name](is_large=device != "cpu")
    yield f"## {name}: {sum(p.numel() for p in task.model.parameters()):,} parameters"
    yield ""
    with process_bench(name, device=device) as elsewhere:
        result = search(elsewhere.plan, elsewhere, budget_seconds=budget)
    yield from (f"- {line}" for line in result.words)
    yield from (f"  - {trial.words} ({trial.spent_seconds:.1f} s)" for trial in result.trials)
    with task.bench(device=device, name=name) as bench:
        cells = [Cell(settings) for settings in grid(bench)]
        random.Random(1).shuffle(cells)
        start = time.perf_counter()
        cells = [measure(bench, cell.settings) for cell in cells]
        took = time.perf_counter() - start
        good = sorted(usable(bench, cells), key=lambda cell: cell.seconds)
        yield f"- grid: {len(cells)} cells in {took:.0f} s, {len(cells) - len(good)} failed or compute something else"
        if compiles:
            compiled = [measure(bench, {**cell.settings, "compile": "on"}) for cell in good[:BEST]]
            yield from (
                f"- {shown(cell.settings)}: {cell.problem or f'{1e3 * cell.seconds:.1f} ms'}" for cell in compiled
            )
            good = sorted([*good, *(cell for cell in compiled if not cell.problem)], key=lambda cell: cell.seconds)
        candidates = [result.settings, *(cell.settings for cell in good[:BEST])]
        ready = [bench.prepare(settings, seconds=120) for settings in candidates]
        times = alternate(ready, rounds=rounds, seed=2)
    yield ""
    yield "| settings | ms a step | plan over it | |"
    yield "| --- | --- | --- | --- |"
    worst = 0.0
    for settings, own in zip(candidates, times, strict=True):
        ratio, low, high = interval([ours / theirs for ours, theirs in zip(times[0], own, strict=True)])
        worst = max(worst, ratio - 1)
        verdict = "the plan" if settings is candidates[0] else ("ok" if ratio <= 1 + BOUND else "FALLS SHORT")
        spread = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        yield f"| {shown(settings)} | {1e3 * statistics.median(own):.2f} | {spread} | {verdict} |"
    yield ""
    yield f"regret {max(0.0, worst):.1%} (bound {BOUND:.0%}): {'ok' if worst <= BOUND else 'FALLS SHORT'}"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], default=list(TASKS))
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=at_least(1), default=10)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lines = [f"torch {torch.__version__}, {torch.get_num_threads()} threads, device {given.device}", ""]
    print(lines[0], flush=True)
    for name in given.tasks:
        for line in report(
            name, device=given.device, budget=given.budget, rounds=given.rounds, compiles=not given.no_compile
        ):
            lines.append(line)
            print(line, flush=True)
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")
    sys.exit(BELOW_TARGET if any("regret" in line and "FALLS SHORT" in line for line in lines) else 0)


if __name__ == "__main__":
    main()
