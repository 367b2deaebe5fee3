"""Session, schedules, evaluation, and what is refused before the first step."""

import dataclasses
import itertools
import json
import math
import shutil
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import whet
from small_models import convnet, images
from whet.base.errors import WhetError
from whet.data.adapters import StatefulIterable
from whet.data.batch import MicroBatch
from whet.device.errors import is_out_of_memory
from whet.device.fake import FakeDevice
from whet.device.open import open_device
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.schedule import make_schedule

pytestmark = pytest.mark.torch


def cross_entropy(model: nn.Module):
    return lambda micro: nn.functional.cross_entropy(model(micro.x), micro.y)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(model: nn.Module, data, loss=None, **options):
    """With one thread: two threads on a busy core wait for each other far longer than they compute."""
    defaults = {"optimizer": sgd(model), "global_batch_size": 8, "epochs": 1}
    options = {"on_event": None, **options, "overrides": {"threads": 1, **options.get("overrides", {})}}
    return whet.train(model, data, loss=loss or cross_entropy(model), **{**defaults, **options})


# --- refused before the first step ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "options", "what"),
    [
        ((torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long)), {}, "the data is empty"),
        (images(5, seed=0), {}, "shorter than one global batch"),
        ((torch.full((9, 1, 8, 8), math.nan), torch.zeros(9, dtype=torch.long)), {}, "NaN or Inf"),
        ((torch.zeros(9, 1, 8, 8), torch.zeros(8, dtype=torch.long)), {}, "one length"),
        (3, {}, "cannot be trained on"),
        (images(9, seed=0), {"global_batch_size": 0}, "global_batch_size"),
        (images(9, seed=0), {"epochs": -1}, "epochs"),
        (images(9, seed=0), {"epohcs": 1}, "unknown keyword"),
        (images(9, seed=0), {"clip": 0}, "clip"),
        (images(9, seed=0), {"schedule": "cosin"}, "schedule must be"),
        (images(9, seed=0), {"device": "cuda"}, "cuda"),
        (images(9, seed=0), {"device": "tpu"}, "tpu"),
        (images(9, seed=0), {"loss": lambda m: torch.zeros(3, requires_grad=True)}, "one number"),
        (images(9, seed=0), {"loss": lambda m: 0.5}, "a tensor"),
        (images(9, seed=0), {"loss": lambda m: torch.zeros(())}, "depend on any parameter"),
        (images(9, seed=0), {"overrides": {"micro_bach": 3}}, "no such setting"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_trained(data, options, what: str, tmp_path: Path) -> None:
    model = convnet()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(WhetError) as caught:
        train(model, data, run=tmp_path / "run", **options)
    assert what in str(caught.value)
    if "loss" not in options:
        assert not (tmp_path / "run").exists(), "nothing is half-written"
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_batch_that_is_not_stepped_is_an_error() -> None:
    model = convnet()
    with (
        pytest.raises(WhetError, match="every batch is one step"),
        whet.Session(model, sgd(model), images(16, seed=0), global_batch_size=8) as session,
    ):
        for _ in session:
            pass


def test_a_failure_in_your_code_passes_through_and_is_written_down(tmp_path: Path) -> None:
    def broken(micro):
        raise ZeroDivisionError("yours")

    with pytest.raises(ZeroDivisionError, match="yours"):
        train(convnet(), images(16, seed=0), loss=broken, run=tmp_path / "run")
    assert whet.summarize(tmp_path / "run").state == "failed"


# --- what a run does ------------------------------------------------------------------------------------------------


def test_events_hold_every_step_unrounded(tmp_path: Path) -> None:
    model = convnet()
    train(model, images(30, seed=0), run=tmp_path / "run", epochs=2, clip=1.0)
    steps = list(read_events(open_run(tmp_path / "run"), kinds=("step",)))
    assert [event.step for event in steps] == list(range(1, 9))
    assert [event.get("samples") for event in steps] == [8, 16, 24, 30, 38, 46, 54, 60], "the tail is not dropped"
    assert [event.get("epoch") for event in steps] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(isinstance(event.get("loss"), float) and event.get("grad_norm") for event in steps)
    assert {"data", "forward", "backward", "optimizer"} <= set(steps[0].get("seconds"))
    (first, second) = read_events(open_run(tmp_path / "run"), kinds=("epoch",))
    assert (first.get("epoch"), second.get("epoch")) == (1, 2)
    assert first.get("memory")["allocated"] > 0


def test_evaluation_disturbs_nothing() -> None:
    """The same training, evaluated at every step or never, ends with the same weights."""

    def evaluate(model, micro_batches):
        assert not model.training
        torch.rand(3)
        return {"loss": float(sum(model(micro.x).sum() for micro in micro_batches))}

    finals = []
    for every in (None, 1):
        torch.manual_seed(0)
        model = convnet(dropout=0.5)
        extra = {"evaluate": evaluate, "val": images(10, seed=1), "eval_every": every} if every else {}
        train(model, images(40, seed=0), ema=True, seed=4, **extra)
        finals.append(model.state_dict())
    for name in finals[0]:
        assert torch.equal(finals[0][name], finals[1][name]), name


def test_evaluation_uses_the_average_and_covers_every_sample() -> None:
    model = nn.Linear(1, 1)
    seen: list[float] = []

    def evaluate(model, micro_batches):
        seen.extend(value for micro in micro_batches for value in micro.x.flatten().tolist())
        return {"weight": model.weight.item()}

    x = torch.arange(13.0)[:, None]
    result = whet.train(
        model,
        {"x": x / 10},
        loss=lambda micro: (model(micro.x) - 1).square().mean(),
        optimizer=sgd(model),
        evaluate=evaluate,
        val={"x": x},
        global_batch_size=4,
        epochs=1,
        ema=True,
    )
    assert seen == x.flatten().tolist()
    assert result.metrics["weight"] != model.weight.item()


def test_early_stop_and_best(tmp_path: Path) -> None:
    model = convnet()
    scores = iter([0.1, 0.5, 0.4, 0.3, 0.9])
    result = train(
        model,
        images(16, seed=0),
        evaluate=lambda model, micro_batches: {"accuracy": next(scores)},
        val=images(4, seed=1),
        epochs=9,
        goal="accuracy",
        patience=2,
        run=tmp_path / "run",
    )
    assert result.step == 8, "two worse evaluations after the best one"
    assert result.state == "done"
    report = whet.summarize(tmp_path / "run")
    assert (report.best_goal, report.best_goal_step) == (0.5, 4)
    assert {checkpoint.step for checkpoint in report.checkpoints} >= {4, 8}, "the best one is kept"


def test_init_from_starts_with_another_runs_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = convnet()
    train(first, images(16, seed=0), run=tmp_path / "first")
    second = convnet()
    with whet.Session(second, sgd(second), images(16, seed=0), global_batch_size=8, init_from=tmp_path / "first"):
        for mine, other in zip(second.parameters(), first.parameters(), strict=True):
            assert torch.equal(mine, other)


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
    """As a penalty on the gradient of the inputs does; and nothing of it stays in memory."""
    torch.manual_seed(0)
    model, alive = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), []

    def loss(micro: MicroBatch) -> torch.Tensor:
        x = micro.x.clone().requires_grad_()
        inner = model[:2](x)
        alive.append(weakref.ref(inner))
        found = nn.functional.cross_entropy(model[2](inner), micro.y)
        (slope,) = torch.autograd.grad(found, x, create_graph=True)
        assert slope.requires_grad
        return found + slope.square().sum()

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


