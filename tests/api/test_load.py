"""`whet.load`: the weights of a run in a model, with errors that list what does not fit."""

from pathlib import Path

import pytest
import torch
from torch import nn

import whet
from small_training import train
from whet.base.errors import UsageError

pytestmark = pytest.mark.torch


def net(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.BatchNorm1d(width), nn.Linear(width, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 2, generator=generator), torch.randint(0, 3, (64,), generator=generator)


def evaluate(model: nn.Module, micro_batches) -> dict[str, float]:
    # Best in the middle of the run.
    evaluate.calls += 1
    sum(len(micro.y) for micro in micro_batches)
    return {"score": {1: 0.1, 2: 0.9}.get(evaluate.calls, 0.2)}


@pytest.fixture
def trained(tmp_path: Path):
    """A run of 4 epochs with its best evaluation after the second, and the trained model."""
    evaluate.calls = 0
    model = net()
    overrides = {"checkpoint_epochs": 1, "keep_checkpoints": 4}
    result = train(
        model,
        data(),
        epochs=4,
        run=tmp_path / "run",
        val=data(),
        evaluate=evaluate,
        goal="score",
        overrides=overrides,
    )
    return result, model


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_last_best_and_a_step_give_their_weights(trained) -> None:
    result, model = trained
    last, best, step = (whet.load(result, net(), which) for which in ("last", "best", 16))
    assert same(last, model), "buffers of BatchNorm too"
    assert same(best, step)
    assert not same(best, last)
    assert same(whet.load(str(result.path), net(), "last"), model)
    assert same(whet.load(whet.open_run(result.path), net(), "last"), model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_same_model_is_returned_with_its_mode(trained) -> None:
    given = net().eval()
    assert whet.load(trained[0], given) is given
    assert not given.training
    wrapped = torch.compile(net())
    assert whet.load(trained[0], wrapped, "last") is wrapped
    assert same(wrapped._orig_mod, trained[1])


def test_averaged_weights_are_loaded_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    result = train(model, data(), ema=True, run=tmp_path / "run")
    average = whet.load(result, net())
    assert "averaged weights (EMA) of step 8" in capsys.readouterr().err
    assert not same(average, model)
    assert same(whet.load(result, net(), "last", ema=False), model)
    assert capsys.readouterr().err == ""


def test_everything_that_does_not_fit_is_listed_and_nothing_is_changed(trained) -> None:
    other = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(5, 6))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(whet.WhetError) as raised:
        whet.load(trained[0], other, "last")
    for word in (
        "the checkpoint has 2.num_batches_tracked, 2.running_mean, 2.running_var, 3.bias, 3.weight, which",
        "2.weight is (4,) float32 in the checkpoint and (6, 5) float32 in the model",
    ):
        assert word in str(raised.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items()), "0.weight fits"
    with pytest.raises(whet.WhetError, match=r"the model has 4\.bias, 4\.weight, which the checkpoint lacks"):
        whet.load(trained[0], nn.Sequential(*net(), nn.Linear(3, 3)))
    with pytest.raises(whet.WhetError, match=r"float32 in the checkpoint and .* float64 in the model"):
        whet.load(trained[0], net().double())


def test_what_is_no_run_is_refused(trained, tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "model.pt")
    nothing = train(net(), data())
    for run, which, words in [
        (tmp_path / "model.pt", "last", "weights are loaded from a folder"),
        (tmp_path, "last", "is not a run"),
        (nothing, "last", "there are no weights to load"),
        (3, "last", "there are no weights to load"),
        (trained[0], 7, "does not have this checkpoint"),
        (trained[0], "bset", "unknown checkpoint"),
    ]:
        with pytest.raises(UsageError, match=words):
            whet.load(run, net(), which)
    with pytest.raises(UsageError, match=r"must be an nn\.Module"):
        whet.load(trained[0], net().state_dict())
