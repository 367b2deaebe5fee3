"""An error between two steps loses no step: earlier steps are saved, and the run resumes from there."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer

import whet
from whet.base.errors import UsageError
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.restore import CUSTOM_LOOP

pytestmark = pytest.mark.torch

Upset = Callable[[nn.Sequential, Adam], object]
UPSET_AFTER = 3


class NoRateError(Exception):
    """A custom schedule."""


def train(
    folder: Path, *, upset: Upset | None = None, checkpoint_steps: int | None = None, fails_at: int | None = None
) -> dict[str, torch.Tensor]:
    """Two of three layers are trained, each in its own parameter group, for two epochs of four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = Adam([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.05}], lr=0.01)

    def falling(number: int) -> float:
        if number == fails_at:
            raise NoRateError
        return 1 / number

    with whet.Session(
        model,
        optimizer,
        (torch.randn(16, 3), torch.randn(16, 1)),
        run=folder,
        device="cpu",
        global_batch_size=4,
        epochs=2,
        schedule=falling,
        overrides={"threads": 1, "micro_batch": 4}
        | ({"checkpoint_steps": checkpoint_steps} if checkpoint_steps else {}),
    ) as session:
        for batch in session:
            session.step(lambda micro: nn.functional.mse_loss(model(micro.x), micro.y), batch)
            if upset is not None and session.state.step == UPSET_AFTER:
                upset(model, optimizer)
    return model.state_dict()


def last_saved(folder: Path) -> int:
    return max(checkpoint.step for checkpoint in whet.summarize(folder).checkpoints)


def assert_goes_on(folder: Path, *, after: int, whole: Path, checkpoint_steps: int | None = None) -> None:
    """The corrected program resumes and ends with the bits of one that was correct from the start."""
    ended = train(folder, checkpoint_steps=checkpoint_steps)
    (resumed,) = read_events(open_run(folder), kinds=("resume",))
    assert resumed.step == after
    for name, tensor in train(whole, checkpoint_steps=checkpoint_steps).items():
        assert torch.equal(ended[name], tensor), name


def a_group_comes(model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": model[2].parameters()})


def a_foreign_group_comes(_model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})


def a_group_goes(_model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.param_groups.pop()


def a_scheduler_steps(_model: nn.Sequential, optimizer: Optimizer) -> None:
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)


CHANGED_GROUPS = "parameter groups of the optimizer changed"
CHANGED_RATE = "the learning rate was changed outside the session"


@pytest.mark.parametrize(
    ("upset", "what", "checkpoint_steps"),
    [
        pytest.param(a_group_comes, CHANGED_GROUPS, UPSET_AFTER, id="a group, when due"),
        pytest.param(a_group_comes, CHANGED_GROUPS, None, id="a group, at the end", marks=pytest.mark.slow),
        pytest.param(
            a_foreign_group_comes, CHANGED_GROUPS, UPSET_AFTER, id="foreign, when due", marks=pytest.mark.slow
        ),
        pytest.param(a_foreign_group_comes, CHANGED_GROUPS, None, id="foreign, at the end"),
        pytest.param(a_scheduler_steps, CHANGED_RATE, UPSET_AFTER, id="a rate, when due", marks=pytest.mark.slow),
        pytest.param(a_scheduler_steps, CHANGED_RATE, None, id="a rate, at the end"),
    ],
)
def test_the_steps_before_a_refusal_are_saved(
    upset: Upset, what: str, checkpoint_steps: int | None, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=what):
        train(tmp_path / "run", upset=upset, checkpoint_steps=checkpoint_steps)
    assert last_saved(tmp_path / "run") == UPSET_AFTER
    assert_goes_on(tmp_path / "run", after=UPSET_AFTER, whole=tmp_path / "whole", checkpoint_steps=checkpoint_steps)


def test_the_steps_before_a_failure_of_your_schedule_are_saved(tmp_path: Path) -> None:
    with pytest.raises(NoRateError):
        train(tmp_path / "run", fails_at=UPSET_AFTER + 1)
    assert last_saved(tmp_path / "run") == UPSET_AFTER
    assert_goes_on(tmp_path / "run", after=UPSET_AFTER, whole=tmp_path / "whole")


def claim(folder: Path) -> str:
    return str([*read_events(open_run(folder), kinds=("resume",))][-1].get("exactness"))


def clamp(model: nn.Module, *, limit: float = 0.1) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-limit, limit)


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_in_the_body_of_a_loop_is_named_by_the_resume(fails: bool, tmp_path: Path) -> None:
    """What the body had still to do with its batch is missing. Nothing is lost, but more cannot be claimed."""

    def loop(stop: int | None) -> None:
        model = nn.Linear(3, 1)
        data = torch.ones(16, 3), torch.ones(16, 1)
        optimizer = Adam(model.parameters(), lr=0.1)
        with whet.Session(model, optimizer, data, run=tmp_path / "run", global_batch_size=4) as session:
            for batch in session:
                session.step(lambda micro: nn.functional.mse_loss(model(micro.x), micro.y), batch)
                if session.state.step == stop and fails:
                    raise ValueError("no")
                clamp(model)
                if session.state.step == stop:
                    break

    with pytest.raises(ValueError, match="no") if fails else contextlib.nullcontext():
        loop(2)
    assert last_saved(tmp_path / "run") == 2
    loop(None)
    what = "; ValueError ended the body of your loop at step 2: what it had still to do is missing"
    assert claim(tmp_path / "run") == CUSTOM_LOOP + (what if fails else "")


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_in_a_callback_is_named_by_the_resume(fails: bool, tmp_path: Path) -> None:
    class Clamp(whet.Callback):
        def __init__(self, model: nn.Module, fails_at: int) -> None:
            self.model, self.fails_at = model, fails_at

        def after_step(self, state: whet.State, outcome: object) -> None:
            if state.step == self.fails_at:
                raise ValueError("no")
            clamp(self.model)

    def fit(max_steps: int, fails_at: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        whet.train(
            model,
            (torch.ones(16, 3), torch.ones(16, 1)),
            loss=nn.functional.mse_loss,
            optimizer=Adam(model.parameters(), lr=0.1),
            callbacks=[Clamp(model, fails_at)],
            run=tmp_path / "run",
            max_steps=max_steps,
            global_batch_size=4,
            on_event=None,
        )

    with pytest.raises(ValueError, match="no") if fails else contextlib.nullcontext():
        fit(2, 2 if fails else 0)
    assert last_saved(tmp_path / "run") == 2
    fit(4, 0)
    what = "ValueError ended the callback test_an_error_in_a_callback_is_named_by_the_resume.<locals>.Clamp at step 2"
    expected = f"session state restored exactly; {what}: what it had still to do is missing"
    assert claim(tmp_path / "run") == (expected if fails else "bit-exact")


@pytest.mark.parametrize(
    "checkpoint_steps",
    [pytest.param(None, id="at the end"), pytest.param(UPSET_AFTER, id="when due", marks=pytest.mark.slow)],
)
def test_nothing_is_saved_after_a_rank_is_lost(checkpoint_steps: int | None, tmp_path: Path) -> None:
    """No run could resume from such a checkpoint, so the previous one stays the newest."""
    with pytest.raises(UsageError, match="parameter groups of the optimizer changed"):
        train(tmp_path / "run", upset=a_group_goes, checkpoint_steps=checkpoint_steps)
    assert last_saved(tmp_path / "run") == 0
    assert_goes_on(tmp_path / "run", after=0, whole=tmp_path / "whole", checkpoint_steps=checkpoint_steps)