def test_a_device_that_is_not_there_is_refused_or_said(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="mps"):
        train(convnet(), images(16, seed=0), device="mps")
    told: list[tuple[str, dict]] = []
    train(
        convnet(),
        images(16, seed=0),
        device="mps",
        overrides={"on_device_failure": "cpu"},
        on_event=lambda kind, fields: told.append((kind, fields)),
        run=tmp_path / "run",
    )
    (said,) = [fields for kind, fields in told if kind == "plan"]
    assert "mps is not available" in said["message"]
    (event,) = read_events(open_run(tmp_path / "run"), kinds=("plan",))
    assert event.get("exact") is False


def test_a_planned_device_that_cannot_be_opened_is_refused_or_said() -> None:
    from whet.machine.known import load_machine
    from whet.plan.plan import make_plan
    from whet.step.apply_plan import open_planned_device

    plan = make_plan(load_machine("m2-air-8gb"), _workload(), overrides={"on_device_failure": "cpu", "threads": 1})
    replanned, device, fell_back = open_planned_device(plan)
    assert device.kind == replanned.device == "cpu"
    assert replanned.watermarks == "unused"
    assert "mps" in (fell_back or "")
    with pytest.raises(WhetError, match="mps"):
        open_planned_device(make_plan(load_machine("m2-air-8gb"), _workload(), overrides={"threads": 1}))


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
def test_a_compiled_model_is_asked_for_and_stays_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_simulated_missing_compiler_is_said_in_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_was_compiled_is_there_at_the_next_start(tmp_path: Path) -> None:
    """Two processes; the second finds in whet's own caches what the first one compiled."""
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


