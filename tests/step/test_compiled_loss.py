"""The loss function is compiled with the model, where torch can trace both as one piece of code."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whet
from whet.data.batch import MicroBatch, TupleBatch
from whet.device.cpu import CpuDevice
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.plan.workload import Workload
from whet.run.events import read_events
from whet.step import compilation
from whet.step.compilation import CompiledCalls
from whet.step.loss import adapt_loss

pytestmark = pytest.mark.torch


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The code of all graphs that torch traces. They run uncompiled."""
    traced: list[str] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        traced.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    yield traced
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Scored(Net):
    """A model that computes its own loss, as in transformers."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": functional.cross_entropy(logits, y), "logits": logits}


def compiled(model: nn.Module) -> CompiledCalls:
    workload = Workload(recipe="any", num_parameters=72, global_batch_size=6)
    return CompiledCalls(model, make_plan(load_machine("linux-2core"), workload, overrides={"compile": "on"}))


def make_micro(num_samples: int = 6, *, first_index: int = 0) -> MicroBatch:
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, 4, generator=generator)
    y = torch.randint(0, 3, (num_samples,), generator=generator)
    ids = torch.arange(num_samples).numpy()
    return MicroBatch({"x": x, "y": y}, ids, first_index, make_data=TupleBatch.of)


def backward(loss: Any, micro: MicroBatch, model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    value = loss(micro)
    value.backward()
    return [value.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


LOSSES: dict[str, Callable[[nn.Module], Any]] = {
    "attributes": lambda model: lambda batch: functional.cross_entropy(model(batch.x), batch.y),
    "pair": lambda model: lambda batch: functional.cross_entropy(model(batch[0]), batch[1]) * 2.0,
    "criterion": lambda _model: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_model_and_loss_are_one_graph(name: str, graphs: list[str]) -> None:
    torch.manual_seed(0)
    model = Net()
    loss = adapt_loss(LOSSES[name](model), model)
    expected = backward(loss, make_micro(), model)
    calls = compiled(model)
    with calls.in_use():
        for _ in range(2):
            actual = backward(loss, make_micro(), model)
    assert len(graphs) == 1
    assert "cross_entropy" in graphs[0]
    assert "linear" in graphs[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))
    assert calls.loss is not None
    assert calls.loss.obstacle is None
    backward(loss, make_micro(), model)
    assert compilation.compiled_loss(model) is None, "outside of the context the loss is eager"


def test_other_shapes_are_compiled_too(graphs: list[str]) -> None:
    model = Net()
    loss, calls = adapt_loss(LOSSES["attributes"](model), model), compiled(model)
    with calls.in_use():
        for size in (6, 4, 5, 3):
            backward(loss, make_micro(size), model)
    assert calls.loss is not None
    assert calls.loss.obstacle is None
    assert len(graphs) == 2, "one for the first shape, one for all others"


def test_a_loss_that_cannot_be_traced_as_a_whole_leaves_the_model_compiled(graphs: list[str], capsys: Any) -> None:
    torch.manual_seed(0)
    model = Net()

    def printing(batch: Any) -> Tensor:
        outputs = model(batch.x)
        print("computed")
        return functional.cross_entropy(outputs, batch.y)

    loss, calls = adapt_loss(printing, model), compiled(model)
    expected = backward(loss, make_micro(), model)
    with calls.in_use():
        actual = [backward(loss, make_micro(), model) for _ in range(2)]
    assert calls.loss is not None
    assert calls.loss.obstacle is not None
    assert len(graphs) == 1
    assert "cross_entropy" not in graphs[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual[1], expected, strict=True))
    assert capsys.readouterr().out == "computed\n" * 3, "tracing does not run the loss"


def test_a_loss_with_a_changing_python_value_is_found_before_the_first_step(graphs: list[str]) -> None:
    model, losses = Net(), []

    def counting(batch: Any) -> Tensor:
        losses.append(0)
        return functional.cross_entropy(model(batch.x), batch.y) * len(losses)

    loss, calls = adapt_loss(counting, model), compiled(model)
    calls.settle_loss(loss, make_micro(), CpuDevice(), precision="fp32")
    assert calls.loss is not None
    assert "value that changes" in (calls.loss.obstacle or "")
    num_before = len(graphs)
    losses.clear()
    with calls.in_use():
        values = [float(backward(loss, make_micro(), model)[0]) for _ in range(5)]
    assert [value / values[0] for value in values] == pytest.approx([1, 2, 3, 4, 5])
    assert len(losses) == 5, "each step ran the loss once"
    assert "cross_entropy" not in "".join(graphs[num_before:]), "only the model is compiled"


def test_a_value_that_changes_once_is_compiled_for(graphs: list[str]) -> None:
    model, weights = Net(), [1.0]
    loss = adapt_loss(lambda batch: functional.cross_entropy(model(batch.x), batch.y) * weights[0], model)
    calls = compiled(model)
    calls.settle_loss(loss, make_micro(), CpuDevice(), precision="fp32")
    with calls.in_use():
        before = float(backward(loss, make_micro(), model)[0])
        weights[0] = 3.0
        after = float(backward(loss, make_micro(), model)[0])
    assert after == pytest.approx(3 * before)
    assert calls.loss is not None
    assert calls.loss.obstacle is None
    assert len(graphs) == 2


def test_an_error_of_the_loss_is_raised_as_without_compiling(graphs: list[str]) -> None:
    model = Net()
    loss = adapt_loss(lambda batch: functional.cross_entropy(model(batch.x).T, batch.y), model)
    with compiled(model).in_use(), pytest.raises((ValueError, RuntimeError), match="batch_size") as caught:
        loss(make_micro())
    assert not type(caught.value).__module__.startswith("torch._dynamo")
    assert graphs


def test_a_model_that_computes_its_loss_is_compiled_alone(graphs: list[str]) -> None:
    model = Scored()
    device = CpuDevice()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def own(batch: Any) -> Tensor:
        return model(batch.x, batch.y)["loss"]

    def outside(batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch.x, batch.y)["logits"], batch.y)

    for loss, has_own in ((own, True), (outside, False)):
        calls, rng = compiled(model), (torch.get_rng_state(), random.getstate())
        calls.settle_loss(adapt_loss(loss, model), make_micro(), device, precision="fp32")
        assert (calls.loss is None) == has_own
        assert torch.equal(torch.get_rng_state(), rng[0])
        assert random.getstate() == rng[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len(graphs) == 1


def test_settling_restores_the_generators_that_a_loss_draws_from(graphs: list[str]) -> None:
    model = Net()

    def mixing(batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch.x), batch.y) * random.random() + torch.rand(()) + np.random.rand()

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    compiled(model).settle_loss(adapt_loss(mixing, model), make_micro(), CpuDevice(), precision="fp32")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert graphs, "it was settled"


def test_a_loss_that_fails_while_it_is_settled_fails_in_its_step(graphs: list[str]) -> None:
    model = Net()

    def failing(_batch: Any) -> Tensor:
        raise MemoryError("too much")

    calls = compiled(model)
    calls.settle_loss(adapt_loss(failing, model), make_micro(), CpuDevice(), precision="fp32")
    assert calls.loss is not None
    assert graphs == []


def test_models_of_one_architecture_share_compiled_code(graphs: list[str]) -> None:
    for width in (8, 8, 16):
        model = Net(width)
        with compiled(model).in_use():
            backward(adapt_loss(LOSSES["attributes"](model), model), make_micro(), model)
    assert len(graphs) == 2


def test_a_model_may_have_several_losses(graphs: list[str]) -> None:
    model = Net()
    losses = [adapt_loss(LOSSES[name](model), model) for name in ("attributes", "pair")]
    calls = compiled(model)
    with calls.in_use():
        for _ in range(2):
            for loss in losses:
                backward(loss, make_micro(), model)
    assert len(graphs) == 2
    assert calls.loss is not None
    assert calls.loss.obstacle is None


# --- in runs ----------------------------------------------------------------------------------------------------------


def plan_lines(path: Path) -> list[str]:
    return [event.get("message") for event in read_events(path, kinds=("plan",)) if event.get("message")]


def warnings(path: Path) -> list[str]:
    return [event.get("reason") for event in read_events(path, kinds=("warning",))]


def train(path: Path, make_loss: Callable[[nn.Module, int], Any], *, max_steps: int = 6) -> None:
    torch.manual_seed(0)
    model, micro = Net(), make_micro(24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (micro.fields["x"], micro.fields["y"])
    options = {"global_batch_size": 6, "epochs": 4, "max_steps": max_steps, "on_event": None, "device": "cpu"}
    with whet.Session(model, optimizer, data, run=path, overrides={"compile": "on"}, **options) as session:
        for batch in session:
            session.step(make_loss(model, session.state.step), batch)


def test_a_step_that_is_compiled_for_another_value_makes_a_run_inexact(
    graphs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch compiles the first value into the code and later ones not: a resumed run would begin with another one."""
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))

    def weighted(weight: float, model: nn.Module) -> Any:
        return lambda batch: functional.cross_entropy(model(batch.x), batch.y) * weight

    train(tmp_path / "changing", lambda model, step: weighted(1 / (step + 1), model))
    assert graphs
    again = "your loss function was compiled again for known shapes: it may depend on a value that changes"
    assert again in warnings(tmp_path / "changing")
    train(tmp_path / "changing", lambda model, step: weighted(1 / (step + 1), model), max_steps=8)
    resumed = [event for event in read_events(tmp_path / "changing") if event.kind in ("resume", "start")][-1]
    assert "not bit-exact" in str(resumed.fields)
    torch.compiler.reset()
    train(tmp_path / "fixed", lambda model, _step: weighted(0.5, model))
    assert again not in warnings(tmp_path / "fixed")


