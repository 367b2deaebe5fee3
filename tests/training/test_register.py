"""session.register and register=: objects of the user are saved, restored and checked with the run."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

import whet
from whet.base.errors import UsageError, WhetError
from whet.run.events import read_events

pytestmark = pytest.mark.torch

_draw = torch.Generator().manual_seed(5)
X, Y = torch.randn(640, 10, generator=_draw), torch.randint(0, 4, (640,), generator=_draw)
OPTIONS: dict[str, Any] = {"global_batch_size": 64, "epochs": 2, "overrides": {"threads": 1}, "split_batch": False}
CUSTOM_LOOP = "session state restored exactly; your own variables only if registered"


class Counter:
    """An object with state_dict whose state matters to the training."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def exactness(run: Path) -> str:
    return str([*read_events(run, kinds=("resume",))][-1].get("exactness"))


def warnings(run: Path) -> list[str]:
    return [event.get("reason") for event in read_events(run, kinds=("warning",))]


def own_loop(run: Path | None, *, stop: int | None = None, names: tuple[str, ...] | None = None) -> list[Tensor]:
    """Train with a loss that depends on objects of every kind that can be registered."""
    torch.manual_seed(0)
    model = nn.Linear(10, 4)
    objects: dict[str, Any] = {
        "counter": Counter(),
        "average": AveragedModel(model),
        "list": [0.0, {"n": 0}],
        "dict": {"scale": 1.0},
        "tensor": torch.zeros(4),
        "array": np.zeros(4),
        "torch generator": torch.Generator().manual_seed(1),
        "python generator": random.Random(1),
        "numpy generator": np.random.default_rng(1),
    }

    def loss(batch: Any) -> Tensor:
        objects["counter"].count += 1
        objects["list"][1]["n"] += 1
        objects["dict"]["scale"] *= 0.99
        objects["tensor"] += 0.01
        objects["array"] += 0.01
        bias = (
            objects["tensor"]
            + torch.from_numpy(objects["array"]).float()
            + torch.rand(4, generator=objects["torch generator"])
        )
        bias = (
            bias + objects["python generator"].random() + objects["numpy generator"].random() + objects["list"][1]["n"]
        )
        bias = bias + objects["numpy generator"].spawn(1)[0].random()
        scale = objects["dict"]["scale"] + 0.01 * objects["counter"].count
        toward = objects["average"].module.weight.detach()
        return scale * f.cross_entropy(model(batch[0]) + bias, batch[1]) + (model.weight - toward).square().sum()

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with whet.Session(model, optimizer, (X, Y), run=run, **OPTIONS) as session:
        for name in objects if names is None else names:
            session.register(name, objects[name])
        for batch in session:
            session.step(loss, batch)
            objects["average"].update_parameters(model)
            if session.state.step == stop:
                break
    return [p.detach().clone() for p in model.parameters()]