def test_no_checkpoint_is_vouched_for_that_was_removed(tmp_path: Path) -> None:
    model, calls = convnet(), itertools.count()

    def loss(micro: MicroBatch) -> torch.Tensor:
        if next(calls) == 4:
            shutil.rmtree(tmp_path / "run")
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    with pytest.raises(WhetError, match="after step 4, could not be saved") as refused:
        train(model, images(32, seed=0), loss=loss, run=tmp_path / "run")
    assert "checkpoints/step-000000000 is gone too; 4 steps are lost" in str(refused.value)


def test_an_interrupted_cell_can_be_run_again(tmp_path: Path) -> None:
    """As in a notebook: the interrupt reaches the process, the call returns, and the same call goes on."""
    import os
    import signal

    x, y = images(64, seed=0)
    seen: list[int] = []

    def cell(folder: str, interrupt_at: int):
        torch.manual_seed(0)
        model = convnet(dropout=0.3)

        def loss(micro):
            seen.append(len(micro))
            if len(seen) == interrupt_at:
                os.kill(os.getpid(), signal.SIGINT)
            return nn.functional.cross_entropy(model(micro.x), micro.y)

        result = train(model, (x, y), loss=loss, epochs=3, run=tmp_path / folder)
        return result, model.state_dict()

    whole, expected = cell("whole", 0)
    seen.clear()
    stopped, _ = cell("cut", 11)
    done, found = cell("cut", 11)
    assert (stopped.state, stopped.exit_code) == ("stopped", 130)
    assert stopped.step < 24
    assert (done.state, done.step) == (whole.state, whole.step) == ("done", 24)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def _workload():
    from whet.plan.workload import Workload

    return Workload(recipe="test", num_parameters=1, global_batch_size=1)


# --- schedules ------------------------------------------------------------------------------------------------------


def test_schedules() -> None:
    linear = make_schedule("linear", total_steps=10, warmup_steps=2)
    assert [round(linear.factor(step), 3) for step in (1, 2, 3, 10)] == [0.333, 0.667, 1.0, 0.125]
    cosine = make_schedule("cosine", total_steps=10)
    assert cosine.factor(1) == 1.0
    assert 0 < cosine.factor(10) < 0.03
    assert all(make_schedule("constant", total_steps=None).factor(step) == 1.0 for step in range(1, 9))
    assert make_schedule(lambda step: 1 / step, total_steps=None).factor(4) == 0.25
    with pytest.raises(WhetError, match="max_steps"):
        make_schedule("cosine", total_steps=None)


def test_plateau_halves_and_remembers() -> None:
    schedule = make_schedule("plateau", total_steps=None)
    for score in (0.5, 0.4, 0.4, 0.4):
        schedule.observe(score)
    assert schedule.factor(5) == 0.5
    again = make_schedule("plateau", total_steps=None)
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert again.factor(5) == 0.5


# --- streams --------------------------------------------------------------------------------------------------------


