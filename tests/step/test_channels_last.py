"""Convolution weights in channels_last: the same training, the same checkpoints, exact resume."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import whet
from whet.autotune.candidates import candidates
from whet.autotune.step_bench import ProbeFailedError
from whet.base.errors import UsageError
from whet.device.mps import MpsDevice
from whet.device.open import current_machine
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.run.events import History
from whet.step.model_contexts import WeightLayout
from whet.step.optimizers import OptimizerChoice
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config
from whet.training.workload import describe_workload

pytestmark = pytest.mark.torch

TRAINING = {"global_batch_size": 8, "epochs": 2, "ema": True, "clip": 1.0}
LAST = {"layout": "channels_last", "threads": 1}


class Net(nn.Module):
    def __init__(self, *, views: bool = False) -> None:
        super().__init__()
        self.views = views
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x):
        x = self.second(functional.relu(self.norm(self.first(x))))
        return self.head(x.view(len(x), -1) if self.views else x.flatten(1))


def a_training(**options):
    torch.manual_seed(0)
    model = Net(**options)
    data = (torch.randn(80, 3, 6, 6), torch.randint(0, 3, (80,)))
    return model, data, lambda micro: functional.cross_entropy(model(micro.x), micro.y)


def train(run=None, *, overrides=LAST, optimizer=None, change=None, **more):
    model, data, loss = a_training()
    if change:
        change(model)
    seen = []

    def watched(micro):
        seen.append(model.first.weight.stride())
        return loss(micro)

    given = optimizer(model) if optimizer else OptimizerChoice(lr=1e-2)
    result = whet.train(
        model, data, loss=watched, optimizer=given, run=run, overrides=overrides, on_event=None, **{**TRAINING, **more}
    )
    return model, given, seen, result


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def losses_of(run):
    return [event.get("loss") for event in History(whet.open_run(run)).events(kinds=("step",))]


def newest_state(run):
    return load_file(max(run.glob("checkpoints/*/state.safetensors")))


@pytest.mark.parametrize("kernels", ["fused", pytest.param("foreach", marks=pytest.mark.slow)])
def test_a_run_with_channels_last_that_is_resumed_ends_with_the_same_bits(tmp_path, kernels):
    overrides = {**LAST, "optimizer_kernels": kernels}
    whole, _, seen, _ = train(tmp_path / "whole", overrides=overrides)
    assert set(seen) == {(27, 1, 9, 3)}, "the weights lie with channels last while it trains"
    train(tmp_path / "parts", overrides=overrides, epochs_per_session=1)
    resumed, _, _, result = train(tmp_path / "parts", overrides=overrides, epochs_per_session=1)
    assert result.state == "done"
    expected, actual = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    first, second = newest_state(tmp_path / "whole"), newest_state(tmp_path / "parts")
    assert any(name.startswith("ema/") for name in first)
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def test_the_same_is_trained_as_without_and_checkpoints_hold_the_same_numbers(tmp_path):
    model, *_ = train(tmp_path / "last")
    train(tmp_path / "plain", overrides={"threads": 1})
    last, plain = torch.tensor(losses_of(tmp_path / "last")), torch.tensor(losses_of(tmp_path / "plain"))
    assert len(last) == 20
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-6)
    on_disk = newest_state(tmp_path / "last")
    weight = on_disk["model/first.weight"]
    assert weight.is_contiguous()
    assert torch.equal(weight, model.first.weight)
    # A run of another layout starts from it.
    other, *_ = train(tmp_path / "next", overrides={"threads": 1}, init_from=tmp_path / "last", max_steps=1)
    assert other.first.weight.is_contiguous()


def test_a_user_model_in_channels_last_is_resumed_exactly(tmp_path):
    """Without overrides: state from disk must have the layout of the weights, or fused kernels mix it up."""

    def change(model):
        model.to(memory_format=torch.channels_last)

    whole, *_ = train(tmp_path / "whole", overrides={"threads": 1}, change=change)
    train(tmp_path / "parts", overrides={"threads": 1}, change=change, epochs_per_session=1)
    resumed, *_ = train(tmp_path / "parts", overrides={"threads": 1}, change=change, epochs_per_session=1)
    assert resumed.first.weight.stride() == (27, 1, 9, 3)
    expected, actual = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_the_layout_of_weights_and_optimizer_state_is_restored_afterwards():
    model, optimizer, seen, _ = train(optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True))
    assert set(seen) == {(27, 1, 9, 3)}
    assert model.first.weight.stride() == (27, 9, 3, 1)
    assert optimizer.state[model.first.weight]["exp_avg"].stride() == (27, 9, 3, 1)


def a_rig(model, data, loss, optimizer=None):
    machine, system_state = current_machine()
    training = parse_training_config(TRAINING)
    optimizer = optimizer or OptimizerChoice(lr=1e-2)
    overrides = {"optimizer_kernels": "yours"} if isinstance(optimizer, torch.optim.Optimizer) else {}
    plan = make_plan(
        machine, describe_workload(model, data, training, recipe="net"), overrides=overrides, system_state=system_state
    )
    return LocalStepBench(model, optimizer, data, training, loss=loss, plan=plan)


@pytest.mark.parametrize("is_yours", [False, True])
def test_measuring_both_layouts_in_turns_leaves_no_trace(is_yours):
    model, data, loss = a_training()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if is_yours else None
    if optimizer:
        loss(type("", (), {"x": data[0], "y": data[1]})).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
    before, seen = weights_of(model), []

    def watched(micro):
        seen.append(model.first.weight.stride())
        return loss(micro)

    with a_rig(model, data, watched, optimizer) as rig:
        last, plain = (rig.prepare(settings, seconds=30) for settings in ({"layout": "channels_last"}, {}))
        seen.clear()
        places: dict[object, set[int]] = {}
        averages = [prepared._built.stepper.ema.average["first.weight"].stride() for prepared in (last, plain)]
        assert averages == [(27, 1, 9, 3), (27, 9, 3, 1)]
        for prepared in (plain, last, plain, last):
            assert prepared.step(0) > 0
            places.setdefault(prepared, set()).add(model.first.weight.data_ptr())
            if optimizer:
                state = prepared._built.stepper.optimizer.state[model.first.weight]
                assert state["exp_avg"].stride() == model.first.weight.stride()
                assert optimizer.state[model.first.weight]["exp_avg"].stride() == (27, 9, 3, 1)
        assert seen == [(27, 9, 3, 1), (27, 1, 9, 3)] * 2
        assert [len(actual) for actual in places.values()] == [1, 1], "captured steps need each weight in its place"
        last.close()
    assert model.first.weight.stride() == (27, 9, 3, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(model).items())


def test_a_model_that_cannot_have_it_is_the_end_of_one_probe():
    model, data, loss = a_training(views=True)
    with a_rig(model, data, loss) as rig:
        with pytest.raises(ProbeFailedError, match="view size is not compatible"):
            rig.prepare({"layout": "channels_last"}, seconds=10)
        assert rig.prepare({}, seconds=10).step(0) > 0
    assert model.first.weight.is_contiguous()


def test_channels_last_is_refused_where_it_has_no_meaning_or_is_wrong():
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match="a layout of convolutions"):
        whet.train(
            model, (torch.randn(64, 4), torch.randn(64, 2)), loss=lambda m: (model(m.x) - m.y).square().mean(),
            optimizer=OptimizerChoice(), overrides=LAST, global_batch_size=8, on_event=None,
        )  # fmt: skip
    with pytest.raises(UsageError, match="wrong results on MPS"):
        MpsDevice.check_settings(None, layout="channels_last")


def test_parameters_that_share_memory_or_overlap_are_left_alone():
    model = Net()
    shared = torch.randn(2, 8, 4, 3, 3)
    model.first.weight = nn.Parameter(shared[0])
    model.second.weight = nn.Parameter(shared[1])
    wide = nn.Parameter(torch.randn(4, 4, 1, 1).expand(4, 4, 3, 3))
    model.third = nn.ParameterList([wide])
    layout = WeightLayout(model)
    with pytest.raises(UsageError):
        layout.use("channels_last")
    assert model.second.weight.untyped_storage().data_ptr() == model.first.weight.untyped_storage().data_ptr()


def test_it_is_offered_for_convolutions_of_two_dimensions_and_never_on_mps():
    model, data, _ = a_training()
    workload = describe_workload(model, data, parse_training_config(TRAINING), recipe="net")
    offered = {
        name: [c.value for c in candidates(make_plan(load_machine(name), workload), "layout")]
        for name in ("linux-2core", "h200", "m2-air-8gb")
    }
    assert offered == {"linux-2core": ["channels_last"], "h200": ["channels_last"], "m2-air-8gb": []}
    flat = describe_workload(nn.Conv1d(3, 3, 3), data, parse_training_config(TRAINING), recipe="net")
    assert not list(candidates(make_plan(load_machine("h200"), flat), "layout"))
