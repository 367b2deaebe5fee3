"""What whet costs: Session and train() beside the bare PyTorch loop on the same step, in turns.

    python benchmarks/overhead.py [--rounds 20] [--steps 200] [--milliseconds 5]

Before each step of whet's a bare loop makes one, on a model of its own, so that both meet the same moment of the
machine. The time of whet's is from there to the begin of the next step: set-up does not count, everything between
steps does. The slowest tenth of each side's steps is left out. In each round a second bare loop takes whet's place too:
what the place itself costs is known from it, and taken away. The table shows the median over rounds and the interval
that holds it in 95 % of resamplings.
"""

import argparse
import copy
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from results import at_least
from torch import nn

import whet
from whet.data.order import epoch_order

BATCH = 32

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Turns:
    """A loss function that lets the bare loop make a step first, and notes when both began."""

    def __init__(self, model: nn.Module, bare: Iterator[None]) -> None:
        self._model = model
        self._bare = bare
        self._begun: list[float] = []
        self._done: list[float] = []

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self._begun.append(time.perf_counter())
        next(self._bare)
        self._done.append(time.perf_counter())
        return nn.functional.cross_entropy(self._model(x), y)

    def seconds(self, steps: int) -> tuple[float, float]:
        """A step of the bare loop, and one of ours; calls before the first step measured the memory of a sample."""
        begun, done = self._begun[-steps:], self._done[-steps:]
        theirs = [end - start for start, end in zip(begun, done, strict=True)]
        ours = [following - end for end, following in zip(done, begun[1:], strict=False)]
        return _without_slowest(theirs), _without_slowest(ours)


def _without_slowest(steps: list[float]) -> float:
    """The mean of all but the slowest tenth: those are the machine's other work, on whichever side they fall."""
    kept = sorted(steps)[: -(-len(steps) * 9 // 10)]
    return sum(kept) / len(kept)


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


def bare_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss_of: Loss | None = None) -> Iterator[None]:
    """Makes a step whenever it is asked for one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    order = torch.from_numpy(epoch_order(len(x), seed=0, epoch=0))
    for rows in itertools.cycle(order.split(BATCH)):
        optimizer.zero_grad()
        inputs, targets = x[rows], y[rows]
        loss = loss_of(inputs, targets) if loss_of else nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield


def by_hand(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, _: Path, loss_of: Turns) -> None:
    for _ in itertools.islice(bare_loop(model, x, y, loss_of), steps):
        pass


def by_session(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, run: Path, loss_of: Turns) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    options = {"global_batch_size": BATCH, "max_steps": steps, "clip": 1.0, "wishes": WISHES}
    with whet.Session(model, optimizer, (x, y), run=run, **options) as session:
        for batch in session:
            session.step(lambda micro: loss_of(micro.x, micro.y), batch)


def by_train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, run: Path, loss_of: Turns) -> None:
    whet.train(
        model,
        (x, y),
        loss=lambda micro: loss_of(micro.x, micro.y),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        global_batch_size=BATCH,
        max_steps=steps,
        clip=1.0,
        run=run,
        overrides=WISHES,
        on_event=None,
    )


WISHES = {"threads": 1, "micro_batch": BATCH, "device": "cpu"}
PLACE = "bare loop"
WAYS = {PLACE: by_hand, "Session": by_session, "train()": by_train}


def width_for(milliseconds: float, x: torch.Tensor, y: torch.Tensor) -> int:
    """The width at which a bare step takes about that long."""
    width = 64
    while width < 4_096:
        loop, times = bare_loop(make_model(width), x, y), []
        for _ in range(12):
            begun = time.perf_counter()
            next(loop)
            times.append(time.perf_counter() - begun)
        if statistics.median(times) * 1e3 >= milliseconds:
            break
        width = int(width * 1.2)
    return width


def interval(values: list[float]) -> tuple[float, float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2_000))
    return medians[50], medians[-51]


def measure(
    width: int, x: torch.Tensor, y: torch.Tensor, *, rounds: int, steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step of the bare loop and of each way in its turn, round by round."""
    first = make_model(width)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name in list(WAYS) if number % 2 else list(WAYS)[::-1]:
                model = copy.deepcopy(first)
                turns = Turns(model, bare_loop(copy.deepcopy(first), x, y))
                WAYS[name](model, x, y, steps, Path(folder) / f"{number}-{name}", turns)
                if number:  # the first round warms up
                    seconds[name].append(turns.seconds(steps))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least(1), default=20)
    parser.add_argument("--steps", type=at_least(2), default=200)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    # A step of almost nothing is timed twice as often: what is done once in a while counts then.
    x = torch.randn(BATCH * 2 * given.steps, 64)
    y = torch.randint(0, 10, (len(x),))
    width = width_for(given.milliseconds, x, y)
    seconds = measure(width, x, y, rounds=given.rounds, steps=given.steps)
    print(f"{given.rounds} rounds of {given.steps} steps, width {width}, one thread, torch {torch.__version__}")
    print(f"{'way':10} {'ms per step':>12} {'ratio to the bare loop':>24} {'95 % interval':>18}")
    for name, times in seconds.items():
        ratios = [
            (ours / theirs) / (again / bare)
            for (theirs, ours), (bare, again) in zip(times, seconds[PLACE], strict=True)
        ]
        low, high = interval(ratios)
        ours = statistics.median(ours for _, ours in times) * 1e3
        print(f"{name:10} {ours:12.3f} {statistics.median(ratios):24.4f}    {low:.4f} to {high:.4f}")

    seconds = measure(8, x, y, rounds=given.rounds, steps=2 * given.steps)
    print("\nwhat a step costs more than in the bare loop, on a step of almost nothing")
    for name in ("Session", "train()"):
        more = [
            1e6 * ((ours - theirs) - (again - bare))
            for (theirs, ours), (bare, again) in zip(seconds[name], seconds[PLACE], strict=True)
        ]
        low, high = interval(more)
        share = statistics.median(more) / (given.milliseconds * 1e3)
        print(
            f"{name:10} {statistics.median(more):8.1f} us, 95 % interval {low:.1f} to {high:.1f}: "
            f"{share:.1%} of a step of {given.milliseconds:g} ms"
        )


if __name__ == "__main__":
    main()