class Counting:
    """A stream that can say where it stands."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.at = 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield {"x": torch.tensor([float(self.at)]), "y": torch.tensor(0)}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("has_state", [True, False])
def test_a_stream_goes_on_where_it_was(tmp_path: Path, has_state: bool) -> None:
    seen: list[list[float]] = []
    model = nn.Linear(1, 2)

    def loss(micro):
        seen.append(micro.x.flatten().tolist())
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    def data():
        return Counting(10) if has_state else list_stream(10)

    options = {"epochs": 2, "global_batch_size": 4, "run": tmp_path / "run", "overrides": {"micro_batch": 4}}
    options["workload"] = _workload().model_copy(update={"activation_bytes": 1, "global_batch_size": 4})
    train(model, data(), loss=loss, max_steps=2, **options)
    train(model, data(), loss=loss, max_steps=6, **options)
    expected = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert seen == expected
    resumed = next(iter(read_events(open_run(tmp_path / "run"), kinds=("resume",))))
    assert (resumed.get("exact") is False) is not has_state
    assert isinstance(data(), StatefulIterable) is has_state


class list_stream:  # noqa: N801
    """An iterable that starts anew each time and cannot say where it stands."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return ({"x": torch.tensor([float(n + 1)]), "y": torch.tensor(0)} for n in range(self.count))


# --- devices --------------------------------------------------------------------------------------------------------


def test_out_of_memory_is_recognised_and_look_alikes_are_not() -> None:
    device = open_device("fake").device
    assert isinstance(device, FakeDevice)
    with pytest.raises(RuntimeError) as caught:
        device.memory.hold(10**12)
    assert is_out_of_memory(caught.value)
    with pytest.raises(RuntimeError) as on_cpu:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(on_cpu.value)
    for text, is_oom in {
        "CUDA out of memory. Tried to allocate 2.00 GiB": True,
        "Invalid buffer size: 16.00 GiB": True,
        "CUDA error: an illegal memory access was encountered": False,
        "the log says MPS backend out of memory": False,
        "not enough memory for a good joke": False,
    }.items():
        assert is_out_of_memory(RuntimeError(text)) is is_oom, text
    assert not is_out_of_memory(ValueError("CUDA out of memory"))


def test_the_fake_device_has_its_own_clock_and_memory() -> None:
    device = FakeDevice(limit_bytes=100)
    start = device.mark()
    device.pass_time(2.5)
    assert device.elapsed_seconds(start, device.mark()) == 2.5
    device.memory.hold(60)
    device.memory.release(60)
    device.memory.hold(30)
    assert (device.memory.usage().allocated, device.memory.usage().peak) == (30, 60)


# --- found by reviewers ---------------------------------------------------------------------------------------------


def test_a_first_micro_batch_in_which_nothing_counts_does_no_harm() -> None:
    """Weights 0, then 2: the step is that of the samples that count."""
    finals = []
    for micro_batch in (4, 2):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        counts = torch.tensor([0.0, 0.0, 1.0, 1.0])

        def loss(micro, model=model):
            return (model(micro.x).squeeze(1).square() * micro.y).sum(), micro.y.sum()

        train(model, (x, counts), loss=loss, global_batch_size=4, shuffle=False, overrides={"micro_batch": micro_batch})
        finals.append(model.weight.detach().clone())
    assert finals[0].isfinite().all()
    torch.testing.assert_close(finals[0], finals[1])


def test_a_batch_in_which_nothing_counts_changes_nothing() -> None:
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    for weight in (torch.tensor(0.0), 0.0):
        train(model, torch.randn(8, 3), loss=lambda m, w=weight: (model(m.x).sum() * 0, w))
    assert torch.equal(model.weight, before)


