"""Attention kernels: used while a run trains, refused where missing, tried where they matter."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import whet
from fake_device import FakeDevice
from whet.autotune import candidates as choices
from whet.autotune.candidates import apply_candidate, candidates
from whet.base.errors import UsageError
from whet.device.cpu import CpuDevice
from whet.device.open import current_machine
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.plan.setting import MeasuredSetting
from whet.run.events import History
from whet.step.optimizers import OptimizerChoice
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config
from whet.training.workload import calls_attention, describe_workload

pytestmark = pytest.mark.torch

TRAINING = {"global_batch_size": 8, "epochs": 1}
FUSED = "_scaled_dot_product_flash_attention_for_cpu"


class Attends(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        match self.how:
            case "function":
                x = functional.scaled_dot_product_attention(x, x, x)
            case "layer":
                x = self.layer(x, x, x, need_weights=False)[0]
            case "weights":
                x = self.layer(x, x, x)[0]
        return self.head(x.mean(1))


def a_training(how: str = "layer"):
    torch.manual_seed(0)
    model = Attends(how)
    data = (torch.randn(64, 6, 8), torch.randint(0, 2, (64,)))
    return model, data, lambda micro: functional.cross_entropy(model(micro.x), micro.y)


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def train(kernel: str, *, how: str = "layer", run=None):
    model, data, loss = a_training(how)
    operators = Operators()

    def watched(micro):
        with operators:
            return loss(micro)

    whet.train(
        model, data, loss=watched, optimizer=OptimizerChoice(lr=1e-2), run=run, on_event=None, measure=False,
        evaluate=lambda model, micro_batches: {"n": len([model(m.x) for m in micro_batches])}, val=data,
        overrides={"attention": kernel, "threads": 1}, **TRAINING,
    )  # fmt: skip
    return operators.seen, model


def test_the_wanted_kernel_computes_while_a_run_trains_and_torch_chooses_again_afterwards(tmp_path):
    before = torch._C._get_sdp_priority_order(), torch._C._get_flash_sdp_enabled()
    assert FUSED in train("torch", run=tmp_path / "torch")[0]
    assert FUSED in train("flash")[0]
    assert FUSED not in train("math", run=tmp_path / "math")[0]
    assert (torch._C._get_sdp_priority_order(), torch._C._get_flash_sdp_enabled()) == before
    losses = [
        torch.tensor([e.get("loss") for e in History(whet.open_run(tmp_path / run)).events(kinds=("step",))])
        for run in ("torch", "math")
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


def test_an_unsupported_kernel_falls_back_to_the_next_one():
    q = torch.randn(2, 2, 8, 16, requires_grad=True)
    with CpuDevice().use_kernels(attention="flash"):
        functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sum().backward()
    assert q.grad is not None


def test_a_kernel_is_refused_where_the_device_or_the_model_has_none(tmp_path):
    with pytest.raises(UsageError, match="cpu has no such attention kernel"):
        train("efficient", run=tmp_path / "never")
    assert not (tmp_path / "never").exists()
    with pytest.raises(UsageError, match="no choice of attention kernels"):
        FakeDevice().check_settings(attention="flash")
    with pytest.raises(UsageError, match="does not call torch's scaled_dot_product_attention"):
        train("math", how="weights")


@pytest.mark.parametrize(("how", "expected"), [("function", True), ("layer", True), ("weights", False), ("no", False)])
def test_one_pass_shows_whether_attention_is_called(how, expected):
    model, data, loss = a_training(how)
    micro = type("Micro", (), {"x": data[0][:2], "y": data[1][:2]})
    original = functional.scaled_dot_product_attention
    assert calls_attention(model, loss, micro, device=CpuDevice()) is expected
    assert functional.scaled_dot_product_attention is original


def test_a_rig_learns_that_attention_is_called_and_steps_with_each_kernel(monkeypatch):
    model, data, loss = a_training()
    operators = Operators()

    def watched(micro):
        with operators:
            return loss(micro)

    training = parse_training_config(TRAINING)
    machine, system_state = current_machine()
    plan = make_plan(machine, describe_workload(model, data, training, recipe="attends"), system_state=system_state)
    # A CPU has no alternatives to compare, so pretend that it has.
    monkeypatch.setitem(choices.ATTENTION, "cpu", ("math",))
    with LocalStepBench(model, OptimizerChoice(), data, training, loss=watched, plan=plan) as rig:
        assert "sdpa" in rig.plan.workload.layers
        assert "sdpa" not in rig.about["workload"]["layers"], "facts learned later are not part of the key"
        plain, math = rig.prepare({}, seconds=10), rig.prepare({"attention": "math"}, seconds=10)
        for prepared, is_fused in ((plain, True), (math, False), (plain, True)):
            operators.seen.clear()
            prepared.step(0)
            assert (FUSED in operators.seen) is is_fused
        monkeypatch.delitem(choices.ATTENTION, "cpu")
    with LocalStepBench(model, OptimizerChoice(), data, training, loss=watched, plan=plan) as rig:
        assert "sdpa" not in rig.plan.workload.layers


def test_kernels_are_offered_in_half_precision_where_attention_is_called():
    model, data, _ = a_training()
    workload = describe_workload(model, data, parse_training_config(TRAINING), recipe="attends")
    half = {"precision": MeasuredSetting(value="bf16", reason="tried", evidence={})}

    def offered(machine="h200", measured=half, **changes):
        changed = workload.model_copy(update={"layers": (*workload.layers, "sdpa"), **changes})
        plan = make_plan(load_machine(machine), changed, measured=measured)
        return plan.attention, [c.value for c in candidates(plan, "attention")]

    assert offered() == ("torch", ["flash", "efficient"])
    assert offered(layers=("linear",)) == ("torch", [])
    assert offered(measured={}) == ("torch", [])
    assert offered("linux-2core") == ("torch", [])
    assert offered("m2-air-8gb") == ("torch", [])
    many = {"lengths_vary": True, "max_length": 512, "mean_length": 100.0}
    few = {**half, "lengths": MeasuredSetting(value="bucketed", reason="tried", evidence={})}
    sorted_ones = {**half, "lengths": MeasuredSetting(value="sorted", reason="tried", evidence={})}
    assert offered(measured=sorted_ones, **many) == ("flash", ["efficient"])
    assert offered(measured={"lengths": sorted_ones["lengths"]}, **many) == ("torch", [])
    assert offered(measured=few, **many) == ("torch", ["flash", "efficient"])


def test_a_kernel_that_was_taken_for_few_shapes_is_not_kept_for_many():
    plan = make_plan(
        load_machine("h200"), describe_workload(*a_training()[:2], parse_training_config(TRAINING), recipe="attends")
    )
    lengths = choices.PlanCandidate(setting="lengths", changes={"lengths": "sorted"})
    assert dict(apply_candidate({"attention": "torch", "precision": "bf16"}, lengths)) == {
        "precision": "bf16",
        "lengths": "sorted",
    }
    assert plan.settings["attention"].source == "rule"
