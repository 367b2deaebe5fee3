"""How a plan is executed: micro-batch, optimizer, activation checkpointing, compilation."""

import json
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import whet
from small_models import convnet, images
from small_training import cross_entropy, sgd, train
from whet.base.errors import WhetError
from whet.data.batch import MicroBatch

pytestmark = pytest.mark.torch


def test_the_micro_batch_is_planned_from_a_measured_step(tmp_path: Path) -> None:
    model = convnet(dropout=0.2)
    torch.manual_seed(1)
    train(model, images(64, seed=0), global_batch_size=32, overrides={"memory_gb": 1e-4}, run=tmp_path / "run")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["workload"]["activation_bytes"] > 1_000
    assert 1 <= plan["settings"]["micro_batch"]["value"] < 32
    assert plan["settings"]["micro_batch"]["source"] == "rule"


def test_measuring_leaves_no_trace() -> None:
    """Batch statistics and draws are as if nothing had been measured."""
    finals = []
    for activation_bytes in (None, 1_000):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        data = (torch.randn(24, 3), torch.randint(0, 2, (24,)))
        from whet.training.training_config import TrainingConfig
        from whet.training.workload import describe_workload

        workload = describe_workload(model, data, TrainingConfig(global_batch_size=8), recipe="test")
        workload = workload.model_copy(update={"activation_bytes": activation_bytes})
        train(model, data, workload=workload, seed=2)
        finals.append(model.state_dict())
    for name in finals[0]:
        assert torch.equal(finals[0][name], finals[1][name]), name


def test_a_loss_may_compute_gradients_itself_while_it_is_measured() -> None:
    """Like a penalty on the gradient of the inputs; nothing of it stays in memory."""
    torch.manual_seed(0)
    model, alive = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), []

    def loss(micro: MicroBatch) -> torch.Tensor:
        x = micro.x.clone().requires_grad_()
        inner = model[:2](x)
        alive.append(weakref.ref(inner))
        result = nn.functional.cross_entropy(model[2](inner), micro.y)
        (slope,) = torch.autograd.grad(result, x, create_graph=True)
        assert slope.requires_grad
        return result + slope.square().sum()

    train(model, (torch.randn(16, 3), torch.randint(0, 2, (16,))), loss=loss, global_batch_size=8)
    assert len(alive) == 4, "measured twice, then two steps"
    assert [reference() for reference in alive] == [None] * 4


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd"])
def test_optimizers_by_name_learn(name: str) -> None:
    torch.manual_seed(0)
    model = convnet()
    x, _ = images(64, seed=0)
    y = (x.mean((1, 2, 3)) > 0).long()
    losses: list[float] = []
    train(
        model,
        (x, y),
        optimizer=whet.OptimizerChoice(name=name, lr={"adafactor": 0.1}.get(name, 1e-2)),
        epochs=6,
        on_event=lambda kind, fields: losses.append(fields["loss"]) if kind == "step" else None,
    )
    with torch.no_grad():
        assert nn.functional.cross_entropy(model(x), y) < 0.65
    assert losses


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 16))  # noqa: E731
        self.blocks = nn.ModuleList(make() for _ in range(4))
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def test_recomputing_keeps_less_and_changes_nothing() -> None:
    from whet.training.workload import _saved_bytes

    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    finals, kept = [], []
    for switch in ("off", "on"):
        torch.manual_seed(0)
        model = Blocks()
        names = list(model.state_dict())
        options = {"global_batch_size": 8, "epochs": 3, "overrides": {"threads": 1, "activation_checkpointing": switch}}
        with whet.Session(model, sgd(model), (x, y), **options) as session:
            for batch in session:
                session.step(cross_entropy(model), batch)
            micro = next(iter(session.batches((x, y))))
            kept.append(_saved_bytes(model, cross_entropy(model), micro))
        finals.append(model.state_dict())
        assert list(finals[-1]) == names
    assert kept[1] < 0.5 * kept[0]
    for name in finals[0]:
        assert torch.equal(finals[0][name], finals[1][name]), name