def test_several_ragged_columns_are_padded_each_to_its_own_length() -> None:
    from whet.data.adapters import open_source
    from whet.data.batch import Position, Ragged
    from whet.device.cpu import CpuDevice

    short = Ragged.of([torch.arange(n) for n in (1, 2, 3, 1)])
    long = Ragged.of([torch.arange(n) + 10 for n in (9, 2, 4, 7)])
    source = open_source({"short": short, "long": long}, CpuDevice(), global_batch_size=4, seed=0)
    for how in ("fixed", "sorted", "few shapes"):
        for batch in source.batches(Position()):
            for micro in source.micro_batches(batch, micro_batch=3, length_mode=how):
                for name, column in (("short", short), ("long", long)):
                    padded = getattr(micro, name)
                    for row, sample in enumerate(micro.ids.tolist()):
                        length = int(padded.lengths[row])
                        assert torch.equal(padded.values[row, :length], column[sample]), (how, name)


def test_other_data_is_refused_and_shorter_data_does_not_hang(tmp_path: Path) -> None:
    model = convnet()
    train(model, images(64, seed=0), run=tmp_path / "run", max_steps=4)
    for data in (images(64, seed=1), images(24, seed=0), images(128, seed=0)):
        with pytest.raises(WhetError, match="the data is not what the run was started with"):
            train(model, data, run=tmp_path / "run", max_steps=9)


def test_the_final_state_is_saved_although_its_folder_was_damaged(tmp_path: Path) -> None:
    from whet.checkpoint import store

    options = {"run": tmp_path / "run", "epochs": 2, "overrides": {"checkpoint_steps": 4}}
    train(convnet(), images(64, seed=0), **options)
    folder = open_run(tmp_path / "run").checkpoints
    (folder / store.checkpoint_name(16) / store.TENSORS).write_bytes(b"damaged")
    result = train(convnet(), images(64, seed=0), **options)
    assert result.step == 16
    found = store.load_newest(folder)
    assert found is not None
    assert (found[0], found[2]) == (16, [])


def test_rates_come_from_the_run_and_not_from_a_used_optimizer(tmp_path: Path) -> None:
    """The same objects, called twice in one process: the second call goes on with the schedule of the first."""
    model = convnet()
    optimizer = sgd(model, lr=0.1)
    rates: list[float] = []
    for max_steps in (4, 8):
        train(
            model,
            images(64, seed=0),
            optimizer=optimizer,
            schedule=lambda step: 1 / step,
            run=tmp_path / "run",
            max_steps=max_steps,
        )
    rates = [event.get("lr") for event in read_events(open_run(tmp_path / "run"), kinds=("step",))]
    assert rates == [0.1 * (1 / step) for step in range(1, 9)]


def test_a_stream_with_a_state_can_stop_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    model = nn.Linear(1, 2)
    options = {"epochs": 3, "global_batch_size": 4, "epochs_per_session": 1, "run": tmp_path / "run"}
    for sitting in (1, 2, 3):
        assert train(model, Counting(8), **options).step == 2 * sitting


def test_wishes_of_a_run_stay(tmp_path: Path) -> None:
    options = {"run": tmp_path / "run", "epochs": 1}
    train(convnet(), images(64, seed=0), max_steps=2, overrides={"micro_batch": 4}, **options)
    with pytest.raises(WhetError, match="another micro_batch"):
        train(convnet(), images(64, seed=0), max_steps=4, overrides={"micro_batch": 2}, **options)
    with pytest.raises(WhetError, match="max_steps may only grow"):
        train(convnet(), images(64, seed=0), max_steps=1, overrides={"micro_batch": 4}, **options)


def test_a_refusal_leaves_no_lock(tmp_path: Path) -> None:
    options = {"run": tmp_path / "run"}
    train(convnet(), images(16, seed=0), **options)
    with pytest.raises(WhetError) as refused:
        train(convnet(), images(16, seed=0), global_batch_size=4, **options)
    train(convnet(), images(16, seed=0), **options)
    assert "global_batch_size" in str(refused.value)


def test_evaluate_without_data_is_refused_at_once() -> None:
    with pytest.raises(WhetError, match="belong together"):
        train(convnet(), images(16, seed=0), evaluate=lambda model, micro_batches: {})


def test_a_goal_that_no_evaluation_gives_is_refused() -> None:
    with pytest.raises(WhetError, match="the goal is not among the metrics"):
        train(
            convnet(),
            images(16, seed=0),
            evaluate=lambda model, micro_batches: {"accuracy": 1.0},
            val=images(8, seed=1),
            goal="acuracy",
        )


