"""Measuring restores the model; the training that follows is unchanged."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import whet
from whet.autotune.step_bench import ProbeFailedError
from whet.data.batch import MicroBatch
from whet.device.open import current_machine
from whet.plan.plan import make_plan
from whet.run.events import History
from whet.step.optimizers import OptimizerChoice
from whet.training.step_bench import LocalStepBench, evidence_key
from whet.training.training_config import parse_training_config
from whet.training.workload import describe_workload

pytestmark = pytest.mark.torch

TRAINING = {"global_batch_size": 16, "epochs": 2, "clip": 1.0, "ema": True}
CANDIDATES = (
    {},
    {"micro_batch": 4},
    {"threads": 1},
    {"optimizer_kernels": "foreach"},
    {"optimizer_kernels": "loop"},
    {"precision": "bf16"},
    {"activation_checkpointing": "on"},
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2)),
            nn.Sequential(nn.Linear(32, 32), nn.ReLU()),
        )
        self.head = nn.Linear(32, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.head(self.blocks(x))


def a_training():
    torch.manual_seed(3)
    model = Net()
    model.blocks[1].eval()
    data = (torch.randn(80, 8), torch.randint(0, 3, (80,)))
    return model, data, lambda micro: functional.cross_entropy(model(micro.x), micro.y)


def simulated_bench(model, data, loss, optimizer=None, *, overrides=None, **changes):
    training = parse_training_config({**TRAINING, **changes})
    optimizer = optimizer or OptimizerChoice(lr=1e-2)
    machine, system_state = current_machine()
    overrides = overrides or {}
    if isinstance(optimizer, torch.optim.Optimizer):
        overrides = {**overrides, "optimizer_kernels": "yours"}
    plan = make_plan(
        machine, describe_workload(model, data, training, recipe="net"), overrides=overrides, system_state=system_state
    )
    return LocalStepBench(model, optimizer, data, training, loss=loss, plan=plan)


def everything(model, optimizer=None):
    state = {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=False).items()}
    rest = {
        "modes": [module.training for module in model.modules()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "objects": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "forwards": [module.__dict__.get("forward") for module in model.modules()],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "threads": torch.get_num_threads(),
        "compiled": model._compiled_call_impl,
    }
    if optimizer is not None:
        rest["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        rest["state"] = [
            {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state.get(p, {}).items()}
            for p in model.parameters()
        ]
    return state, rest


def make_steps(bench, candidates=CANDIDATES):
    for settings in candidates:
        prepared = bench.prepare(settings, seconds=30)
        assert prepared.step(3) > 0
        prepared.close()


def assert_equal(result, expected):
    assert result[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        assert torch.equal(result[0][name], tensor), name
    assert result[1] == expected[1]


def test_measuring_restores_model_generators_and_threads():
    model, data, loss = a_training()
    before = everything(model)
    with simulated_bench(model, data, loss) as bench:
        make_steps(bench)
        assert bench.agreement({"precision": "bf16"}, seconds=5).loss_error >= 0
    assert_equal(everything(model), before)


def test_users_optimizer_is_restored():
    model, data, loss = a_training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss(MicroBatch(fields={"x": data[0], "y": data[1]}, ids=np.arange(80))).backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    before = everything(model, optimizer)
    with simulated_bench(model, data, loss, optimizer) as bench:
        make_steps(bench, [{}, {"threads": 1}])
    assert_equal(everything(model, optimizer), before)


def test_plans_that_take_turns_keep_optimizer_state_of_their_own():
    model, data, loss = a_training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # replaces optimizer.step by a method that counts
    with simulated_bench(model, data, loss, optimizer) as bench:
        first, second = (bench.prepare(settings, seconds=30) for settings in ({}, {"threads": 1}))
        replica = second._built.stepper.optimizer
        addresses = [state["exp_avg"].data_ptr() for state in replica.state.values()]
        first.close()
        second.step(0)
        assert len(addresses) == len(list(model.parameters()))
        assert [state["exp_avg"].data_ptr() for state in replica.state.values()] == addresses
        assert not optimizer.state
    assert not getattr(optimizer, "_opt_called", False)


class Slowly(torch.optim.Optimizer):
    """Keeps its state in dicts, lists and attributes, and its learning rate in a tensor."""

    def __init__(self, parameters) -> None:
        super().__init__(list(parameters), {"lr": torch.tensor(1e-2)})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                known = self.state[parameter].setdefault("known", {"sum": torch.zeros_like(parameter), "norms": []})
                if parameter.grad is not None:
                    known["sum"] += parameter.grad
                    known["norms"].append(float(parameter.grad.norm()))
                    parameter -= group["lr"] * known["sum"]


def test_nested_optimizer_state_is_restored_in_place():
    model, data, loss = a_training()
    optimizer = Slowly(model.parameters())
    rate, weight = optimizer.param_groups[0]["lr"], model.head.weight
    torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loss(MicroBatch(fields={"x": data[0], "y": data[1]}, ids=np.arange(80))).backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    known = optimizer.state[weight]["known"]
    before, norms, steps = known["sum"].clone(), list(known["norms"]), optimizer.steps
    names = {*vars(optimizer)}
    with simulated_bench(model, data, loss, optimizer) as bench:
        make_steps(bench, [{}, {"threads": 1}])
        assert optimizer.steps > steps
    assert optimizer.state[weight]["known"] is known
    assert torch.equal(known["sum"], before)
    assert known["norms"] == norms
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(1e-2), "holders of the tensor would see a rate of zero"
    assert optimizer.steps == steps
    assert {*vars(optimizer)} == names


def test_loss_that_needs_many_samples_can_be_measured():
    model, data, loss = a_training()

    def choosy(micro):
        if len(micro.sample_ids) < 16:
            raise ValueError("16 samples at least")
        return loss(micro)

    with simulated_bench(model, data, choosy) as bench:
        make_steps(bench, [{}])
        with pytest.raises(ProbeFailedError, match="ValueError: 16 samples at least"):
            bench.prepare({"micro_batch": 4}, seconds=5)


def test_late_failure_ends_one_probe_only():
    model, data, loss = a_training()
    calls = iter(range(1000))

    def fails_once(micro):
        if next(calls) == 12:
            raise KeyError("the thirteenth")
        return loss(micro)

    with simulated_bench(model, data, fails_once) as bench:
        prepared = bench.prepare({}, seconds=30)
        with pytest.raises(ProbeFailedError, match="KeyError: 'the thirteenth'"):
            [prepared.step(index) for index in range(20)]
        make_steps(bench, [{}])


def test_dataset_is_not_prefetched():
    class Files:
        reads = 0

        def __len__(self):
            return 6400

        def __getitem__(self, index):
            Files.reads += 1
            return {"x": torch.randn(8), "y": torch.tensor(index % 3)}

    model, _, loss = a_training()
    with simulated_bench(model, Files(), loss, overrides={"workers": 0}):
        assert Files.reads <= 2 * TRAINING["global_batch_size"]


def test_failed_probe_leaves_no_trace():
    model, data, loss = a_training()
    before = everything(model)

    def fails(micro):
        if len(micro.sample_ids) == 16 and torch.get_num_threads() == 1:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)")
        return loss(micro)

    with simulated_bench(model, data, fails) as bench:
        with pytest.raises(ProbeFailedError) as failed:
            bench.prepare({"threads": 1, "micro_batch": 16}, seconds=5)
        assert failed.value.kind == "oom"
        make_steps(bench, [{"threads": 2}])
    assert_equal(everything(model), before)


def test_training_after_measuring_has_bit_equal_losses(tmp_path):
    def losses(*, measures: bool, run):
        model, data, loss = a_training()
        if measures:
            with simulated_bench(model, data, loss) as bench:
                make_steps(bench)
        whet.train(
            model,
            data,
            loss=loss,
            optimizer=OptimizerChoice(lr=1e-2),
            on_event=None,
            run=run,
            **{**TRAINING, "epochs": 10},
        )
        return [event.fields["loss"] for event in History(whet.open_run(run)).events(kinds=("step",))]

    without, after = losses(measures=False, run=tmp_path / "a"), losses(measures=True, run=tmp_path / "b")
    assert len(without) == 50
    assert after == without


def test_memory_per_sample_is_measured_once_and_decides_the_plan():
    model, data, loss = a_training()
    with simulated_bench(model, data, loss) as bench:
        assert bench.plan.workload.activation_bytes
        assert bench.predicted_bytes({"micro_batch": 16}) > bench.predicted_bytes({"micro_batch": 4})


def test_dataset_is_read_inside_the_timed_steps(tmp_path):
    model, data, loss = a_training()
    reads = []

    class Reading(torch.utils.data.Dataset):
        def __len__(self):
            return 80

        def __getitem__(self, index):
            reads.append(index)
            return {"x": data[0][index], "y": data[1][index]}

    with simulated_bench(model, Reading(), loss) as bench:
        prepared = bench.prepare({"workers": 0}, seconds=30)
        before = len(reads)
        for index in range(8):
            prepared.step(index)
        assert len(reads) >= before + 7 * 16
        other = bench.prepare({"workers": 1}, seconds=30)
        assert other.step(0) > 0


def test_a_program_uses_what_whet_plan_has_measured():
    """`whet plan train.py:main --measure` and `python train.py` name the workload differently."""
    model, data, _ = a_training()
    training = parse_training_config(TRAINING)
    plans = [
        make_plan(current_machine()[0], describe_workload(model, data, training, recipe=name))
        for name in ("train", "session")
    ]
    first, second = (evidence_key(plan, model) for plan in plans)
    assert first == second
    model.head = nn.Linear(32, 4)
    assert evidence_key(plans[0], model) != first
