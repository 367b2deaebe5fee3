"""verify_resume: the steps between the last two checkpoints are repeated and compared before a run continues."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import whet
from whet.checkpoint import store
from whet.run.events import read_events

pytestmark = pytest.mark.torch

_draw = torch.Generator().manual_seed(5)
X, Y = torch.randn(160, 6, generator=_draw), torch.randint(0, 3, (160,), generator=_draw)
CALLS = [0]


def plain(model: nn.Module, batch: Any) -> Tensor:
    return f.cross_entropy(model(batch[0]), batch[1])


def counting(model: nn.Module, batch: Any) -> Tensor:
    """A loss with state in a global, which no checkpoint holds."""
    CALLS[0] += 1
    return f.cross_entropy(model(batch[0]), batch[1]) * (1 + 0.01 * CALLS[0])


def logging(model: nn.Module, batch: Any) -> Tensor:
    """A loss that counts its calls and does not use the count."""
    CALLS[0] += 1
    return f.cross_entropy(model(batch[0]), batch[1])


def train(run: Path | None, *, max_steps: int = 9, loss: Any = plain, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    CALLS[0] = 0
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3))
    whet.train(
        model,
        (X, Y),
        loss=functools.partial(loss, model),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        run=run,
        max_steps=max_steps,
        global_batch_size=16,
        split_batch=False,
        overrides={"threads": 1, "checkpoint_steps": 3},
        **{"on_event": None, **options},
    )
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def steps(run: Path) -> list[int]:
    return [event.step for event in read_events(run, kinds=("step",))]


@pytest.mark.parametrize("stop", [7, pytest.param(9, marks=pytest.mark.slow)])
def test_an_exact_run_is_verified(stop: int, tmp_path: Path) -> None:
    """Also a run that is finished: its last steps are repeated, and nothing else."""
    whole, run = train(None), tmp_path / "run"
    train(run, max_steps=stop)
    notified: list[tuple[str, Any]] = []
    resumed = train(run, verify_resume=True, on_event=lambda kind, fields: notified.append((kind, fields)))
    assert equal(whole, resumed)
    (event,) = read_events(run, kinds=("resume",))
    first = 7
    repeated = f"steps {first} to {stop}" if stop > first else f"step {stop}"
    assert event.step == stop
    assert event.get("exactness") == f"verified: {repeated} were repeated with the same losses and weights"
    announced = next(fields for kind, fields in notified if kind == "resume")
    assert (announced["step"], announced["exactness"]) == (6, f"verifying: {repeated} are repeated and compared")
    assert steps(run) == [*range(1, 10)], "repeated steps are logged once"


def test_hidden_state_is_found_by_repeating(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, max_steps=6, loss=counting)
    kept = store.load_newest(run / "checkpoints")
    assert kept is not None
    train(run, max_steps=6, loss=counting, verify_resume=True)
    (event,) = read_events(run, kinds=("resume",))
    assert event.get("exactness").startswith(
        "not bit-exact: steps 4 to 6 were repeated, and differ: the loss of step 4"
    )
    assert "0.weight" in event.get("exactness")
    assert event.get("exact") is False
    newest = store.load_newest(run / "checkpoints")
    assert newest is not None
    assert torch.equal(newest.snapshot.tensors["model/0.weight"], kept.snapshot.tensors["model/0.weight"])


def test_a_run_that_differs_continues_from_its_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, max_steps=6, loss=counting)
    newest = store.load_newest(run / "checkpoints")
    assert newest is not None
    resumed = train(run, max_steps=6, loss=counting, verify_resume=True)
    assert torch.equal(resumed[0], newest.snapshot.tensors["model/0.weight"])


def test_a_variable_without_consequence_is_verified(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, max_steps=6, loss=logging)
    train(run, loss=logging, verify_resume=True)
    (event,) = read_events(run, kinds=("resume",))
    assert event.get("exactness").startswith("verified: steps 4 to 6 were repeated")
    assert "CALLS[0]" in event.get("exactness")


def test_a_run_that_is_stopped_while_it_is_verified_loses_nothing(tmp_path: Path) -> None:
    class Stop(whet.Callback):
        def after_step(self, state: Any, outcome: Any) -> Any:
            return whet.Action.STOP("enough") if state.step == 4 else None

    whole, run = train(None), tmp_path / "run"
    train(run, max_steps=6)
    train(run, verify_resume=True, callbacks=[Stop()])
    assert store.list_steps(run / "checkpoints")[-1] == 6
    assert steps(run) == [*range(1, 7)]
    assert equal(whole, train(run, verify_resume=True))
    assert [event.get("exactness").split(":")[0] for event in read_events(run, kinds=("resume",))] == ["verified"]


def test_sessions_of_one_epoch_are_verified_and_advance(tmp_path: Path) -> None:
    """An epoch has 10 steps: the repeated step 10 ends the epoch of an earlier session."""
    sizes = {"max_steps": 30, "epochs": 3}
    whole, run = train(None, **sizes), tmp_path / "run"
    for number in range(1, 4):
        parameters = train(run, **sizes, epochs_per_session=1, verify_resume=True)
        assert steps(run) == [*range(1, 10 * number + 1)]
    assert equal(whole, parameters)
    exactness = [event.get("exactness").split(":")[0] for event in read_events(run, kinds=("resume",))]
    assert exactness == ["verified", "verified"]


def test_without_an_earlier_checkpoint_the_run_resumes_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, max_steps=3)
    shutil.rmtree(run / "checkpoints" / store.checkpoint_name(0))
    train(run, verify_resume=True)
    messages = [event.get("message") for event in read_events(run, kinds=("plan",))]
    assert "the resume is not verified: there is no earlier checkpoint" in messages
    (event,) = read_events(run, kinds=("resume",))
    assert event.get("exactness") == "bit-exact"


def test_a_wrong_weight_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: one weight of the restored run is off by one bit."""
    run = tmp_path / "run"
    train(run, max_steps=6)
    from whet.training import restore

    real = restore.restore_snapshot

    def flawed(snapshot: Any, model: nn.Module, *args: Any, **options: Any) -> Any:
        progress = real(snapshot, model, *args, **options)
        with torch.no_grad():
            weight = model[3].bias  # type: ignore[index]
            weight[0] = weight[0].nextafter(torch.tensor(9.0))
        return progress

    monkeypatch.setattr(restore, "restore_snapshot", flawed)
    train(run, max_steps=6, verify_resume=True)
    (event,) = read_events(run, kinds=("resume",))
    assert "were repeated, and differ" in event.get("exactness")
