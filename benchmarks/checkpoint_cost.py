"""Cost of checkpoints: train and save a model of realistic size, and add up the costs that the run logged.

    python benchmarks/checkpoint_cost.py [--seconds 150] [--every 30] [--blocks 12] [--device cpu] [--folder DIR]

The interval is shortened (30 s instead of 5 minutes or more) to get enough saves in a few minutes; the cost of a save
does not depend on it. That cost comes from the log: the time during which training was blocked (`stall_seconds`), and
the slow-down of steps during background writes (`slowed_seconds`). The median cost determines the interval that a run
would choose by itself, and the share of time that saving then takes. A run tries both modes of writing, in the
background and blocking, and takes the cheaper one; two more runs are fixed to one mode each.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import whet
from whet.run.event import Event
from whet.run.events import read_events
from whet.training.callbacks.checkpoint_schedule import WriteMode, best_interval

BATCH = 32
WIDTH = 1024
PLANNED_SECONDS = 300


def make_model(blocks: int) -> nn.Module:
    def block() -> list[nn.Module]:
        return [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)]

    return nn.Sequential(*(layer for _ in range(blocks) for layer in block()), nn.Linear(WIDTH, 10))


def train(run: Path, *, blocks: int, seconds: float, every: float, device: str) -> tuple[float, int]:
    """Train for a while, and return the seconds in the loop and the steps."""
    torch.manual_seed(0)
    model = make_model(blocks)
    data = (torch.randn(4096, WIDTH), torch.randint(10, (4096,)))
    overrides = {"checkpoint_minutes": every / 60}
    begin = 0.0
    with whet.Session(
        model,
        whet.OptimizerChoice(lr=1e-4),
        data,
        run=run,
        overrides=overrides,
        device=device,
        global_batch_size=BATCH,
        epochs=10_000,
    ) as session:
        begin = time.monotonic()
        for batch in session:
            session.step(lambda micro: nn.functional.cross_entropy(model(micro.x), micro.y), batch)
            if time.monotonic() - begin > seconds:
                break
        took, steps = time.monotonic() - begin, session.state.step
    return took, steps


def on_the_clock(run: Path) -> list[Event]:
    """Return the saves during training, without the first and the final one."""
    saves = list(read_events(run, kinds=("checkpoint",)))
    return [event for event in saves[1:-1] if event.step > 0]


def show(name: str, saves: list[Event], took: float, steps: int) -> float:
    """Print one mode, and return the median cost of a save."""
    stall, slowed, whole = (
        [event.number(field) or 0.0 for event in saves] for field in ("stall_seconds", "slowed_seconds", "seconds")
    )
    costs = [a + b for a, b in zip(stall, slowed, strict=True)]
    print(f"{name}: {steps} steps of {1000 * took / steps:.0f} ms, {len(saves)} saves in {took:.0f} s")
    print("   saved in   stood still   slowed    cost (seconds, one line a save)")
    for event, *values in zip(saves, whole, stall, slowed, costs, strict=True):
        how = "beside the training" if event.get("background") else "in a pause"
        print("   {:8.2f}   {:11.3f}   {:6.2f}   {:5.2f}".format(*values), how)
    print(f"   share of this run, at the shortened interval: {100 * sum(costs) / took:.2f} %")
    return statistics.median(costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--every", type=float, default=30)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where the runs lie for the time of the benchmark")
    options = parser.parse_args()
    parameters = sum(p.numel() for p in make_model(options.blocks).parameters())
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        settings = {
            "blocks": options.blocks,
            "seconds": options.seconds,
            "every": options.every,
            "device": options.device,
        }
        costs: dict[str, float] = {}
        for name, held in (("as the run chooses", None), ("beside the training", True), ("in a pause", False)):
            way = mock.PropertyMock(return_value=held)
            with contextlib.nullcontext() if held is None else mock.patch.object(WriteMode, "is_background", way):
                took, steps = train(folder / name, **settings)
            saves = on_the_clock(folder / name)
            if held is None:
                size = saves[0].number("bytes") or 0.0
                print(f"{parameters / 1e6:.1f} M parameters, AdamW: {size / 1e6:.0f} MB a checkpoint; ", end="")
                print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
            costs[name] = show(name, saves, took, steps)
    print("\nat the interval that a run chooses by itself")
    for name, cost in costs.items():
        interval = best_interval(cost, least=PLANNED_SECONDS)
        print(
            f"   {name}: a save costs {cost:.2f} s, every {interval:.0f} s: {100 * cost / interval:.2f} % of the time"
        )


if __name__ == "__main__":
    main()
