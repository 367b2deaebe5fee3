"""The state after the first step is saved, restored and compared: what does not survive is refused there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import whet
from whet.base.errors import UsageError
from whet.checkpoint import store
from whet.checkpoint.comparison import compare_snapshots
from whet.run import durable
from whet.run.events import read_events
from whet.training import state_check

pytestmark = pytest.mark.torch

_draw = torch.Generator().manual_seed(5)
X, Y = torch.randn(64, 6, generator=_draw), torch.randint(0, 3, (64,), generator=_draw)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))


def train(run: Path | None, *, optimizer: Any = torch.optim.AdamW, max_steps: int = 4, **options: Any) -> list[Tensor]:
    model = net()
    made = optimizer(model.parameters(), lr=0.01)
    if make_schedule := options.pop("make_schedule", None):
        options |= {"schedule": make_schedule(made), "schedule_interval": "step"}
    defaults: dict[str, Any] = {"global_batch_size": 16, "overrides": {"threads": 1}, "on_event": None}
    whet.train(
        model, (X, Y), loss=f.cross_entropy, optimizer=made, run=run, max_steps=max_steps, **{**defaults, **options}
    )
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"optimizer": torch.optim.Adagrad, "ema": True}, marks=pytest.mark.slow),
        {"optimizer": torch.optim.NAdam, "clip": 0.5, "schedule": "cosine"},
        {"make_schedule": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=4)},
    ],
)
def test_the_check_does_not_change_the_training(options: dict[str, Any], tmp_path: Path) -> None:
    whole, checked = train(None, **options), train(tmp_path / "run", **options)
    assert all(torch.equal(a, b) for a, b in zip(whole, checked, strict=True))
    assert not [path for path in (tmp_path / "run").rglob("*") if durable.is_leftover(path)]


def test_manual_steps_and_several_optimizers_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(run: Path | None) -> list[Tensor]:
        torch.manual_seed(0)
        first, second = nn.Linear(6, 3), nn.Linear(6, 3)
        optimizers = {name: torch.optim.Adam(m.parameters(), lr=0.1) for name, m in (("a", first), ("b", second))}
        nets = nn.ModuleList([first, second])
        options: dict[str, Any] = {"global_batch_size": 32, "overrides": {"threads": 1}}
        with whet.Session(nets, optimizers, (X, Y), run=run, **options) as session:
            for batch in session:
                session.step(lambda b: f.cross_entropy(first(b[0]), b[1]), batch, optimizer="a")
                session.step(lambda b: f.cross_entropy(second(b[0]), b[1]), batch, optimizer="b")
        by_hand = None if run is None else run.with_name("by hand")
        with whet.Session(nets, optimizers, (X, Y), run=by_hand, **options) as session:
            for batch in session:
                with session.manual(batch) as (x, y):
                    f.cross_entropy(first(x), y).backward()
                    optimizers["a"].step()
        return [p.detach().clone() for p in nets.parameters()]

    calls = []
    check = state_check.check_first_step
    monkeypatch.setattr("whet.training.batch_loop.check_first_step", lambda run: (calls.append(run), check(run)))
    whole, checked = loop(None), loop(tmp_path / "run")
    assert len(calls) == 2, "once for each run, not for each optimizer"
    assert all(torch.equal(a, b) for a, b in zip(whole, checked, strict=True))


class Forgetful:
    """Its load_state_dict does not restore what state_dict returns."""

    def __init__(self) -> None:
        self.count = 3

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"] + 1


class Refusing(Forgetful):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("another version")


class Opaque(torch.optim.SGD):
    """An optimizer with state that has no encoding."""

    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["note"] = object()
        return super().step(closure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"register": {"mine": Forgetful()}},
            r"cannot be restored from a checkpoint: saved and restored.*\n.*mine.*count 3 -> 4",
        ),
        (
            {"register": {"mine": Refusing()}},
            r"cannot be restored from a checkpoint: .*cannot be restored\n.*another version",
        ),
        ({"optimizer": Opaque}, r"state of the optimizer cannot be saved without pickle\n.*note"),
    ],
)
def test_what_does_not_survive_is_refused_before_the_first_step_counts(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        train(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists(), "a corrected call would not fit the refused one"


def test_planted_faults_of_the_checkpoint_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode: Callable[[Any], Any] = store.encode_and_decode

    def flipped(snapshot: Any) -> Any:
        snapshot = decode(snapshot)
        name = "optimizer/0.weight/exp_avg"
        return replace(
            snapshot, tensors={**snapshot.tensors, name: snapshot.tensors[name].nextafter(torch.tensor(9.0))}
        )

    monkeypatch.setattr(store, "encode_and_decode", flipped)
    with pytest.raises(UsageError, match=r"encoded and decoded, it differs\n.*exp_avg of 0\.weight in the optim"):
        train(tmp_path / "run")
    monkeypatch.setattr(store, "encode_and_decode", decode)
    restore = state_check.restore_snapshot

    def forgetful(snapshot: Any, model: nn.Module, *args: Any, **options: Any) -> Any:
        saved = restore(snapshot, model, *args, **options)
        model[1].running_mean.add_(1e-6)  # type: ignore[index, union-attr, operator]
        return saved

    monkeypatch.setattr(state_check, "restore_snapshot", forgetful)
    with pytest.raises(UsageError, match=r"saved and restored, it differs\n.*1\.running_mean"):
        train(tmp_path / "run")


def test_what_is_checked_is_what_a_checkpoint_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check encodes to memory. A checkpoint of the same state is read as the same."""
    checked: list[Any] = []
    decode = store.encode_and_decode

    def written(snapshot: Any) -> Any:
        store.save_checkpoint(tmp_path / "scratch", snapshot, step=snapshot.facts["step"])
        checked.append(decode(snapshot))
        return checked[-1]

    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(store, "encode_and_decode", written)
    train(tmp_path / "run", optimizer=torch.optim.Adagrad, ema=True)
    newest = store.load_newest(tmp_path / "scratch")
    assert newest is not None
    assert compare_snapshots(newest.snapshot, checked[0]) == []
    assert newest.snapshot.info == checked[0].info


class Ignoring(Forgetful):
    """Its load_state_dict does nothing, which shows only in a new process."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_what_a_resume_did_not_restore_is_named(tmp_path: Path) -> None:
    first, second = Ignoring(), Ignoring()
    train(tmp_path / "run", max_steps=2, register={"mine": first})
    second.count = 1
    train(tmp_path / "run", register={"mine": second})
    (event,) = read_events(tmp_path / "run", kinds=("resume",))
    assert event.get("exactness").startswith("not bit-exact: not restored: registered.mine.count 3 -> 1")
