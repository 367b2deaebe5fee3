"""Non-finite steps: skipped if reproducible, repeated if not; nothing else changes."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whet
from small_models import convnet, images
from whet.base.errors import WhetError
from whet.run.event import Event
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.step.non_finite_guard import MAX_CONSECUTIVE_SKIPS, NonFiniteGuard
from whet.training import setup

pytestmark = pytest.mark.torch

BAD_STEP = 7


class Spoilt:
    """A loss that is NaN, or has an infinite gradient, at chosen steps, a number of times or always."""

    def __init__(
        self, model: nn.Module, session: whet.Session, *, how: str, times: float, steps: tuple[int, ...]
    ) -> None:
        self.model, self.session, self.how, self.steps = model, session, how, steps
        self.left = dict.fromkeys(steps, times)

    def __call__(self, micro: Any) -> torch.Tensor:
        value = nn.functional.cross_entropy(self.model(micro.x), micro.y)
        step = self.session.state.step + 1
        if self.left.get(step, 0) > 0:
            self.left[step] -= 1
            if self.how == "loss":
                return value * math.nan
            # Finite, with an infinite gradient.
            return value + (self.model[0].weight.sum() * 0).abs().sqrt()
        return value


def train(
    run: Path | None, *, how: str = "loss", times: float = 0, steps: tuple[int, ...] = (BAD_STEP,), **options: Any
) -> tuple[dict[str, torch.Tensor], whet.Session]:
    torch.manual_seed(2)
    model = convnet(dropout=0.3)
    x, y = images(96, seed=0)
    options = {"global_batch_size": 16, "epochs": 3, "ema": True, "schedule": "cosine", "warmup_steps": 2, **options}
    options["overrides"] = {"threads": 1, "checkpoint_steps": 5}
    with whet.Session(model, whet.OptimizerChoice(lr=1e-2), (x, y), run=run, device="cpu", **options) as session:
        loss = Spoilt(model, session, how=how, times=times, steps=steps)
        for batch in session:
            session.step(loss, batch)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state |= {f"ema/{name}": tensor.clone() for name, tensor in session.run.stepper.ema.average.items()}
        for owner, parameter in model.named_parameters():
            kept = session.run.stepper.optimizer.state[parameter]
            state |= {f"{owner}/{name}": tensor.clone() for name, tensor in kept.items()}
        state["generator"] = torch.get_rng_state()
    return state, session


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_fault_of_the_moment_leaves_no_trace(tmp_path: Path, how: str) -> None:
    whole, _ = train(tmp_path / "whole")
    state, _ = train(tmp_path / "cut", how=how, times=1)
    assert_equal(state, whole)
    (event,) = read_events(open_run(tmp_path / "cut"), kinds=("skip",))
    assert event.get("verdict") == "transient"
    assert [e.step for e in read_events(open_run(tmp_path / "cut"), kinds=("step",))] == list(range(1, 19))


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_reproducible_bad_step_is_skipped_without_other_effects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    state, session = train(tmp_path / "cut", how=how, times=math.inf)
    assert session.is_finished
    (event,) = read_events(open_run(tmp_path / "cut"), kinds=("skip",))
    assert (event.step, event.get("verdict")) == (BAD_STEP, "reproducible")
    assert len(event.get("samples")) == 16
    known = [Event(kind="skip", time=0, step=BAD_STEP, fields={"verdict": "reproducible"})]
    monkeypatch.setattr(
        setup, "NonFiniteGuard", lambda *, has_scaler, earlier: NonFiniteGuard(has_scaler=has_scaler, earlier=known)
    )
    never_made, _ = train(tmp_path / "without")
    assert_equal(state, never_made)


def test_the_verdict_survives_a_resume(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "whole", times=math.inf)
    train(tmp_path / "cut", times=math.inf, epochs_per_session=2)
    # Roll back to before the bad step: the resumed run must skip it.
    for step in (10, 12):
        shutil.rmtree(open_run(tmp_path / "cut").checkpoints / whet_store().checkpoint_name(step), ignore_errors=True)
    state, session = train(tmp_path / "cut", times=0)
    assert_equal(state, whole)
    assert session.run.guard.skipped == {BAD_STEP}


def whet_store() -> Any:
    from whet.checkpoint import store

    return store


def test_too_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    steps = tuple(range(BAD_STEP, BAD_STEP + MAX_CONSECUTIVE_SKIPS + 1))
    with pytest.raises(WhetError, match="the loss or a weight is NaN or Inf"):
        train(tmp_path / "run", times=math.inf, steps=steps)
    newest = whet_store().load_newest(open_run(tmp_path / "run").checkpoints)
    assert newest[0] == 5
    assert all(tensor.isfinite().all() for tensor in newest[1].tensors.values() if tensor.is_floating_point())


def test_the_last_step_counts_too(tmp_path: Path) -> None:
    state, session = train(tmp_path / "run", times=math.inf, steps=(18,))
    assert session.is_finished
    assert all(tensor.isfinite().all() for tensor in state.values() if tensor.is_floating_point())


def test_without_a_folder_the_error_names_it() -> None:
    with pytest.raises(WhetError, match="no run folder, so there is no checkpoint"):
        train(None, times=1)


# --- spikes ----------------------------------------------------------------------------------------------------------


def losses(seed: int, *, steps: int = 500) -> list[float]:
    """A falling curve with heavy-tailed noise, as real losses have."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, generator=generator) * torch.rand(steps, generator=generator).add(0.5)
    return (2 * torch.exp(-torch.arange(steps) / 200) + 0.5 + 0.15 * noise).tolist()


def test_a_spike_is_reported_and_usual_losses_are_not() -> None:
    false_alarms = 0
    for seed in range(20):
        watch = NonFiniteGuard(has_scaler=False)
        false_alarms += sum(watch.observe(step, loss) is not None for step, loss in enumerate(losses(seed), 1))
    assert false_alarms <= 10, "at most one in a thousand"
    for seed in range(20):
        watch = NonFiniteGuard(has_scaler=False)
        for step, loss in enumerate(losses(seed, steps=300), 1):
            watch.observe(step, loss)
        reported = watch.observe(301, losses(seed, steps=300)[-1] + 10 * 0.3)
        assert reported is not None
        assert "the last 128 were" in reported
