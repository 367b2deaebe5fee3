"""Trainings that are sent to a process of their own: what arrives, what is refused, and what happens then."""

import io
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import whet
from whet.autotune import process_bench
from whet.autotune.step_bench import ProbeFailedError
from whet.base.errors import WhetError
from whet.base.units import GB
from whet.machine.facts import SystemState
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.plan.workload import Workload
from whet.training import shipped_bench as shipping
from whet.training import tune
from whet.training.shipped_bench import NotShippedError, ShippedTraining, pack, shipped_bench

pytestmark = pytest.mark.torch

PATIENCE_SECONDS = 120
TRAINING = {"global_batch_size": 16, "epochs": 1000}
ONE_THREAD = {"threads": 1, "device": "cpu"}
FIXED = {**ONE_THREAD, "micro_batch": 16, "activation_checkpointing": "off", "compile": "off"}
"""Settings that leave a search little to try."""


class Net(nn.Module):
    def __init__(self, *, dropout: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.blocks(x))


@pytest.fixture(autouse=True)
def a_home_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))


def some_data(num_samples: int = 160):
    drawn = torch.Generator().manual_seed(2)
    return torch.randn(num_samples, 8, generator=drawn), torch.randint(0, 3, (num_samples,), generator=drawn)


def a_net(**options) -> Net:
    torch.manual_seed(1)
    return Net(**options)


def a_session(model, *, data=None, optimizer=None, **changes) -> whet.Session:
    return whet.Session(
        model,
        optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2),
        some_data() if data is None else data,
        **{**TRAINING, "overrides": ONE_THREAD, **changes},
    )


def ship(session, loss, **options):
    config = session.config
    plan = tune.plan_from_rules(config)
    return shipped_bench(config.model, config.optimizer, config.data, config.training, loss=loss, plan=plan, **options)


def received(chunks) -> ShippedTraining:
    return pickle.loads(b"".join(chunks))


def a_message(model, loss, optimizer=None, data=None):
    session = a_session(model, data=data, optimizer=optimizer, overrides={**ONE_THREAD, "workers": 0})
    config = session.config
    with shipping.LocalStepBench(
        model, config.optimizer, config.data, config.training, loss=loss, plan=tune.plan_from_rules(config)
    ) as bench:
        batches, _ = bench.record()
    return ShippedTraining(
        model=model,
        optimizer=config.optimizer,
        loss=loss,
        batches=batches,
        training=shipping._shippable(config.training, bench.plan),
        default_dtype=torch.float32,
    )


# --- the message ------------------------------------------------------------------------------------------------------


def test_parts_of_a_message_still_refer_to_each_other():
    model = a_net()
    model.tied = nn.Linear(8, 32)
    model.tied.weight = model.blocks[0].weight
    factor = torch.tensor(2.0)
    got = received(pack(a_message(model, lambda batch: factor * functional.cross_entropy(model(batch[0]), batch[1]))))
    cells = [cell.cell_contents for cell in got.loss.__closure__]
    assert any(cell is got.model for cell in cells)
    assert got.model.tied.weight is got.model.blocks[0].weight
    ours = [id(parameter) for parameter in got.model.parameters()]
    assert [id(p) for group in got.optimizer.param_groups for p in group["params"]] == ours
    assert all(torch.equal(a, b) for a, b in zip(got.model.parameters(), model.parameters(), strict=True))


def test_tensors_keep_their_memory_format_flags_and_attributes():
    model = a_net()
    flat = torch.arange(20.0)
    model.first, model.second = nn.Parameter(flat[:10]), nn.Parameter(flat[10:])
    model.frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    model.frozen.note = "mine"
    model.images = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("complex", torch.tensor([1 + 2j]).conj())
    got = received(pack(a_message(model, lambda batch: model(batch[0]).mean()))).model
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        same = dict((*got.named_parameters(), *got.named_buffers()))[name]
        assert torch.equal(same, tensor), name
        assert (same.dtype, same.stride(), same.requires_grad) == (tensor.dtype, tensor.stride(), tensor.requires_grad)
        assert type(same) is type(tensor)
    assert got.frozen.note == "mine"
    assert got.first.untyped_storage().data_ptr() == got.second.untyped_storage().data_ptr()
    assert got.second.data_ptr() - got.first.data_ptr() == 40
    assert got.images.is_contiguous(memory_format=torch.channels_last)


