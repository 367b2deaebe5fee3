"""The cost of the state check at the first step, beside that of a checkpoint of the same run. CPU only.

python benchmarks/state_check_cost.py
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as f

import whet
from whet.run.events import read_events
from whet.training import batch_loop
from whet.training.unsaved_state import UnsavedStateDetector

SIZES = ((64, 2), (512, 8), (1024, 16), (1792, 16))
"""Width and number of layers."""
REPEATS = 3


def measure(width: int, layers: int) -> tuple[float, float, float, float]:
    """Return the megabytes of a checkpoint, and the seconds of the check, a checkpoint and a search for gaps."""
    spent: dict[str, list[float]] = {"check": [], "gaps": []}

    def timed(name: str, call: Any) -> Any:
        def run(*args: Any) -> None:
            start = time.perf_counter()
            call(*args)
            spent[name].append(time.perf_counter() - start)

        return run

    check, gaps = batch_loop.check_first_step, UnsavedStateDetector.check
    batch_loop.check_first_step, UnsavedStateDetector.check = timed("check", check), timed("gaps", gaps)  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])
    x = torch.randn(64, width)
    try:
        with tempfile.TemporaryDirectory() as folder:
            whet.train(
                model,
                (x, x),
                loss=f.mse_loss,
                optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
                global_batch_size=4,
                max_steps=4,
                run=Path(folder) / "run",
                overrides={"threads": 1, "checkpoint_steps": 1},
                measure=False,
                on_event=None,
            )
            saves = [*read_events(Path(folder) / "run", kinds=("checkpoint",))][1:]
    finally:
        batch_loop.check_first_step, UnsavedStateDetector.check = check, gaps  # type: ignore[method-assign]
    seconds = statistics.median(event.number("seconds") or 0.0 for event in saves)
    return (saves[-1].number("bytes") or 0.0) / 1e6, spent["check"][0], seconds, statistics.median(spent["gaps"])


def main() -> None:
    print("| checkpoint | its time | state check | ratio | search for gaps |\n| --- | --- | --- | --- | --- |")
    for width, layers in SIZES:
        rows = [measure(width, layers) for _ in range(REPEATS)]
        size, check, save, gaps = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = [row[1] / row[2] for row in rows]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"| {size:.1f} MB | {save * 1e3:.0f} ms | {check * 1e3:.0f} ms | {spread} | {gaps * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
