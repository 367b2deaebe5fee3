"""State that is too large for a checkpoint is refused at the first step, and named if it grows later."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import whet
from whet.base.errors import UsageError, WhetError
from whet.checkpoint import encoding, store
from whet.checkpoint.manifest import DamagedCheckpointError, read_verified
from whet.run.events import read_events

pytestmark = pytest.mark.torch

_draw = torch.Generator().manual_seed(5)
X, Y = torch.randn(64, 6, generator=_draw), torch.randint(0, 3, (64,), generator=_draw)


class Noting(nn.Linear):
    """A module with an attribute that may grow while it trains."""

    note = ""
    growth = 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.note = self.note + "a" * self.growth
        return super().forward(input)


class History(whet.Callback):
    """A callback whose state may grow."""

    def __init__(self, growth: int) -> None:
        self.history: list[int] = []
        self.growth = growth

    def after_step(self, status: Any, outcome: Any) -> None:
        self.history += [7] * self.growth

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = state["history"]


def train(run: Path, kind: str, growth: int, *, max_steps: int = 6) -> None:
    torch.manual_seed(0)
    model = Noting(6, 3)
    model.note = ""
    registered: list[Any] = []

    def loss(batch: Any) -> Tensor:
        if kind == "numbers":
            registered.extend([7] * growth)
        elif kind == "tensors":
            registered.extend(torch.zeros(1) for _ in range(growth))
        elif kind == "opaque" and growth > 100 and len(registered) < 2:
            registered.append(object() if registered else 1)
        value: Tensor = f.cross_entropy(model(batch[0]), batch[1])
        return value

    if kind == "attribute":
        model.growth = growth
    callbacks = [History(growth)] if kind == "callback" else []
    whet.train(
        model,
        (X, Y),
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        run=run,
        register={"memory": registered},
        callbacks=callbacks,
        global_batch_size=16,
        max_steps=max_steps,
        epochs=4,
        split_batch=False,
        measure=False,
        overrides={"threads": 1, "checkpoint_steps": 2},
        on_event=None,
    )


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_FACTS_BYTES", 60_000)
    monkeypatch.setattr(encoding, "MAX_TENSORS", 100)


LIMITED = [
    ("numbers", 8_000, "the registered object 'memory'"),
    ("tensors", 30, "the registered object 'memory'"),
    ("attribute", 15_000, "the attribute note"),
    ("callback", 8_000, "the callback History"),
]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(("kind", "growth", "name"), [*LIMITED, ("opaque", 200, "the registered object 'memory'")])
def test_state_that_grows_too_large_is_named_and_the_run_continues(
    kind: str, growth: int, name: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(run, kind, growth)
    newest = store.load_newest(run / "checkpoints")
    assert newest is not None
    assert (newest.step, newest.rejected) == (6, [])
    assert [gap for gap in newest.snapshot.info.gaps if gap.startswith(f"{name} is not saved")]
    reasons = [str(event.get("reason")) for event in read_events(run, kinds=("warning",))]
    assert len([reason for reason in reasons if f"{name} is not saved" in reason]) == 1, "once, not at each save"
    train(run, kind, 0, max_steps=8)
    resumed = [*read_events(run, kinds=("resume",))][-1]
    assert str(resumed.get("exactness")).startswith("not bit-exact: ")
    assert f"{name} is not saved" in str(resumed.get("exactness"))
    assert "omitted" not in str(resumed.get("exactness"))


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("kind", "growth", "name"), [(kind, 8 * growth, name) for kind, growth, name in LIMITED if kind != "callback"]
)
def test_state_that_is_too_large_at_once_is_refused(kind: str, growth: int, name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"too large for a checkpoint\n.*{name} has "):
        train(tmp_path / "run", kind, growth)
    assert not (tmp_path / "run").exists()


def test_a_file_that_no_reader_accepts_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "run", "numbers", 10, max_steps=2)
    newest = store.load_newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    monkeypatch.setattr(encoding, "MAX_FACTS_BYTES", 1_000)
    with pytest.raises(WhetError, match="too large for a checkpoint"):
        store.save_checkpoint(tmp_path, newest.snapshot, step=2)
    with pytest.raises(DamagedCheckpointError, match="too large"):
        read_verified(tmp_path / "run" / "checkpoints" / "step-000000002" / store.FACTS)


@pytest.mark.parametrize(("depth", "is_saved"), [(24, True), (30, False)])
def test_nested_state_is_restored_or_left_out(depth: int, is_saved: bool, tmp_path: Path) -> None:
    """Each dict with numbers as keys takes three levels of JSON, and a reader limits them."""

    def run_steps(stop_after: int | None) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        registered: dict[str, Any] = {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with whet.Session(model, optimizer, (X, Y), global_batch_size=16, epochs=2, run=tmp_path / "run") as session:
            session.register("nested", registered)
            restored = {**registered}
            for batch in session:
                session.step(f.cross_entropy, batch)
                if session.progress.step == 2:
                    value: Any = 1
                    for level in range(depth):
                        value = {level: value}
                    registered["value"] = value
                if session.progress.step == stop_after:
                    break
        return restored

    run_steps(4)
    restored = run_steps(None)
    (resume,) = read_events(tmp_path / "run", kinds=("resume",))
    assert resume.step == 4
    assert ("value" in restored) == is_saved
    claim = "session state" if is_saved else "not bit-exact: the registered object 'nested'"
    assert str(resume.get("exactness")).startswith(claim)