def test_recomputing_needs_blocks() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(WhetError, match="no blocks"):
        train(model, (torch.randn(8, 3), torch.zeros(8).long()), overrides={"activation_checkpointing": "on"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
def test_compile_on_keeps_the_same_model_object(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def as_it_is(graph: torch.fx.GraphModule, _: object):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=as_it_is))
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    finals = []
    for switch in ("off", "on", "blocks"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))
        seen: list[list[str]] = []
        graphs.clear()

        def loss(micro, model=model, seen=seen):
            seen.append([name for name, part in model.named_modules() if part._compiled_call_impl is not None])
            return nn.functional.cross_entropy(model(micro.x), micro.y)

        train(model, (x, y), loss=loss, overrides={"compile": switch, "micro_batch": 8})
        assert seen[-1] == {"off": [], "on": [""], "blocks": ["0", "1", "2"]}[switch]
        assert all(part._compiled_call_impl is None for part in model.modules())
        assert bool(graphs) == (switch != "off"), "what torch passes over is not compiled"
        finals.append(model.state_dict())
    for name in finals[0]:
        torch.testing.assert_close(finals[0][name], finals[1][name])
        torch.testing.assert_close(finals[0][name], finals[2][name])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
def test_a_simulated_missing_compiler_is_an_error_of_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("No working C++ compiler found\nand many lines more")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=missing))
    model = nn.Linear(16, 2)
    data = (torch.randn(16, 16), torch.zeros(16).long())
    with pytest.raises(WhetError, match="could not be compiled") as caught:
        train(model, data, loss=cross_entropy(model), overrides={"compile": "on", "micro_batch": 8})
    assert "No working C++" in caught.value.got
    assert "\n" not in caught.value.got
    assert "compile=off" in caught.value.try_
    assert model._compiled_call_impl is None


COMPILED = """
import torch, whet
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))
data = (torch.randn(16, 16), torch.zeros(16).long())
loss = lambda micro: nn.functional.cross_entropy(model(micro.x), micro.y)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
whet.train(model, optimizer=sgd, data=data, loss=loss, device="cpu", overrides={"compile": "on"}, global_batch_size=8)
print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_compiled_code_is_cached_for_the_next_start(tmp_path: Path) -> None:
    """Two processes: the second reuses the compiled code of the first from whet's cache."""
    import os
    import subprocess
    import sys

    others = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment = {**others, "WHET_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}

    def hits() -> int:
        words = [sys.executable, "-c", COMPILED]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        return int(done.stdout.split()[-1])

    assert hits() == 0
    assert list((tmp_path / "compiled").iterdir())
    assert hits() > 0


class Drifting(nn.Module):
    """Puts a new tensor in a buffer's place, and makes another buffer at its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 2)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1, 1))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.seen = torch.ones(len(x), 1) if len(self.seen) < len(x) else self.seen
        return self.out(x - self.mean)


def test_buffers_may_be_replaced_by_a_forward_pass() -> None:
    torch.manual_seed(0)
    model = Drifting()
    data = (torch.full((16, 1), 4.0), torch.zeros(16, dtype=torch.long))
    with whet.Session(
        model, sgd(model), data, global_batch_size=8, epochs=6, ema=True, overrides={"threads": 1}
    ) as session:
        for batch in session:
            session.step(cross_entropy(model), batch)
        ema = session.run.stepper.ema
        assert ema is not None
        assert ema.average["mean"].item() > 1
    assert torch.equal(model.seen, torch.ones(8, 1))


def test_recomputing_counts_batch_statistics_once_and_shared_blocks_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            self.first, self.second = nn.ModuleList([block]), nn.ModuleList([block])

        def forward(self, x):
            return self.second[0](self.first[0](x))

    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    finals = []
    for switch in ("off", "on"):
        torch.manual_seed(0)
        model = Net()
        y = torch.zeros(16, dtype=torch.long)
        train(model, (x, y), overrides={"activation_checkpointing": switch, "micro_batch": 8})
        finals.append(model.state_dict())
    for name, tensor in finals[0].items():
        assert torch.equal(tensor, finals[1][name]), name