def test_a_failing_evaluation_loses_no_step(tmp_path: Path) -> None:
    def evaluate(model, micro_batches):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(convnet(), images(16, seed=0), evaluate=evaluate, val=images(8, seed=1), run=tmp_path / "run")
    report = whet.summarize(tmp_path / "run")
    assert (report.state, [c.step for c in report.checkpoints]) == ("failed", [0, 2])


def test_a_goal_of_nan_is_never_the_best(tmp_path: Path) -> None:
    scores = iter([math.nan, 0.5, math.nan])
    train(
        convnet(),
        images(8, seed=0),
        epochs=3,
        evaluate=lambda model, micro_batches: {"accuracy": next(scores)},
        val=images(8, seed=1),
        goal="accuracy",
        run=tmp_path / "run",
    )
    assert whet.summarize(tmp_path / "run").best_goal == 0.5


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    model = convnet()
    with pytest.raises(WhetError, match="not the model's"):
        train(model, images(16, seed=0), optimizer=sgd(convnet()))


def test_evaluation_keeps_the_order_of_ragged_data() -> None:
    from whet.data.batch import Ragged

    column = Ragged.of([torch.full((n,), i) for i, n in enumerate((5, 1, 4, 2, 3))])
    model = nn.Linear(1, 1)
    with whet.Session(model, sgd(model), torch.randn(8, 1), global_batch_size=4) as session:
        seen = [int(row[0]) for micro in session.batches({"x": column}) for row in micro.x.values]
    assert seen == [0, 1, 2, 3, 4]


def test_the_average_starts_from_init_from(tmp_path: Path) -> None:
    train(convnet(), images(16, seed=0), run=tmp_path / "first")
    model = convnet()
    with whet.Session(
        model, sgd(model), images(16, seed=0), global_batch_size=8, ema=True, init_from=tmp_path / "first"
    ) as session:
        ema = session.run.stepper.ema
        assert ema is not None
        for name, parameter in model.named_parameters():
            assert torch.equal(ema.average[name], parameter)


def test_parts_in_eval_mode_stay_so() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    data = (torch.randn(16, 3), torch.randint(0, 2, (16,)))
    train(model, data, evaluate=lambda model, micro_batches: {"n": len(list(micro_batches))}, val=data)
    assert (model.training, model[1].training) == (True, False)
    assert int(model[1].num_batches_tracked) == 0


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_survive_an_interrupt(start: str) -> None:
    import os
    import signal

    from whet.data.adapters import LoaderConfig, MapStyleSource
    from whet.data.batch import Position

    source = MapStyleSource(Squares(), global_batch_size=4, seed=0, loading=LoaderConfig(workers=1, start=start))
    batches = source.batches(Position())
    first = next(batches)
    assert source.workers is not None
    (worker,) = source.workers.pids
    os.kill(worker, signal.SIGINT)
    assert len(first) + sum(len(batch) for batch in batches) == 40
    source.close()


class Squares:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index * index


def test_the_progress_line_tells_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    train(convnet(), images(16, seed=0), epochs=2, on_event="line")
    told = capsys.readouterr().err
    assert "epoch 2/2 took" in told
    train(convnet(), images(16, seed=0), on_event=None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"optimizer": "adamw"}, "must be one of torch's"),
        ({"clip": "1"}, "clip"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"mode": "maximum"}, "mode must be max or min"),
        ({"warmup_steps": 0.5}, "warmup_steps"),
    ],
)
def test_wrong_kinds_are_refused(options: dict, what: str) -> None:
    with pytest.raises(WhetError, match=what):
        train(convnet(), images(16, seed=0), **options)


