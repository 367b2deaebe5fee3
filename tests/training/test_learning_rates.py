"""Learning rates follow the schedule of the run, also after a resume."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import whet
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch

LR = 0.1


def train(folder: Path, *, bad_step: int | None = None, max_steps: int = 8) -> list[float]:
    """Return the rates of all steps; the schedule falls, and one step has a NaN loss once."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    left = 0 if bad_step is None else 1
    with whet.Session(
        model,
        torch.optim.SGD(model.parameters(), lr=LR),
        (torch.randn(32, 3), torch.randn(32, 1)),
        run=folder,
        device="cpu",
        global_batch_size=4,
        schedule=lambda number: 1 / number,
        max_steps=max_steps,
        overrides={"threads": 1, "micro_batch": 4, "checkpoint_steps": 3},
    ) as session:

        def loss(micro) -> torch.Tensor:
            nonlocal left
            is_bad = left > 0 and session.state.step + 1 == bad_step
            left -= is_bad
            return nn.functional.mse_loss(model(micro.x), micro.y) * (math.nan if is_bad else 1)

        for batch in session:
            session.step(loss, batch)
    return [event.get("lr") for event in read_events(open_run(folder), kinds=("step",))]


@pytest.mark.parametrize("bad_step", [4, 5])
def test_a_rollback_is_not_mistaken_for_another_scheduler(bad_step: int, tmp_path: Path) -> None:
    assert train(tmp_path / "run", bad_step=bad_step) == [LR * (1 / number) for number in range(1, 9)]
    (resumed,) = read_events(open_run(tmp_path / "run"), kinds=("resume",))
    assert (resumed.step, "rollback_reason" in resumed.fields) == (3, True)