class Views(Dataset):
    """Each sample is a view of 40 MB."""

    def __init__(self):
        self.all = torch.randn(10_000_000 // 8, 8)

    def __len__(self):
        return 320

    def __getitem__(self, index):
        return self.all[index], 0


def test_sample_does_not_bring_its_dataset():
    model = a_net()
    chunks = pack(a_message(model, lambda batch: model(batch[0]).mean(), data=Views()))
    assert sum(map(len, chunks)) < 500_000
    assert len(received(chunks).batches.batches) == 8


def test_optimizer_with_state_is_sent_and_a_schedule_is_not():
    model = a_net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
    # A scheduler patches the step of its optimizer.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    got = received(pack(a_message(model, lambda batch: model(batch[0]).mean(), optimizer)))
    assert len(got.optimizer.state) == 4
    pairs = zip(got.optimizer.state.values(), optimizer.state.values(), strict=True)
    assert all(torch.equal(ours["exp_avg"], theirs["exp_avg"]) for ours, theirs in pairs)
    assert got.training.schedule == "constant"


@pytest.mark.parametrize("what", ["loss", "model", "optimizer", "sample"])
def test_part_that_cannot_be_pickled_is_named(what):
    model, lock, data = a_net(), threading.Lock(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda batch: model(batch[0]).mean()  # noqa: E731
    if what == "loss":
        loss = lambda batch: model(batch[0]).mean() if lock else None  # noqa: E731
    elif what == "model":
        model.lock = lock
    elif what == "optimizer":
        optimizer.param_groups[0]["lock"] = lock
    else:
        data = [(torch.randn(8), lock) for _ in range(40)]
    message = a_message(model, loss, optimizer, data)
    with pytest.raises(NotShippedError) as refused:
        pack(message)
    name = {"sample": "a sample of the data"}.get(what, f"the {what}")
    assert refused.value.reason == f"{name} cannot be pickled (TypeError: cannot pickle '_thread.lock' object)"


def test_hooks_of_parameters_are_not_lost_silently():
    model = a_net()
    model.head.weight.register_hook(lambda gradient: 0 * gradient)
    with pytest.raises(NotShippedError, match=r"the model cannot be pickled .*hooks of a tensor"):
        pack(a_message(model, lambda batch: model(batch[0]).mean()))


def test_message_over_its_limit_is_refused():
    model, large = a_net(), torch.zeros(1_000_000)
    message = a_message(model, lambda batch: model(batch[0]).mean() + large[0])
    with pytest.raises(NotShippedError, match="takes too much memory"):
        pack(message, max_bytes=3_000_000)
    assert sum(map(len, pack(message, max_bytes=5_000_000))) > 4_000_000


# --- before anything is sent ------------------------------------------------------------------------------------------


def free_memory(monkeypatch, num_bytes):
    state = SystemState(memory_available_bytes=num_bytes)
    monkeypatch.setattr(shipping, "read_system_state", lambda: state)


def test_training_is_not_sent_without_memory_for_a_second_copy(monkeypatch):
    model = a_net()
    state = 16 * sum(parameter.numel() for parameter in model.parameters())
    free_memory(monkeypatch, int(2.5 * state) - 1)
    with pytest.raises(NotShippedError, match=r"a second copy of its 6 kB of weights, .* are free in this computer"):
        ship(a_session(model), lambda batch: model(batch[0]).mean())


def test_memory_of_the_device_counts_where_it_has_its_own_simulated(monkeypatch):
    model = a_net()
    monkeypatch.setattr("whet.device.abstract.DeviceMemory.free_bytes", lambda _: 1000)
    with pytest.raises(NotShippedError, match="1000 B are free on cpu"):
        ship(a_session(model), lambda batch: model(batch[0]).mean())


class Slow(Views):
    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)


def test_training_that_waits_for_its_data_is_measured_here():
    model = a_net()
    session = a_session(model, data=Slow())
    with pytest.raises(NotShippedError, match=r"reading a batch takes .* only this process can try other settings"):
        ship(session, lambda batch: model(batch[0]).mean(), step_seconds=0.02)


# --- in a process -----------------------------------------------------------------------------------------------------

SCRIPT = '''
import torch, whet
from dataclasses import dataclass
from torch import nn
from torch.utils.data import DataLoader, Dataset
from whet.training import tune
from whet.training.shipped_bench import shipped_bench


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Config:
    width = 16


class Lm(nn.Module):
    """Like a Transformers model: a config, tied weights, and a loss in its output."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(50, config.width)
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(config.width, 2, 32, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(config.width, 50, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, labels):
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Texts(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"input_ids": torch.randint(0, 50, (3 + index % 4,)), "name": f"text {index}"}


def pad(samples):
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "labels": (ids + torch.randint(0, 2, ids.shape)) % 50}


print("script", flush=True)
torch.manual_seed(0)
model = Lm(Config())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Texts(), batch_size=8, shuffle=True, collate_fn=pad)
session = whet.Session(model, optimizer, loader, epochs=1000, overrides={"threads": 1, "device": "cpu"})
addresses = [parameter.data_ptr() for parameter in model.parameters()]
config, plan = session.config, tune.plan_from_rules(session.config)
with shipped_bench(
    model, optimizer, loader, config.training, loss=lambda batch: model(**batch), plan=plan
) as bench:
    step = bench.prepare({"precision": "bf16"}, seconds=60)
    print("steps", all(step.step(index) > 0 for index in range(3)))
    step.close()
    # A process that is killed is started again, with the same training.
    bench._worker.kill()
    try:
        bench.prepare({}, seconds=60)
    except Exception as error:
        print("killed", error.reason)
    print("again", bench.prepare({}, seconds=60).step(0) > 0, bench.num_restarts)
print("unmoved", addresses == [parameter.data_ptr() for parameter in model.parameters()])
'''


def test_model_and_loss_of_a_script_are_measured_in_a_process(warm_python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = warm_python.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = ["script", "steps True", "killed its process died: killed by SIGKILL", "again True 1", "unmoved True"]
    assert done.stdout.splitlines() == expected, "the script itself ran once"


def test_process_that_computes_another_loss_is_refused():
    model = a_net()
    parent = os.getpid()
    # Not the same in another process, like a global variable that the program has changed.
    bench = ship(a_session(model), lambda batch: model(batch[0]).square().mean() * (1 + 1e-6 * (os.getpid() != parent)))
    with pytest.raises(WhetError, match=r"its first loss is .* there and .* here"), bench:
        pytest.fail("opened")


def test_class_that_the_process_cannot_import_is_named(monkeypatch):
    model = a_net()
    # Pickled by its name, as it has a module.
    monkeypatch.setattr(Net, "__module__", "no_such_module")
    module = ModuleType("no_such_module")
    module.Net = Net
    monkeypatch.setitem(sys.modules, "no_such_module", module)
    with (
        pytest.raises(WhetError, match="No module named 'no_such_module'"),
        ship(a_session(model), lambda batch: model(batch[0]).mean()),
    ):
        pytest.fail("opened")


class Deadly:
    def __reduce__(self):
        return os.kill, (0, signal.SIGKILL)


def test_child_that_dies_while_it_reads_is_reported():
    model = a_net()
    model.deadly = Deadly()
    # Much more than a pipe holds.
    large = torch.zeros(5_000_000)
    bench = ship(a_session(model), lambda batch: model(batch[0]).mean() + large[0])
    with pytest.raises(ProbeFailedError, match="could not start: killed by SIGKILL"), bench:
        pytest.fail("opened")


# --- in a search ------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_search(monkeypatch):
    monkeypatch.setattr(tune, "budget_seconds", lambda _: 60.0)
    # Independent of the load of the test machine.
    monkeypatch.setattr(tune, "_MAX_START_SHARE", 10.0)


def tuned(model, loss, **changes):
    logged: list[str] = []
    session = a_session(
        model,
        on_event=lambda _, fields: logged.append(str(fields.get("message"))),
        **{"epochs": 100_000, "overrides": FIXED, **changes},
    )
    return tune.with_measured_plan(session.config, loss).plan, logged


def test_search_runs_in_the_process_and_changes_nothing_here(short_search, monkeypatch):
    monkeypatch.setattr(tune, "_TIMED_SECONDS", 0.0)
    monkeypatch.setattr(tune, "steps_per_visit", lambda _: 1)
    model, calls = a_net(), []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def loss(batch):
        calls.append(os.getpid())
        return functional.cross_entropy(model(batch[0]), batch[1])

    plan, logged = tuned(model, loss)
    assert not any("measured in this process" in line for line in logged), logged
    num_steps_here = len(calls)
    assert {*calls} == {os.getpid()}, "the list of the child is another one"
    assert plan.trials[0].setting == "precision"
    assert num_steps_here < 50 + tune._TIMED_VISITS, "the search itself ran elsewhere"
    tried = {trial.setting for trial in plan.trials}
    assert not tried & {"workers", "prefetch", "data_location"}
    assert all(name not in plan.overrides for name in ("workers", "prefetch", "data_location"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("ends", ["measured", "other variables", "too short", "cannot be sent"])
def test_process_that_was_started_early_is_used_or_ended(short_search, monkeypatch, ends):
    """Simulated: the plan is for a GPU."""
    processes, started = [], []
    real_worker, real_start = process_bench.JsonWorker, tune.start_early

    def start_early(model):
        started.append(real_start(model))
        if ends == "other variables":
            monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
        return started[-1]

    def worker(*arguments, **options):
        processes.append(real_worker(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(process_bench, "JsonWorker", worker)
    monkeypatch.setattr(tune, "start_early", start_early)
    monkeypatch.setattr(tune, "_may_start_early", lambda *_: True)
    monkeypatch.setattr(tune, "budget_seconds", lambda _: 1.0 if ends == "too short" else 60.0)
    model = a_net()
    held = io.TextIOWrapper(io.BytesIO()) if ends == "cannot be sent" else None

    def loss(batch):
        assert held is None or not held.closed
        return functional.cross_entropy(model(batch[0]), batch[1])

    plan, logged = tuned(model, loss)
    assert len(started) == 1
    assert len(processes) == (2 if ends == "other variables" else 1)
    assert any("measured in this process" in line for line in logged) == (ends == "cannot be sent"), logged
    assert (plan is None) == (ends == "too short"), logged
    assert all(process.wait(0) is not None for process in processes), "a process is left"


def test_process_is_started_early_where_it_does_not_disturb(monkeypatch):
    h200, small = load_machine("h200"), Workload(recipe="net", num_parameters=10**6, global_batch_size=16)
    plan = make_plan(h200, small, overrides={"device": "cuda"})
    monkeypatch.setattr(tune, "read_system_state", lambda: SystemState(memory_available_bytes=16 * GB))
    assert tune._may_start_early(plan, 20_000)
    assert not tune._may_start_early(plan, 19_999)
    assert not tune._may_start_early(make_plan(h200, small, overrides={"device": "cpu"}), 20_000)
    few = h200.model_copy(update={"cpu": h200.cpu.model_copy(update={"logical_cores": 2})})
    assert not tune._may_start_early(make_plan(few, small, overrides={"device": "cuda"}), 20_000)
    monkeypatch.setattr(tune, "read_system_state", lambda: SystemState(memory_available_bytes=4 * GB))
    assert not tune._may_start_early(plan, 20_000)


@pytest.mark.slow
def test_custom_loop_is_sent_at_its_first_step_and_stays_as_it_is(short_search):
    model = a_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    logged: list[str] = []
    with a_session(
        model,
        optimizer=optimizer,
        epochs=100_000,
        overrides=FIXED,
        on_event=lambda _, fields: logged.append(str(fields.get("message"))),
    ) as session:
        before = [(parameter.data_ptr(), parameter.tolist()) for parameter in model.parameters()]
        seen = []

        def loss(batch):
            seen.append([(parameter.data_ptr(), parameter.tolist()) for parameter in model.parameters()])
            return functional.cross_entropy(model(batch[0]), batch[1])

        for batch in session:
            session.step(loss, batch)
            if session.state.step == 2:
                break
    assert any(line.startswith("measuring which plan is fastest") for line in logged), logged
    assert not any("measured in this process" in line for line in logged), logged
    assert seen[-2] == before, "the first step has the weights of the user"
    assert session.plan.trials[0].setting == "precision"


def test_training_that_cannot_be_sent_is_measured_here_with_the_reason(short_search):
    model, file = a_net(), io.TextIOWrapper(io.BytesIO())
    plan, logged = tuned(model, lambda batch: functional.cross_entropy(model(batch[0]), batch[1]) if file else None)
    assert any(line.startswith("measured in this process: the loss cannot be pickled (") for line in logged), logged
    assert plan.trials


@pytest.mark.slow
def test_process_that_starts_too_slowly_is_left(short_search, monkeypatch):
    monkeypatch.setattr(tune, "_MAX_START_SHARE", 0.0)
    model = a_net()
    plan, logged = tuned(model, lambda batch: functional.cross_entropy(model(batch[0]), batch[1]))
    assert any(line.startswith("measured in this process: another process took ") for line in logged), logged
    assert plan.trials


@pytest.mark.slow
def test_compiling_is_tried_in_the_process(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(tune, "budget_seconds", lambda _: 100.0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = whet.Session(
        model, optimizer, some_data(), on_event=None, global_batch_size=16, epochs=1_000_000,
        overrides={**{name: value for name, value in FIXED.items() if name != "compile"}, "precision": "fp32"},
    )  # fmt: skip
    plan = tune.with_measured_plan(session.config, lambda batch: model(batch[0]).square().mean()).plan
    tried = [trial for trial in plan.trials if "compile" in trial.settings]
    assert any(trial.median_seconds for trial in tried), [trial.note for trial in plan.trials]
    assert (tmp_path / "home" / "compiled").stat().st_mode & 0o777 == 0o700
    assert any((tmp_path / "home" / "compiled").iterdir())
