"""Powers of two: training steps of the feed-forward layers of a transformer at neighboring batch sizes and widths.

Time is divided by the arithmetic of a step, so that a ratio above 1 is a size that is slower than its work. Sizes are
timed in turns, in CPU seconds on a CPU. Runs on every device that whet can open.

python benchmarks/alignment.py [--device cpu] [--rounds 30]
"""

import argparse
import statistics
import time

import torch
from torch import nn

from whet.device.open import open_device

BATCHES = (28, 30, 31, 32, 33, 34, 36, 40)
WIDTHS = (480, 496, 500, 508, 510, 511, 512, 513, 516, 520, 528, 544)
LENGTH = 32


def make_step(batch: int, width: int, device) -> tuple:
    """Return a training step and its multiplications."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    device.put_model(model)
    x = device.put(torch.randn(batch * LENGTH, width))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return step, batch * LENGTH * 8 * width**2


def timed(step, device, clock) -> float:
    """Return the seconds of one step."""
    device.sync()
    begin = clock()
    step()
    device.sync()
    return clock() - begin


def compare(sizes: tuple[int, ...], make, base: int, *, rounds: int, device, clock) -> None:
    """Print the time per multiplication of each size, relative to `base`, with the quartiles of the rounds."""
    steps = {size: make(size) for size in sizes}
    for step, _ in steps.values():
        step()
    costs: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds):
        for size in sizes if number % 2 else sizes[::-1]:
            step, work = steps[size]
            costs[size].append(timed(step, device, clock) / work)
    for size in sizes:
        ratios = [cost / own for cost, own in zip(costs[size], costs[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {size} | {middle:.2f} | {low:.2f} to {high:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = open_device(given.device).device
    clock = time.process_time if device.torch_device.type == "cpu" else time.perf_counter
    how = {"rounds": given.rounds, "device": device, "clock": clock}
    print("batch, width 512")
    compare(BATCHES, lambda batch: make_step(batch, 512, device), 32, **how)
    print("width, batch 32")
    compare(WIDTHS, lambda width: make_step(32, width, device), 512, **how)


if __name__ == "__main__":
    main()