def test_a_loss_that_is_not_a_number_stops_the_run_and_spares_the_checkpoints(tmp_path: Path) -> None:
    model = convnet()
    seen: list[int] = []

    def loss(micro):
        seen.append(1)
        value = nn.functional.cross_entropy(model(micro.x), micro.y)
        return value * math.nan if len(seen) > 9 else value

    overrides = {"checkpoint_steps": 2, "micro_batch": 8}
    with pytest.raises(WhetError, match="the loss or a weight is NaN or Inf"):
        train(model, images(64, seed=0), loss=loss, epochs=4, run=tmp_path / "run", overrides=overrides)
    report = whet.summarize(tmp_path / "run")
    assert report.state == "failed"
    from whet.checkpoint import store

    found = store.load_newest(open_run(tmp_path / "run").checkpoints)
    assert found is not None
    assert all(t.isfinite().all() for name, t in found[1].tensors.items() if name.startswith("model/"))


def test_a_loss_that_reaches_nothing_is_refused() -> None:
    model, other = convnet(), convnet()
    with pytest.raises(WhetError, match="reaches no parameter"):
        train(model, images(16, seed=0), loss=lambda m: nn.functional.cross_entropy(other(m.x), m.y))


def test_a_scheduler_beside_ours_is_refused() -> None:
    model = convnet()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    with whet.Session(model, optimizer, images(32, seed=0), global_batch_size=8) as session:
        batches = iter(session)
        session.step(cross_entropy(model), next(batches))
        scheduler.step()
        second = next(batches)
        with pytest.raises(WhetError, match="something else changes the learning rate"):
            session.step(cross_entropy(model), second)


def test_a_batch_is_stepped_once_and_inside_the_session() -> None:
    model = convnet()
    session = whet.Session(model, sgd(model), images(32, seed=0), global_batch_size=8)
    with pytest.raises(WhetError, match="inside `with`"):
        next(iter(session))
    with session:
        batches = iter(session)
        first = next(batches)
        session.step(cross_entropy(model), first)
        with pytest.raises(WhetError, match="stepped once"):
            session.step(cross_entropy(model), first)
    with pytest.raises(WhetError, match="entered once"), session:
        pass


def test_metrics_may_be_tensors_and_need_names_of_their_own(tmp_path: Path) -> None:
    model = convnet()
    with whet.Session(
        model, sgd(model), images(16, seed=0), global_batch_size=8, run=tmp_path / "run", goal="accuracy"
    ) as session:
        for batch in session:
            session.step(cross_entropy(model), batch)
            session.log(accuracy=torch.tensor(0.5))
        with pytest.raises(WhetError, match="a reserved name"):
            session.log(step=3)
    assert whet.summarize(tmp_path / "run").metrics == {"accuracy": 0.5}


def test_numpy_arrays_are_data() -> None:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(16, 3))
    model = nn.Linear(3, 2)
    seen: list[torch.dtype] = []

    def loss(micro):
        seen.append(micro.x.dtype)
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    train(model, (x, np.zeros(16, dtype=np.int64)), loss=loss)
    assert set(seen) == {torch.float32}


def test_a_hostile_optimizer_state_does_not_reach_the_kernels(tmp_path: Path) -> None:
    from whet.checkpoint import store

    options = {"run": tmp_path / "run", "optimizer": whet.OptimizerChoice()}
    train(convnet(), images(32, seed=0), max_steps=2, **options)
    folder = open_run(tmp_path / "run").checkpoints
    step, snapshot, _ = store.load_newest(folder)  # type: ignore[misc]
    tensors = {n: t[:1].clone() if n.endswith("/exp_avg") else t for n, t in snapshot.tensors.items()}
    store.delete_checkpoint(folder, step=step)
    store.save_checkpoint(folder, dataclasses.replace(snapshot, tensors=tensors), step=step)
    with pytest.raises(WhetError, match="exp_avg does not fit"):
        train(convnet(), images(32, seed=0), max_steps=4, **options)


# --- found in a second round ----------------------------------------------------------------------------------------


