"""Activation checkpointing in compiled models, together or with one of them switched off."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whet
from whet.autotune.step_bench import ProbeFailedError
from whet.base.errors import WhetError
from whet.data.batch import MicroBatch
from whet.device.open import current_machine
from whet.plan.plan import make_plan
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config
from whet.training.workload import describe_workload

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"),
]

WIDTH = 16
OUT_OF_MEMORY = "MPS backend out of memory (MPS allocated: 5.30 GiB, other allocations: 0 bytes, max allowed: 5.33 GiB)"


@pytest.fixture(autouse=True)
def _as_the_compiler_found_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler sets an environment variable and does not remove it."""
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(norm(WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data() -> dict[str, Tensor]:
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": (x[:, 0] > 0).long()}


def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are compiled from now on, by torch's own means but for the kernels."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return graphs


def train(model: nn.Module, run: Path, *, fails_in_step: int = 0, epochs: int = 2, **overrides: Any) -> None:
    failures = 2 if fails_in_step else 0
    with whet.Session(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data(),
        run=run,
        device="cpu",
        global_batch_size=16,
        epochs=epochs,
        overrides={"threads": 1, "micro_batch": 16, **overrides},
    ) as session:

        def loss(micro: MicroBatch) -> Tensor:
            nonlocal failures
            if session.state.step + 1 == fails_in_step and failures:
                failures -= 1
                raise RuntimeError(OUT_OF_MEMORY)
            return functional.cross_entropy(model(micro.x), micro.y)

        for batch in session:
            session.step(loss, batch)


def reported(run: Path, kind: str, field: str) -> list[str]:
    return [event.get(field) for event in read_events(open_run(run)) if event.kind == kind]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], msg=name)


@pytest.mark.parametrize("switch", ["on", pytest.param("blocks", marks=pytest.mark.slow)])
def test_compiled_model_recomputes_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    plain = Net()
    train(plain, tmp_path / "plain", compile="off")
    graphs, model = compiled_graphs(monkeypatch), Net()
    train(model, tmp_path / "run", compile=switch, activation_checkpointing="on")
    (line,) = reported(tmp_path / "run", "plan", "message")
    assert line.startswith("compiled: loss and 14 gradients agree with the eager model")
    again = [sum("checkpoint" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    assert max(again) == (3 if switch == "on" else 1)
    assert switch == "on" or sum(again) == 2, "only the first one's input needs no gradient"
    assert_same(plain, model)


def test_recomputed_blocks_with_batchnorm_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, plain, model = compiled_graphs(monkeypatch), Net(nn.BatchNorm1d), Net(nn.BatchNorm1d)
    train(plain, tmp_path / "plain", compile="off", activation_checkpointing="on")
    train(model, tmp_path / "run", compile="on", activation_checkpointing="on")
    (line,) = reported(tmp_path / "run", "plan", "message")
    assert line.startswith("not compiled: activation_checkpointing=on recomputes blocks with BatchNorm")
    assert open_run(tmp_path / "run").plan["settings"]["compile"]["value"] == "off"
    assert graphs == []
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_simulated_out_of_memory_of_a_compiled_run_continues_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With BatchNorm the batch is not split: activations are recomputed, which torch cannot compile."""
    plain, model = Net(nn.BatchNorm1d), Net(nn.BatchNorm1d)
    train(plain, tmp_path / "plain", compile="off", epochs=3)
    graphs, run = compiled_graphs(monkeypatch), tmp_path / "run"
    train(model, run, compile="on", fails_in_step=2)
    assert graphs
    cures = reported(run, "oom", "action")
    assert cures[-1] == "activations are recomputed in the backward pass, and the model is no longer compiled"
    learnt = open_run(run).plan["settings"]["compile"]
    assert (learnt["value"], learnt["evidence"]["requested"]) == ("off", "on")
    assert model._compiled_call_impl is None
    graphs.clear()
    resumed = Net(nn.BatchNorm1d)
    train(resumed, run, compile="on", epochs=3)
    assert graphs == [], "nor on resume"
    assert_same(plain, resumed)


def test_model_that_cannot_be_compiled_wins_no_measurement() -> None:
    model, training = Net(nn.BatchNorm1d), parse_training_config({"global_batch_size": 16, "epochs": 1})
    machine, system_state = current_machine()
    plan = make_plan(
        machine, describe_workload(model, data(), training, recipe="net"), overrides={}, system_state=system_state
    )
    choice = whet.OptimizerChoice(lr=1e-2)

    def loss(micro: MicroBatch) -> Tensor:
        return functional.cross_entropy(model(micro.x), micro.y)

    with LocalStepBench(model, choice, data(), training, loss=loss, plan=plan, may_compile=True) as rig:
        with pytest.raises(ProbeFailedError, match="blocks with BatchNorm"):
            rig.prepare({"compile": "on", "activation_checkpointing": "on"}, seconds=60.0)
        rig.prepare({"activation_checkpointing": "on"}, seconds=60.0).close()


def test_only_a_missing_cpp_compiler_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no rule for this operator")

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    with pytest.raises(WhetError, match="could not be compiled") as caught:
        train(Net(), tmp_path / "run", compile="on")
    assert caught.value.try_ == "compile=off"
