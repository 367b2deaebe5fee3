"""What whet costs: the bare PyTorch loop against Session and train() on the same step, interleaved in one run.

    python benchmarks/overhead.py [--rounds 15] [--steps 60] [--milliseconds 5]

Each round runs every way once, in an order that turns around (A B C, C B A, ...). A step is the time from one call of
the loss function to the next, so that set-up does not count and everything between steps does; the slowest tenth of
each way's steps is left out. A ratio is taken
inside a round; the table shows the median over rounds and the interval that holds it in 95 % of resamplings.
"""

import argparse
import copy
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from results import at_least
from torch import nn

import whet
from whet.data.order import epoch_order

BATCH = 32


class Stopwatch:
    """A loss function that notes when it is called."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[float] = []

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls.append(time.perf_counter())
        return nn.functional.cross_entropy(self.model(x), y)

    @property
    def seconds_per_step(self) -> float:
        """Without the slowest tenth of steps: those are the machine's other work, on whichever way they fall."""
        steps = sorted(later - earlier for earlier, later in itertools.pairwise(self.calls))
        kept = steps[: -(-len(steps) * 9 // 10)]
        return sum(kept) / len(kept)


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


def bare(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, _: Path) -> float:
    loss_of = Stopwatch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    order = torch.from_numpy(epoch_order(len(x), seed=0, epoch=0))
    for rows in order.split(BATCH)[:steps]:
        optimizer.zero_grad()
        loss = loss_of(x[rows], y[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss_of.seconds_per_step


def by_session(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, run: Path) -> float:
    loss_of = Stopwatch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    options = {"global_batch_size": BATCH, "max_steps": steps, "clip": 1.0, "wishes": WISHES}
    with whet.Session(model, optimizer, (x, y), run=run, **options) as session:
        for batch in session:
            session.step(lambda micro: loss_of(micro.x, micro.y), batch)
    # Two calls before the first step measure the memory of a sample.
    del loss_of.calls[:-steps]
    return loss_of.seconds_per_step


def by_train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, run: Path) -> float:
    loss_of = Stopwatch(model)
    whet.train(
        model,
        (x, y),
        loss=lambda micro: loss_of(micro.x, micro.y),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        global_batch_size=BATCH,
        max_steps=steps,
        clip=1.0,
        run=run,
        wishes=WISHES,
        show=None,
    )
    del loss_of.calls[:-steps]
    return loss_of.seconds_per_step


WISHES = {"threads": 1, "micro_batch": BATCH, "device": "cpu"}
WAYS = {"bare loop": bare, "Session": by_session, "train()": by_train}


def width_for(milliseconds: float, x: torch.Tensor, y: torch.Tensor) -> int:
    """The width at which a bare step takes about that long."""
    width = 64
    while width < 4_096:
        if bare(make_model(width), x, y, 12, Path()) * 1e3 >= milliseconds:
            break
        width = int(width * 1.2)
    return width


def interval(values: list[float]) -> tuple[float, float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2_000))
    return medians[50], medians[-51]


def measure(width: int, x: torch.Tensor, y: torch.Tensor, *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each way, round by round."""
    first = make_model(width)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name in list(WAYS) if number % 2 else list(WAYS)[::-1]:
                spent = WAYS[name](copy.deepcopy(first), x, y, steps, Path(folder) / f"{number}-{name}")
                if number:  # the first round warms up
                    seconds[name].append(spent)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least(1), default=100)
    parser.add_argument("--steps", type=at_least(2), default=40)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    # A step of almost nothing is timed ten times as often: what is done once in a while counts then.
    x = torch.randn(BATCH * 10 * given.steps, 64)
    y = torch.randint(0, 10, (len(x),))
    width = width_for(given.milliseconds, x, y)
    seconds = measure(width, x, y, rounds=given.rounds, steps=given.steps)
    print(f"{given.rounds} rounds of {given.steps} steps, width {width}, one thread, torch {torch.__version__}")
    print(f"{'way':10} {'ms per step':>12} {'ratio to the bare loop':>24} {'95 % interval':>18}")
    for name, times in seconds.items():
        ratios = [ours / theirs for ours, theirs in zip(times, seconds["bare loop"], strict=True)]
        low, high = interval(ratios)
        middle = statistics.median(ratios)
        print(f"{name:10} {statistics.median(times) * 1e3:12.3f} {middle:24.4f}    {low:.4f} to {high:.4f}")

    seconds = measure(8, x, y, rounds=max(2, given.rounds // 5), steps=10 * given.steps)
    print("\nwhat a step costs more than in the bare loop, on a step of almost nothing")
    for name in ("Session", "train()"):
        more = [1e6 * (ours - bare) for ours, bare in zip(seconds[name], seconds["bare loop"], strict=True)]
        low, high = interval(more)
        share = statistics.median(more) / (given.milliseconds * 1e3)
        print(
            f"{name:10} {statistics.median(more):8.1f} us, 95 % interval {low:.1f} to {high:.1f}: "
            f"{share:.1%} of a step of {given.milliseconds:g} ms"
        )


if __name__ == "__main__":
    main()
