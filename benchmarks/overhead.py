"""Overhead of whet: Session and train() compared with a bare PyTorch loop, interleaved in one process.

    python benchmarks/overhead.py [--rounds 20] [--steps 200] [--milliseconds 5] [--block 8]

A bare loop and whet take turns, each with its own model: so many steps of one, then so many of the other. The first
step of each turn is left out, because the other loop has just used the processor's caches. With `--block 1` every step
is such a step, and both loops run with cold caches. The time of whet's step ends when the next step begins: set-up
does not count, everything between steps does. In each round a second bare loop takes the place of whet as well, which
measures the cost of the position itself; it is subtracted. The tables show the median over rounds and its 95 %
bootstrap interval. Session and train() also run with a callback of the user's, which has a method for each step; whet's
own callbacks are always there.

The ratios are of elapsed time, without the slowest tenth of each side's steps. The overhead of a tiny step is CPU time
of the thread that trains, which other programs disturb less than elapsed time: the mean over all steps but the first
tenth, so that the event log and everything else that runs now and then counts.
"""

import argparse
import copy
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from results import at_least
from torch import nn

import whet
from whet.data.order import epoch_order
from whet.step.step import Outcome
from whet.training.progress import State

BATCH = 32

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Clock = Callable[[], float]


class BareLoop:
    """A plain training loop."""

    def __init__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self._x, self._y = x, y
        self._batches = torch.from_numpy(epoch_order(len(x), seed=0, epoch=0)).split(BATCH)
        self.num_steps = 0

    def step(self, loss_of: Loss | None = None) -> None:
        rows = self._batches[self.num_steps % len(self._batches)]
        self.num_steps += 1
        self.optimizer.zero_grad()
        inputs, targets = self._x[rows], self._y[rows]
        loss = loss_of(inputs, targets) if loss_of else nn.functional.cross_entropy(self.model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class InterleavedLoss:
    """A loss function that runs `block` steps of the bare loop before every `block`-th of its own, and times all.

    It is registered with the session, which would warn of state and of an optimizer that it does not know.
    """

    def __init__(self, model: nn.Module, bare: BareLoop, clock: Clock, block: int) -> None:
        self.optimizer = bare.optimizer
        self._model = model
        self._bare = bare
        self._clock = clock
        self._block = block
        self._ended: list[float] = []
        """When each step before a call had ended."""
        self._begun: list[float] = []
        """When each step began, after the steps of the bare loop."""
        self._bare_seconds: list[list[float]] = []
        """The times of the bare steps before each call."""

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        times = [self._clock()]
        if len(self._begun) % self._block == 0:
            for _ in range(self._block):
                self._bare.step()
                times.append(self._clock())
        self._ended.append(times[0])
        self._bare_seconds.append([end - start for start, end in pairwise(times)])
        self._begun.append(self._clock())
        return nn.functional.cross_entropy(self._model(x), y)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a call changes."""
        return {
            "model": self._bare.model.state_dict(),
            "optimizer": self._bare.optimizer.state_dict(),
            "ended": self._ended,
            "begun": self._begun,
            "bare": self._bare_seconds,
            "num_steps": self._bare.num_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ended, self._begun, self._bare_seconds = state["ended"], state["begun"], state["bare"]
        self._bare.num_steps = state["num_steps"]
        self._bare.model.load_state_dict(state["model"])
        self._bare.optimizer.load_state_dict(state["optimizer"])

    def seconds(self, steps: int) -> tuple[list[float], list[float]]:
        """Return the seconds of the bare steps and of ours in the last `steps` calls."""
        first = len(self._begun) - steps
        theirs, ours = [], []
        for number in range(first, len(self._begun)):
            skipped = self._block > 1 and bool(self._bare_seconds[number])
            theirs += self._bare_seconds[number][int(skipped) :]
            if number + 1 < len(self._begun) and not skipped:
                ours.append(self._ended[number + 1] - self._begun[number])
        return theirs, ours


def without_slowest(steps: list[float]) -> float:
    """Return the mean of all but the slowest tenth, which are disturbed by other work of the machine."""
    kept = sorted(steps)[: -(-len(steps) * 9 // 10)]
    return sum(kept) / len(kept)


def without_first(steps: list[float]) -> float:
    """Return the mean of all but the first tenth, which includes the checks of the first step."""
    return statistics.fmean(steps[len(steps) // 10 :])


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


def run_bare(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, _: Path, loss_of: InterleavedLoss) -> None:
    loop = BareLoop(model, x, y)
    for _ in range(steps):
        loop.step(loss_of)


class LossHistory(whet.Callback):
    """A callback as users write them: it keeps a moving average of the loss and would stop at a limit."""

    def __init__(self) -> None:
        self.average: torch.Tensor | None = None
        self.num_steps = 0

    def after_step(self, state: State, outcome: Outcome) -> whet.Action:
        self.num_steps += 1
        loss = outcome.loss
        # A tensor: reading the value here would wait for the device.
        self.average = loss if self.average is None else torch.lerp(self.average, loss, 0.1)
        return whet.Action.STOP("enough") if state.step >= 1_000_000 else whet.Action.NONE

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.num_steps = state["average"], state["num_steps"]


def run_session(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    steps: int,
    run: Path,
    loss_of: InterleavedLoss,
    *,
    has_callback: bool = False,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    options: dict[str, Any] = {"global_batch_size": BATCH, "max_steps": steps, "clip": 1.0, "overrides": OVERRIDES}
    options["register"] = {"bare loop": loss_of}
    callbacks = _callbacks(has_callback)
    with whet.Session(model, optimizer, (x, y), run=run, callbacks=callbacks, **options) as session:
        for batch in session:
            session.step(lambda micro: loss_of(micro.x, micro.y), batch)
    _check_calls(callbacks, steps)


def run_train(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    steps: int,
    run: Path,
    loss_of: InterleavedLoss,
    *,
    has_callback: bool = False,
) -> None:
    callbacks = _callbacks(has_callback)
    whet.train(
        model,
        (x, y),
        loss=lambda micro: loss_of(micro.x, micro.y),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        global_batch_size=BATCH,
        max_steps=steps,
        clip=1.0,
        run=run,
        overrides=OVERRIDES,
        register={"bare loop": loss_of},
        callbacks=callbacks,
        on_event=None,
    )
    _check_calls(callbacks, steps)


def _callbacks(has_callback: bool) -> list[LossHistory]:
    return [LossHistory()] if has_callback else []


def _check_calls(callbacks: list[LossHistory], steps: int) -> None:
    for callback in callbacks:
        assert callback.num_steps == steps, "otherwise the callback was not measured"


OVERRIDES = {"threads": 1, "micro_batch": BATCH, "device": "cpu"}
BASELINE = "bare loop"
OURS = {
    "Session": run_session,
    "Session with a callback": partial(run_session, has_callback=True),
    "train()": run_train,
    "train() with a callback": partial(run_train, has_callback=True),
}
VARIANTS = {BASELINE: run_bare, **OURS}


def width_for(milliseconds: float, x: torch.Tensor, y: torch.Tensor) -> int:
    """Return the width at which a bare step takes about `milliseconds`."""
    width = 64
    while width < 4_096:
        loop, times = BareLoop(make_model(width), x, y), []
        for _ in range(12):
            begun = time.perf_counter()
            loop.step()
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
    width: int,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    rounds: int,
    steps: int,
    block: int,
    clock: Clock,
    mean: Callable[[list[float]], float],
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of a bare step and of a step of each variant, for each round."""
    first = make_model(width)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name in list(VARIANTS) if number % 2 else list(VARIANTS)[::-1]:
                model = copy.deepcopy(first)
                turns = InterleavedLoss(model, BareLoop(copy.deepcopy(first), x, y), clock, block)
                VARIANTS[name](model, x, y, steps, Path(folder) / f"{number}-{name}", turns)
                if number:  # the first round warms up
                    theirs, ours = turns.seconds(steps)
                    seconds[name].append((mean(theirs), mean(ours)))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least(1), default=20)
    parser.add_argument("--steps", type=at_least(2), default=200)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    parser.add_argument("--block", type=at_least(1), default=8, help="steps of one loop before the other's turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    # Tiny steps are timed twice as often, so that periodic work is included.
    x = torch.randn(BATCH * 2 * given.steps, 64)
    y = torch.randint(0, 10, (len(x),))
    width = width_for(given.milliseconds, x, y)
    seconds = measure(
        width,
        x,
        y,
        rounds=given.rounds,
        steps=given.steps,
        block=given.block,
        clock=time.perf_counter,
        mean=without_slowest,
    )
    size = f"{given.rounds} rounds of {given.steps} steps in turns of {given.block}, width {width}"
    print(f"{size}, one thread, torch {torch.__version__}")
    print(f"{'variant':24} {'ms per step':>12} {'ratio to the bare loop':>24} {'95 % interval':>18}")
    for name, times in seconds.items():
        ratios = [
            (ours / theirs) / (again / bare)
            for (theirs, ours), (bare, again) in zip(times, seconds[BASELINE], strict=True)
        ]
        low, high = interval(ratios)
        ours = statistics.median(ours for _, ours in times) * 1e3
        print(f"{name:24} {ours:12.3f} {statistics.median(ratios):24.4f}    {low:.4f} to {high:.4f}")

    seconds = measure(
        8,
        x,
        y,
        rounds=given.rounds,
        steps=2 * given.steps,
        block=given.block,
        clock=time.thread_time,
        mean=without_first,
    )
    print("\noverhead of a tiny step over the bare loop, in CPU time")
    for name in OURS:
        more = [
            1e6 * ((ours - theirs) - (again - bare))
            for (theirs, ours), (bare, again) in zip(seconds[name], seconds[BASELINE], strict=True)
        ]
        low, high = interval(more)
        share = statistics.median(more) / (given.milliseconds * 1e3)
        print(
            f"{name:24} {statistics.median(more):8.1f} us, 95 % interval {low:.1f} to {high:.1f}: "
            f"{share:.1%} of a step of {given.milliseconds:g} ms"
        )


if __name__ == "__main__":
    main()