def test_the_same_objects_after_a_failure_start_from_the_first_weights(tmp_path: Path) -> None:
    """In a notebook: the loss fails in the middle of a step, and the cell is run again."""
    x, y = images(64, seed=0)

    def run(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, fail_at: int):
        seen: list[int] = []

        def loss(micro):
            seen.append(1)
            if len(seen) == fail_at:
                raise ArithmeticError
            return nn.functional.cross_entropy(model(micro.x), micro.y)

        options = {"epochs": 2, "schedule": "linear", "optimizer": optimizer, "run": tmp_path / folder}
        return train(model, (x, y), loss=loss, **options)

    finals = []
    for folder, fails in (("whole", (0,)), ("cut", (9, 0))):
        torch.manual_seed(0)
        model = convnet(dropout=0.2)
        optimizer = sgd(model)
        for fail_at in fails:
            if fail_at:
                with pytest.raises(ArithmeticError):
                    run(folder, model, optimizer, fail_at)
            else:
                assert run(folder, model, optimizer, 0).state == "done"
        finals.append(model.state_dict())
    for name, tensor in finals[0].items():
        assert torch.equal(tensor, finals[1][name]), name


def test_a_used_optimizer_has_its_rate_back() -> None:
    model = convnet()
    optimizer = sgd(model, lr=0.5)
    train(model, images(32, seed=0), optimizer=optimizer, schedule="linear")
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", ["ids", "fields", "moved"])
def test_names_that_a_micro_batch_has_are_refused(name: str) -> None:
    with pytest.raises(WhetError, match="such a name already"):
        train(convnet(), {name: torch.randn(16, 1), "y": torch.zeros(16)})


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


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)

    def loss(micro):
        # The square root of zero has an infinite slope: a finite loss, and no finite gradient.
        return (model(micro.x) * 0).abs().sqrt().mean()

    with pytest.raises(WhetError, match="the gradient is not finite"):
        train(model, torch.randn(16, 1), loss=loss, run=tmp_path / "run", epochs=50)
    assert [checkpoint.step for checkpoint in whet.summarize(tmp_path / "run").checkpoints] == [0]


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


def test_a_missed_evaluation_is_made_up(tmp_path: Path) -> None:
    calls: list[int] = []

    def evaluate(model, micro_batches):
        calls.append(len(list(micro_batches)))
        if len(calls) in (1, 3):
            raise ZeroDivisionError
        return {"accuracy": 0.5}

    options = {"evaluate": evaluate, "val": images(8, seed=1), "test": images(8, seed=2), "run": tmp_path / "run"}
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            train(convnet(), images(16, seed=0), **options)
    assert train(convnet(), images(16, seed=0), **options).metrics == {"test_accuracy": 0.5}
    assert train(convnet(), images(16, seed=0), **options).metrics == {}
    assert whet.summarize(tmp_path / "run").metrics == {"accuracy": 0.5, "test_accuracy": 0.5}
    assert len(calls) == 4, "dev failed, dev, test failed, test"


def test_an_infinite_goal_is_never_the_best(tmp_path: Path) -> None:
    scores = iter([math.inf, 3.0])
    result = train(
        convnet(),
        images(8, seed=0),
        epochs=2,
        evaluate=lambda model, micro_batches: {"perplexity": next(scores)},
        val=images(8, seed=1),
        goal="perplexity",
        mode="min",
        schedule="plateau",
        run=tmp_path / "run",
    )
    assert result.state == "done"


class Sentences:
    """Samples of unequal lengths; the last batch has one sample alone."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int):
        return {"tokens": torch.ones(1 + index % 4), "y": 0}


def test_a_lonely_sample_has_the_form_of_the_others() -> None:
    from whet.data.batch import Padded

    seen: list[type] = []
    model = nn.Linear(1, 2)

    def loss(micro):
        seen.append(type(micro.tokens))
        means = micro.tokens.values.sum(1, keepdim=True)
        return nn.functional.cross_entropy(model(means), micro.y)

    train(model, Sentences(), loss=loss, global_batch_size=4, overrides={"workers": 0})
    assert set(seen) == {Padded}


def test_every_row_of_a_small_table_counts_in_its_fingerprint(tmp_path: Path) -> None:
    x, y = images(640, seed=0)
    train(convnet(), (x, y), run=tmp_path / "run", max_steps=2)
    changed = x.clone()
    changed[123] += 1e-3
    with pytest.raises(WhetError, match="not what the run was started with"):
        train(convnet(), (changed, y), run=tmp_path / "run", max_steps=4)
