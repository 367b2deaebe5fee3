"""Overhead of the distributed code paths in a single process, compared with a plain step.

    python benchmarks/ddp_overhead.py [--device cuda|cpu] [--seconds 20] [--tasks text chat] [--precision bf16]
                                      [--processor-time]

Whole optimizer steps of the same model on the same batches. "torchrun" is what `torchrun --nproc-per-node 1 -m whet
train` runs: a world of one process, for which whet creates no process group; its target is 1.02. "machinery" forces DDP
with a group of one (NCCL on CUDA, gloo on the CPU): the buckets, hooks and collectives that each of several processes
pays for in addition to the network. The variants alternate in random order; ratios are computed within each round and
reported with the interval of their median. "in a row" is the time of a step without synchronization in between, as in a
training. `--processor-time` counts CPU time instead of wall-clock time, for a CPU with other load.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 - a group of one, which whet never opens
from graphs import TASKS, lengths_of

from whet.autotune.statistics import median_interval
from whet.data.batch import GlobalBatch, Position
from whet.data.source import AbstractSource
from whet.device.abstract import AbstractDevice
from whet.device.open import current_machine
from whet.distributed.group import RankGroup
from whet.distributed.ranks import RankInfo
from whet.plan.plan import Plan, make_plan
from whet.step.apply_plan import build_stepper, make_strategy, open_planned_device, open_planned_source, place_model
from whet.step.step import Stepper
from whet.training.training_config import parse_training_config
from whet.training.workload import describe_workload

NUM_BATCHES = 16
ROW_STEPS = 20


class GroupOfOne(RankGroup):
    """A process group of one that runs the full distributed code path."""

    def __init__(self, ranks: RankInfo) -> None:
        super().__init__(ranks)
        self.is_single_process = False


@dataclass
class Parts:
    """A plan applied to a model, ready for steps."""

    plan: Plan
    device: AbstractDevice
    source: AbstractSource
    stepper: Stepper


def parts_of(name: str, *, device: str, is_large: bool, precision: str, group: RankGroup) -> tuple[Parts, Any]:
    torch.manual_seed(0)
    task = TASKS[name](is_large=is_large)
    training = parse_training_config(task.training)
    machine, system_state = current_machine()
    overrides = {"device": device, "precision": precision, "threads": 1, **lengths_of(name)}
    workload = task.workload or describe_workload(task.model, task.data, training, recipe=name)
    plan = make_plan(machine, workload, overrides=overrides, system_state=system_state)
    plan, opened, _ = open_planned_device(plan, group.ranks)
    group.use_device(opened)
    source = open_planned_source(
        task.data, opened, plan, global_batch_size=training.global_batch_size, seed=training.seed, shuffle=True
    )
    own = task.optimizer if isinstance(task.optimizer, torch.optim.Optimizer) else None
    place_model(plan, task.model, opened, optimizer=own)
    strategy = make_strategy(task.model, group, plan, opened)
    stepper, _ = build_stepper(plan, task.model, task.optimizer, opened, clip=training.clip, strategy=strategy)
    return Parts(plan=plan, device=opened, source=source, stepper=stepper), task.loss


def step(parts: Parts, loss: Any, batch: GlobalBatch, number: int) -> None:
    how = parts.plan.lengths
    micro_batches = parts.source.micro_batches(batch, micro_batch=len(batch), length_mode=how)  # type: ignore[arg-type]
    parts.stepper(loss, micro_batches, num_samples=len(batch), step=number)


Clock = Callable[[], float]


def timed(parts: Parts, loss: Any, batches: list[GlobalBatch], numbers: range, *, clock: Clock) -> float:
    parts.device.sync()
    start = clock()
    for number in numbers:
        step(parts, loss, batches[number % len(batches)], number + 1)
    parts.device.sync()
    return (clock() - start) / len(numbers)


def compare(name: str, *, device: str, precision: str, seconds: float, clock: Clock) -> None:
    is_large, rng = device == "cuda", random.Random(0)
    settings: dict[str, Any] = {"device": device, "is_large": is_large, "precision": precision}
    variants = {
        "plain": parts_of(name, group=RankGroup(RankInfo()), **settings),
        "torchrun": parts_of(name, group=RankGroup(RankInfo()), **settings),
        "machinery": parts_of(name, group=GroupOfOne(RankInfo()), **settings),
    }
    batches = {}
    for variant, (parts, loss) in variants.items():
        stream = parts.source.batches(Position())
        batches[variant] = [next(stream) for _ in range(NUM_BATCHES)]
        timed(parts, loss, batches[variant], range(NUM_BATCHES), clock=clock)  # Every shape has been there once.
    for kind, steps in (("one by one", 1), ("in a row", ROW_STEPS)):
        times: dict[str, list[float]] = {variant: [] for variant in variants}
        number, end = 0, time.perf_counter() + seconds / 2
        while time.perf_counter() < end or len(times["plain"]) < 8:
            for variant in rng.sample([*variants], len(variants)):
                times[variant].append(
                    timed(*variants[variant], batches[variant], range(number, number + steps), clock=clock)
                )
            number += steps
        plain = median_interval(times["plain"]).median
        print(f"{name:5} {kind:10} plain {plain * 1e3:8.2f} ms, {len(times['plain'])} rounds")
        for variant in ("torchrun", "machinery"):
            ratio = median_interval(
                [ours / theirs for ours, theirs in zip(times[variant], times["plain"], strict=True)]
            )
            bar = "" if variant == "machinery" else "  within 1.02" if ratio.median <= 1.02 else "  OVER 1.02"
            print(f"      {variant:10} {ratio.median:.3f} of plain ({ratio.low:.3f} to {ratio.high:.3f}){bar}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tasks", nargs="+", default=["text", "chat"], choices=["text", "chat"])
    parser.add_argument("--precision", default=None)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.processor_time else time.perf_counter
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    precision = args.precision or ("bf16" if args.device == "cuda" else "fp32")
    print(f"torch {torch.__version__}, {args.device}, {precision}, a group of one process ({backend})")
    for name in args.tasks:
        compare(name, device=args.device, precision=precision, seconds=args.seconds, clock=clock)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