def test_registered_objects_of_every_kind_are_restored(tmp_path: Path) -> None:
    whole = own_loop(None)
    own_loop(tmp_path / "run", stop=7)
    resumed = own_loop(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert exactness(tmp_path / "run") == CUSTOM_LOOP


def test_an_object_that_is_no_longer_registered_is_named(tmp_path: Path) -> None:
    own_loop(tmp_path / "run", stop=7, names=("counter", "list"))
    own_loop(tmp_path / "run", stop=9, names=("list", "dict"))
    assert "'counter' was registered and no longer is" in warnings(tmp_path / "run")
    assert "'dict' was not registered when the checkpoint was written" in warnings(tmp_path / "run")
    own_loop(tmp_path / "run", names=("list", "dict"))
    assert "not bit-exact since step 7" in exactness(tmp_path / "run")


def test_the_initial_state_of_registered_objects_is_saved(tmp_path: Path) -> None:
    """A second call with the same object starts from its initial state, if a step was made and none was saved."""
    counter = Counter()
    for _ in range(2):
        model = nn.Linear(10, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with suppress(ZeroDivisionError), whet.Session(model, optimizer, X, run=tmp_path / "run", **OPTIONS) as session:
            assert session.register("counter", counter) is counter
            assert counter.count == 0
            for batch in session:
                with session.manual(batch):
                    counter.count += 1
                    if counter.count == 2:
                        raise ZeroDivisionError


def test_the_short_call_registers_too(tmp_path: Path) -> None:
    def train(run: Path | None, *, max_steps: int) -> list[Tensor]:
        torch.manual_seed(0)
        model, counter = nn.Linear(10, 4), Counter()

        def loss(batch: Any) -> Tensor:
            counter.count += 1
            return counter.count * f.cross_entropy(model(batch[0]), batch[1])

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {**OPTIONS, "max_steps": max_steps, "register": {"counter": counter}, "on_event": None}
        whet.train(model, (X, Y), loss=loss, optimizer=optimizer, run=run, **options)
        return [p.detach().clone() for p in model.parameters()]

    whole = train(None, max_steps=12)
    train(tmp_path / "run", max_steps=5)
    resumed = train(tmp_path / "run", max_steps=12)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert exactness(tmp_path / "run") == "bit-exact"


class Pickled:
    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"object": object()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


@pytest.mark.parametrize(
    ("name", "obj", "problem"),
    [
        ("lock", object(), "'lock' has no state that could be saved"),
        ("class", Counter, "'class' has no state that could be saved"),
        ("", Counter(), "needs a name"),
        ("taken", Counter(), "two objects are registered by one name"),
    ],
)
def test_what_cannot_be_registered_is_refused(name: str, obj: Any, problem: str) -> None:
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whet.Session(model, optimizer, X, **OPTIONS) as session:
        session.register("taken", Counter())
        with pytest.raises(UsageError, match=problem):
            session.register(name, obj)


def test_a_state_that_cannot_be_saved_is_refused_by_its_path(tmp_path: Path) -> None:
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"a registered object cannot be saved without pickle\n.*mine.*inner.*object"):
        whet.train(
            model,
            (X, Y),
            loss=f.cross_entropy,
            optimizer=optimizer,
            run=tmp_path / "run",
            register={"mine": Pickled()},
            on_event=None,
            **OPTIONS,
        )
    assert not (tmp_path / "run").exists()


def test_registering_after_the_first_batch_is_refused() -> None:
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whet.Session(model, optimizer, (X, Y), **OPTIONS) as session:
        for _batch in session:
            with pytest.raises(UsageError, match="registered too late"):
                session.register("counter", Counter())
            break


def test_an_object_that_rejects_its_state_is_named(tmp_path: Path) -> None:
    own_loop(tmp_path / "run", stop=3, names=("tensor",))
    model = nn.Linear(10, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = whet.Session(model, optimizer, (X, Y), run=tmp_path / "run", **OPTIONS)
    problem = "the registered object 'tensor' does not accept its saved state"
    with session, pytest.raises(WhetError, match=problem):
        session.register("tensor", torch.zeros(5))


class Teacher(nn.Module):
    """State that its state_dict leaves out: an attribute, a generator, a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)
        self.calls, self.noise = 0, torch.Generator().manual_seed(2)
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.linear(x) * (1 + self.calls) + torch.rand(4, generator=self.noise) + self.mean
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs.detach()


class Replay:
    """Its load_state_dict assigns a new list."""

    def __init__(self) -> None:
        self.items: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


def test_a_registered_module_keeps_what_its_state_dict_lacks(tmp_path: Path) -> None:
    def train(run: Path | None, *, stop: int | None = None) -> list[Tensor]:
        torch.manual_seed(0)
        model, teacher, replay = nn.Linear(10, 4), Teacher(), Replay()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with whet.Session(model, optimizer, (X, Y), run=run, **OPTIONS) as session:
            session.register("teacher", teacher)
            session.register("replay", replay)
            # The check at the first step must leave the user's own references valid.
            items = replay.items
            for batch in session:
                session.step(lambda b: f.mse_loss(model(b[0]), teacher(b[0])) * (1 + len(items)), batch)
                items.append(1.0)
                if session.state.step == stop:
                    break
        assert items is replay.items
        return [p.detach().clone() for p in model.parameters()]

    whole = train(None)
    train(tmp_path / "run", stop=7)
    resumed = train(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert exactness(tmp_path / "run") == CUSTOM_LOOP


class Changing(whet.Callback):
    """Changes a registered module after step 5."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change = change

    def after_step(self, state: Any, outcome: Any) -> whet.Action:
        if state.step == 5:
            self.change()
        return whet.Action.NONE


def train_with_teacher(run: Path, change: Callable[[nn.Sequential], Any], *, stop: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model, teacher = nn.Linear(10, 4), nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def begin() -> None:
        change(teacher)

    with whet.Session(model, optimizer, (X, Y), run=run, callbacks=[Changing(begin)], **OPTIONS) as session:
        session.register("teacher", teacher)
        for batch in session:
            session.step(
                lambda b: f.cross_entropy(model(b[0]), b[1]) + (model(b[0]) - teacher(b[0])).square().mean(), batch
            )
            if session.state.step == stop:
                break
    return [tensor.detach().clone() for tensor in (*model.parameters(), *teacher.parameters(), *teacher.buffers())]


@pytest.mark.parametrize(
    "change",
    [
        lambda teacher: prune.l1_unstructured(teacher[0], "weight", 0.5),
        lambda teacher: teacher.append(nn.Tanh()),
        lambda teacher: parametrizations.weight_norm(teacher[1]),
    ],
)
def test_a_registered_module_that_changes_is_restored(change: Callable[[nn.Sequential], Any], tmp_path: Path) -> None:
    whole = train_with_teacher(tmp_path / "whole", change)
    train_with_teacher(tmp_path / "run", change, stop=8)
    resumed = train_with_teacher(tmp_path / "run", change)
    assert len(whole) == len(resumed)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert exactness(tmp_path / "run") == CUSTOM_LOOP


def test_a_registered_module_that_cannot_be_made_again_is_named(tmp_path: Path) -> None:
    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    train_with_teacher(tmp_path / "run", lambda teacher: teacher.append(Local()), stop=8)
    train_with_teacher(tmp_path / "run", lambda _: None)
    assert "'teacher' is not saved: it holds a Local" in exactness(tmp_path / "run")
