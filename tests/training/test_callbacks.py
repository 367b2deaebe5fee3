"""Callbacks of the user: their arguments, the effects of their actions, and that their state is kept."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import whet
from small_models import convnet, images
from whet.base.errors import UsageError
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.callback import Action, Callback, CallbackList
from whet.training.progress import State

pytestmark = pytest.mark.torch


class Recording(Callback):
    """Notes every call, and returns the action planned for a step."""

    def __init__(self, **actions: Action) -> None:
        self.calls: list[tuple[str, int]] = []
        self.steps_seen = 0
        self.actions = actions

    def on_start(self, run: Any) -> None:
        self.run = run
        self.calls.append(("start", run.state.step))

    def before_step(self, state: State) -> None:
        self.calls.append(("before", state.step))

    def after_step(self, state: State, outcome: Any) -> Action | None:
        self.steps_seen += 1
        self.calls.append(("after", state.step))
        assert outcome.loss.shape == ()
        return self.actions.pop(f"step{state.step}", None)

    def on_evaluate(self, state: State, metrics: Any) -> Action | None:
        self.calls.append(("evaluate", state.step))
        return self.actions.pop(f"evaluate{state.step}", None)

    def on_epoch_end(self, state: State) -> Action | None:
        self.calls.append(("epoch", state.epoch))
        return self.actions.pop(f"epoch{state.epoch}", None)

    def on_end(self, state: State, error: BaseException | None) -> None:
        self.calls.append(("end" if error is None else "failed", state.step))

    def state_dict(self) -> dict[str, Any]:
        return {"steps_seen": self.steps_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps_seen = state["steps_seen"]


def fit(run: Path | None, *callbacks: Any, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = convnet()
    result = whet.train(
        model,
        images(32, seed=0),
        loss=lambda micro: nn.functional.cross_entropy(model(micro.x), micro.y),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        run=run,
        on_event=None,
        callbacks=callbacks,
        **{"global_batch_size": 8, "epochs": 2, "overrides": {"threads": 1}, **options},
    )
    return model, result


def saved_steps(run: Path) -> list[int]:
    return [event.step for event in read_events(open_run(run), kinds=("checkpoint",))]


def test_methods_are_called_in_order(tmp_path: Path) -> None:
    seen = Recording()
    fit(tmp_path / "run", seen, evaluate=lambda model, micro_batches: {"n": 1.0}, val=images(8, seed=1))
    steps = [call for n in range(1, 5) for call in (("before", n - 1), ("after", n))]
    assert seen.calls[:10] == [("start", 0), *steps, ("evaluate", 4)]
    assert seen.calls[10] == ("epoch", 1)
    assert seen.calls[-3:] == [("evaluate", 8), ("epoch", 2), ("end", 8)]


def test_callbacks_do_not_change_the_training(tmp_path: Path) -> None:
    plain, _ = fit(None)
    watched, _ = fit(tmp_path / "run", Recording(step3=Action.SAVE))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


def test_save_writes_a_checkpoint_of_that_step(tmp_path: Path) -> None:
    fit(tmp_path / "run", Recording(step3=Action.SAVE))
    assert 3 in saved_steps(tmp_path / "run")


@pytest.mark.parametrize("moment", ["step3", "epoch1", pytest.param("evaluate4", marks=pytest.mark.slow)])
def test_stop_saves_and_the_same_call_resumes_with_the_callbacks_state(moment: str, tmp_path: Path) -> None:
    options = {"evaluate": lambda model, micro_batches: {"n": 1.0}, "val": images(8, seed=1)}
    seen = Recording(**{moment: Action.STOP("enough")})
    _, result = fit(tmp_path / "run", seen, **options)
    stopped = 3 if moment == "step3" else 4
    assert (result.state, result.step, result.exit_code) == ("stopped", stopped, 0)
    again = Recording()
    model, result = fit(tmp_path / "run", again, **options)
    assert (result.state, result.step) == ("done", 8)
    assert again.calls[0] == ("start", stopped)
    assert again.steps_seen == 8, "restored, then counted on"
    whole, _ = fit(None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))


class EpochCounter(Callback):
    """Counts epochs in `on_epoch_end`."""

    epochs_seen = 0

    def on_epoch_end(self, state: State) -> None:
        self.epochs_seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs_seen": self.epochs_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs_seen = state["epochs_seen"]


@pytest.mark.parametrize("checkpoint_steps", [4, 100], ids=["saved in the epoch's last step", "saved at the end"])
def test_state_changed_at_the_end_of_an_epoch_is_saved(checkpoint_steps: int, tmp_path: Path) -> None:
    options = {"overrides": {"threads": 1, "checkpoint_steps": checkpoint_steps}}
    fit(tmp_path / "run", EpochCounter(), epochs_per_session=1, **options)
    counter = EpochCounter()
    fit(tmp_path / "run", counter, **options)
    assert counter.epochs_seen == 2


def test_rollback_repeats_the_steps_and_restores_the_callback(tmp_path: Path) -> None:
    seen = Recording(step3=Action.SAVE, step5=Action.ROLLBACK("a bad moment"))
    model, _ = fit(tmp_path / "run", seen)
    assert [n for kind, n in seen.calls if kind == "after"] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert seen.steps_seen == 8
    resumed = list(read_events(open_run(tmp_path / "run"), kinds=("resume",)))
    assert [(event.step, event.get("rollback_reason")) for event in resumed] == [(3, "a bad moment")]
    whole, _ = fit(None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def test_stop_survives_a_rollback(tmp_path: Path) -> None:
    _, result = fit(tmp_path / "run", Recording(step2=Action.SAVE, step4=Action.ROLLBACK("r") | Action.STOP("s")))
    assert (result.state, result.step) == ("stopped", 2)


def test_a_rollback_again_and_again_is_an_error(tmp_path: Path) -> None:
    class Always(Callback):
        def after_step(self, state: State, outcome: Any) -> Action:
            return Action.ROLLBACK("never good")

    with pytest.raises(whet.WhetError, match="rolled back") as refused:
        fit(tmp_path / "run", Always())
    assert "never good" in str(refused.value)


class Failing(Callback):
    def __init__(self, moment: str) -> None:
        self.moment = moment

    def after_step(self, state: State, outcome: Any) -> Action:
        if self.moment == "step" and state.step == 3:
            raise ZeroDivisionError("in a callback")
        return Action.NONE

    def on_end(self, state: State, error: BaseException | None) -> None:
        if self.moment == "end":
            raise ZeroDivisionError("in a callback")


@pytest.mark.parametrize(("moment", "step"), [("step", 3), ("end", 8)])
def test_an_error_in_a_callback_saves_and_is_raised(moment: str, step: int, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        fit(tmp_path / "run", Failing(moment))
    report = whet.summarize(tmp_path / "run")
    assert (report.state, report.checkpoints[-1].step) == ("failed", step)


def test_returning_something_else_saves_and_is_an_error(tmp_path: Path) -> None:
    class Confused(Callback):
        def after_step(self, state: State, outcome: Any) -> Any:
            return "stop" if state.step == 2 else None

    with pytest.raises(UsageError, match="other than an Action"):
        fit(tmp_path / "run", Confused())
    assert saved_steps(tmp_path / "run")[-1] == 2


def test_other_callbacks_with_state_are_named_on_resume(tmp_path: Path) -> None:
    fit(tmp_path / "run", Recording(step3=Action.STOP("enough")))
    fit(tmp_path / "run")
    resumed = next(iter(read_events(open_run(tmp_path / "run"), kinds=("resume",))))
    assert resumed.get("exact") is False
    assert "Recording" in resumed.get("exactness")


def test_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"tensor": torch.zeros(2), "function": print}

    with pytest.raises(UsageError, match="without pickle") as refused:
        fit(tmp_path / "run", Odd())
    assert "Odd.function is a builtin_function_or_method" in str(refused.value)


def test_objects_that_are_not_callbacks_are_refused() -> None:
    with pytest.raises(UsageError, match="must be an instance"):
        fit(None, print)


def test_actions_merge() -> None:
    merged = Action.SAVE | Action.STOP("a") | Action.STOP("b") | Action.ROLLBACK("r")
    assert (merged.save, merged.stop, merged.rollback) == (Action.SAVE.save, "a", "r")
    assert (Action.NONE | Action.NONE) is Action.NONE
    assert (Action.NONE | merged) is merged


def test_two_callbacks_of_a_class_keep_their_own_state() -> None:
    one, two = Recording(), Recording()
    one.steps_seen, two.steps_seen = 1, 2
    saved = CallbackList([], [one, two]).state_dict()
    one.steps_seen = two.steps_seen = 0
    assert CallbackList([], [one, two]).load_state_dict(saved) == []
    assert (one.steps_seen, two.steps_seen) == (1, 2)


def test_a_timed_callback_is_called_by_the_clock() -> None:
    now, seen = 100.0, []

    class Minutely(Callback):
        every_seconds = 60.0

        def after_step(self, state: State, outcome: Any) -> Action:
            seen.append(now)
            return Action.SAVE

    callbacks = CallbackList((), [Minutely(), recording := Recording()], clock=lambda: now)
    outcome: Any = SimpleNamespace(loss=torch.tensor(1.0))
    actions = []
    for second in range(130):
        now = 100.0 + second
        actions.append(callbacks.after_step(State(step=second), outcome))
    assert seen == [101.0, 161.0, 221.0], "the first call comes within a second"
    assert recording.steps_seen == 130
    assert [second for second, action in enumerate(actions) if action is Action.SAVE] == [1, 61, 121]
