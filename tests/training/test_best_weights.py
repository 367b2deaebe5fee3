"""The test split is evaluated with the best weights on the validation split, and the training is unchanged."""

from pathlib import Path

import pytest
import torch
from torch import nn

import whet
from whet.checkpoint import store
from whet.report.run_report import summarize
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch


def train(run: Path, *, ema: bool = False, has_test: bool = True, mode: str = "max") -> list[float]:
    """Train a line; step 8 of 24 is best on validation. Return the weights that the test evaluation saw."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    data = {"x": torch.linspace(-1, 1, 32)[:, None], "y": torch.linspace(-3, 3, 32)[:, None]}
    seen, scores = [], iter((0.5, 0.2, 0.1) if mode == "max" else (0.1, 0.2, 0.5))

    def evaluate(model: nn.Module, micro_batches: object) -> dict[str, float]:
        weight = model.weight.item()
        if next(iter(micro_batches)).x.shape[1] == 2:
            seen.append(weight)
            return {"score": 0.9}
        return {"score": next(scores), "weight": weight}

    wide = {"x": torch.zeros(4, 2), "y": torch.zeros(4, 1)}
    whet.train(
        model, data, loss=lambda micro: ((model(micro.x) - micro.y) ** 2).mean(), run=run, ema=ema, on_event=None,
        optimizer=whet.OptimizerChoice(name="sgd", lr=0.05), evaluate=evaluate, val=data, measure=False,
        test=wide if has_test else None, goal="score", mode=mode, global_batch_size=4, epochs=3, device="cpu",
        overrides={"keep_checkpoints": 2},
    )  # fmt: skip
    return seen


@pytest.mark.parametrize(("ema", "mode"), [pytest.param(False, "max", marks=pytest.mark.slow), (True, "min")])
def test_the_test_split_is_evaluated_with_the_best_weights(tmp_path: Path, ema: bool, mode: str) -> None:
    (seen,) = train(tmp_path / "run", ema=ema, mode=mode)
    evaluations = list(read_events(open_run(tmp_path / "run"), kinds=("eval",)))
    assert [event.step for event in evaluations] == [8, 16, 24, 24]
    first, _, third, tested = evaluations
    assert seen == first.number("weight") != third.number("weight")
    assert tested.get("weights") == store.checkpoint_name(8)
    report = whet.summarize(tmp_path / "run")
    assert report.tested_step == 8
    assert {line.name for line in summarize(tmp_path / "run").track("eval").lines} == {"score", "weight", "test_score"}
    assert report.best_goal_step == 8
    train(tmp_path / "untested", ema=ema, mode=mode, has_test=False)
    ours, theirs = (store.load_newest(open_run(tmp_path / name).checkpoints) for name in ("run", "untested"))
    assert ours is not None
    assert theirs is not None
    assert ours[0] == theirs[0] == 24
    for name, tensor in theirs[1].tensors.items():
        assert torch.equal(ours[1].tensors[name], tensor), name


def test_a_damaged_best_checkpoint_is_reported_and_the_newest_weights_are_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store.load_checkpoint

    def load(path: Path) -> object:
        if path.name == store.checkpoint_name(8):
            (path / "manifest.json").write_text("{")
        return real(path)

    monkeypatch.setattr(store, "load_checkpoint", load)
    (seen,) = train(tmp_path / "run")
    events = list(read_events(open_run(tmp_path / "run"), kinds=("eval",)))
    last_dev = [event for event in events if event.get("weight") is not None][-1]
    assert seen == last_dev.number("weight")
    assert events[-1].get("weights") == store.checkpoint_name(24)
    warnings = [str(event.get("reason")) for event in read_events(open_run(tmp_path / "run"), kinds=("warning",))]
    assert len([reason for reason in warnings if "the best weights, after step 8, cannot be read" in reason]) == 1