def test_a_decision_about_a_loss_is_kept_with_its_comparison(
    graphs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of the loss could draw numbers that a resumed run needs."""
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    calls: list[str] = []

    def printing(model: nn.Module, _step: int) -> Any:
        def loss(batch: Any) -> Tensor:
            print("x")
            calls.append("x")
            return functional.cross_entropy(model(batch.x), batch.y)

        return loss

    counts = []
    for name in ("first", "second"):
        calls.clear()
        train(tmp_path / name, printing)
        counts.append(len(calls))
        assert plan_lines(tmp_path / name)[0].startswith("compiled")
    assert graphs
    assert counts[1] < counts[0]


def test_evaluations_and_several_losses_leave_a_compiled_run_exact(
    graphs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compiled after the first step, and for known shapes."""
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    torch.manual_seed(0)
    model, micro = Net(), make_micro(24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (micro.fields["x"], micro.fields["y"])
    options = {"global_batch_size": 6, "epochs": 2, "on_event": None, "device": "cpu", "run": tmp_path / "run"}

    def evaluate(model: nn.Module, batches: Any) -> dict[str, float]:
        return {"loss": sum(float(functional.cross_entropy(model(x), y)) for x, y in batches)}

    losses = [LOSSES[name](model) for name in ("attributes", "pair")]
    with whet.Session(model, optimizer, data, overrides={"compile": "on"}, **options) as session:
        for batch in session:
            session.step(losses[session.state.step % 2], batch)
            session.evaluate(evaluate, data)
    assert len(graphs) >= 3
    assert not warnings(tmp_path / "run")
