"""Kernels of the user's optimizer: when the plan selects fused ones, and how they are restored."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

import whet
from captured_steps import assert_same, rows
from fake_device import SimulatedGraphs
from whet.base.errors import UsageError
from whet.data.order import epoch_order
from whet.device.cpu import CpuDevice
from whet.plan.workload import OPTIMIZER_KERNELS
from whet.run.events import History
from whet.step.graphs import GraphedStepper
from whet.step.optimizer_kernels import (
    gradient_obstacle,
    kernel_obstacle,
    save_kernels,
    set_kernels,
    update,
    watch_updates,
)
from whet.step.optimizers import OptimizerChoice, build_optimizer
from whet.training.run_config import plan_from_rules

pytestmark = pytest.mark.torch

FLAGS = ("fused", "foreach", "capturable")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


def train(path, make_optimizer, *, model=None, schedule=None, **options):
    model = model or make_net()
    optimizer = make_optimizer(model.parameters())
    whet.train(
        model,
        DataLoader(TensorDataset(*rows(64)), batch_size=8, shuffle=True),
        loss=functional.cross_entropy,
        optimizer=optimizer,
        run=path,
        device="cpu",
        measure=False,
        on_event=None,
        **({} if schedule is None else {"schedule": schedule(optimizer)}),
        **{"epochs": 3, **options},
    )
    return model, optimizer


def losses_of(path):
    return [e.fields["loss"] for e in History(whet.open_run(path)).events(kinds=("step",))]


def setting_of(path, name):
    return whet.open_run(path).plan["settings"][name]


# --- which optimizers ------------------------------------------------------------------------------------------------


class OwnAdamW(torch.optim.AdamW):
    pass


def with_hook(parameters):
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.AdamW, None),
        (torch.optim.Adam, None),
        (torch.optim.SGD, None),
        (torch.optim.Adagrad, None),
        (torch.optim.RMSprop, "RMSprop has no fused kernels"),
        (torch.optim.Adafactor, "Adafactor has no fused kernels"),
        (OwnAdamW, "your OwnAdamW has no fused kernels"),
        (lambda p: torch.optim.AdamW(p, fused=True), None),
        (lambda p: torch.optim.AdamW(p, foreach=True), "you chose the kernels of AdamW"),
        (lambda p: torch.optim.AdamW(p, fused=False), "you chose the kernels of AdamW"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "you chose the kernels of AdamW"),
        (with_hook, "AdamW has hooks"),
    ],
)
def test_only_torchs_own_optimizers_with_open_flags_get_other_kernels(make, reason):
    net = make_net()
    assert kernel_obstacle(make(net.parameters()), net) == reason


def test_kernels_by_name_are_those_of_the_classes():
    """The rules know only names. torch's signatures say which kernels exist."""
    for name, kernels in OPTIMIZER_KERNELS.items():
        optimizer = build_optimizer(OptimizerChoice(name=name), make_net(), CpuDevice(), kernels="loop")
        assert (name, tuple(flag for flag in ("fused", "foreach") if flag in optimizer.defaults)) == (
            name,
            kernels[:-1],
        )


@pytest.mark.parametrize(("name", "expected"), [("adafactor", "loop"), ("adam_atan2", "foreach"), ("adamw", "fused")])
def test_plan_names_kernels_that_the_built_optimizer_has(name, expected):
    def setting(**overrides):
        choice, options = OptimizerChoice(name=name), {"global_batch_size": 8, "device": "cpu", "on_event": None}
        config = whet.Session(make_net(), choice, rows(32), overrides=overrides, **options).config
        return plan_from_rules(config).settings["optimizer_kernels"]

    assert setting().value == expected
    if name != "adamw":
        assert setting().reason == f"{name} has no fused kernels"
        with pytest.raises(UsageError, match=f"{name} has no fused kernels"):
            setting(optimizer_kernels="fused")


def test_parameters_that_fused_kernels_update_wrongly_are_found():
    class Holder(nn.Module):
        def __init__(self, tensor):
            super().__init__()
            self.weight = nn.Parameter(tensor)

    for tensor, is_fine in (
        (torch.randn(4, 6).t(), True),
        (torch.randn(4, 6)[:, ::2], False),
        (torch.randn(4, dtype=torch.complex64), False),
    ):
        holder = Holder(tensor)
        assert (kernel_obstacle(torch.optim.SGD(holder.parameters()), holder) is None) is is_fine
    table = nn.Embedding(5, 3, sparse=True)
    assert "sparse" in kernel_obstacle(torch.optim.SGD(table.parameters()), table)


def test_flags_and_attributes_are_restored_with_existing_state():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    before = {**vars(optimizer)}, [{k: g.get(k) for k in FLAGS} for g in optimizer.param_groups]
    restore = save_kernels(optimizer)
    set_kernels(optimizer, "fused", is_captured=False)
    assert optimizer.param_groups[0]["fused"] is True
    optimizer.step()
    restore()
    assert ({**vars(optimizer)}.keys(), [{k: g.get(k) for k in FLAGS} for g in optimizer.param_groups]) == (
        before[0].keys(),
        before[1],
    )


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param(torch.optim.AdamW, marks=pytest.mark.slow), torch.optim.SGD])
def test_a_run_uses_fused_kernels_resumes_exactly_and_restores_the_flags(kind, tmp_path):
    def make(parameters):
        return kind(parameters, lr=1e-2)

    whole, optimizer = train(tmp_path / "whole", make)
    assert setting_of(tmp_path / "whole", "optimizer_kernels")["value"] == "fused"
    assert not any(group.get(flag) for group in optimizer.param_groups for flag in FLAGS)
    train(tmp_path / "twice", make, max_steps=9)
    resumed, _ = train(tmp_path / "twice", make, max_steps=None)
    assert_same(resumed.state_dict(), whole.state_dict())
    train(tmp_path / "own", make, overrides={"optimizer_kernels": "yours"})
    assert setting_of(tmp_path / "own", "optimizer_kernels")["source"] == "you"
    assert losses_of(tmp_path / "whole") == pytest.approx(losses_of(tmp_path / "own"), rel=1e-5)


def test_own_kernels_give_the_bits_of_a_plain_loop(tmp_path):
    model, _ = train(tmp_path / "run", torch.optim.AdamW, epochs=1, overrides={"optimizer_kernels": "yours"})
    plain = make_net()
    optimizer = torch.optim.AdamW(plain.parameters())
    x, y = rows(64)
    for ids in torch.from_numpy(epoch_order(64, seed=0, epoch=0)).split(8):
        optimizer.zero_grad()
        functional.cross_entropy(plain(x[ids]), y[ids]).backward()
        optimizer.step()
    assert_same(model.state_dict(), plain.state_dict())


def test_gradients_in_another_layout_keep_the_optimizers_own_kernels(tmp_path):
    """torch's fused kernels on the CPU would read such gradients wrongly, without an error."""

    def transpose(parameter):
        if parameter.dim() == 2:
            parameter.grad = parameter.grad.t().contiguous().t()

    results = []
    for name, overrides in (("planned", {}), ("own", {"optimizer_kernels": "yours"})):
        model = make_net()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(transpose)
        train(tmp_path / name, torch.optim.AdamW, model=model, overrides=overrides)
        results.append(model.state_dict())
    assert_same(*results)
    setting = setting_of(tmp_path / "planned", "optimizer_kernels")
    assert setting["value"] == "yours"
    assert "memory layout" in setting["reason"]


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_layer_frozen_during_a_run_keeps_fused_kernels_after_a_resume(is_removed, tmp_path):
    """The first step of the resume has fewer gradients than parameters, but their momentum exists."""

    class Freeze(whet.Callback):
        def after_step(self, state, outcome):
            if state.step == 4 and is_removed:
                parametrize.remove_parametrizations(self.model[0], "weight")
            elif state.step == 4:
                self.model[0].requires_grad_(False)

    def run(path, **options):
        model, freeze = make_net(), Freeze()
        if is_removed:
            weight_norm(model[0])
        freeze.model = model
        make = lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=1e-2)  # noqa: E731
        return train(path, make, model=model, callbacks=[freeze], **options)[0]

    whole = run(tmp_path / "whole")
    run(tmp_path / "twice", max_steps=9)
    assert_same(run(tmp_path / "twice", max_steps=None).state_dict(), whole.state_dict())
    assert setting_of(tmp_path / "twice", "optimizer_kernels")["value"] == "fused"


def test_momentum_that_fused_sgd_cannot_start_is_an_obstacle():
    net = make_net()
    parameters = [*net.parameters()]
    optimizer = torch.optim.SGD(parameters, momentum=0.9)
    net(torch.ones(2, 6)).sum().backward()
    assert gradient_obstacle(optimizer, parameters) is None
    parameters[0].grad = None
    assert "momentum" in gradient_obstacle(optimizer, parameters)
    optimizer.step()
    # A frozen layer may start later in a new run, but not in one whose earlier steps were fused.
    assert "momentum" in gradient_obstacle(optimizer, parameters)
    assert gradient_obstacle(optimizer, parameters, is_resumed=True) is None
    parameters[0].grad = torch.ones_like(parameters[0])
    assert "momentum" in gradient_obstacle(optimizer, parameters, is_resumed=True)
    assert gradient_obstacle(torch.optim.SGD(parameters), parameters[:1]) is None


def test_strides_of_dimensions_of_size_one_do_not_matter():
    """1 x 1 convolutions in channels_last have gradients with such strides."""
    parameter = torch.nn.Parameter(torch.randn(8, 4, 1, 1))
    parameter.grad = torch.randn(8, 4).as_strided((8, 4, 1, 1), (4, 1, 4, 4))
    assert parameter.grad.stride() != parameter.stride()
    optimizer = torch.optim.AdamW([parameter])
    assert gradient_obstacle(optimizer, [parameter]) is None
    parameter.grad = torch.randn(4, 8, 1, 1).transpose(0, 1)
    assert "memory layout" in (gradient_obstacle(optimizer, [parameter]) or "")


def test_kernels_that_an_optimizer_lacks_are_refused(tmp_path):
    with pytest.raises(UsageError, match="RMSprop has no fused kernels"):
        train(tmp_path / "run", torch.optim.RMSprop, overrides={"optimizer_kernels": "fused"})
    assert not (tmp_path / "run").exists()


def test_manual_steps_use_the_optimizers_own_kernels(tmp_path):
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters())
    with whet.Session(model, optimizer, rows(64), global_batch_size=8, run=tmp_path / "run", device="cpu") as session:
        for batch in session:
            with session.manual(batch) as (x, y):
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                assert not optimizer.param_groups[0]["fused"]
                optimizer.step()
    assert setting_of(tmp_path / "run", "optimizer_kernels")["value"] == "yours"


# --- captured steps, with graphs simulated on the CPU ---------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch):
    """Simulated: the CPU captures steps too."""
    monkeypatch.setattr(CpuDevice, "graphs", lambda _: SimulatedGraphs())


def one_cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=1e-2, total_steps=24)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("cosine", torch.optim.AdamW),
        pytest.param("StepLR", torch.optim.AdamW, marks=pytest.mark.slow),
        pytest.param("OneCycleLR", torch.optim.AdamW, marks=pytest.mark.slow),
        pytest.param("cosine", torch.optim.SGD, marks=pytest.mark.slow),
        ("StepLR", torch.optim.SGD),
        pytest.param("OneCycleLR", torch.optim.SGD, marks=pytest.mark.slow),
    ],
)
def test_captured_steps_of_a_users_optimizer_follow_every_schedule_simulated(
    graphs, monkeypatch, kind, schedule, tmp_path
):
    made = {"cosine": lambda _: "cosine", "StepLR": lambda o: StepLR(o, 2, 0.5), "OneCycleLR": one_cycle}[schedule]
    steppers = []
    release = GraphedStepper.release_graphs
    monkeypatch.setattr(
        GraphedStepper,
        "release_graphs",
        lambda self, why: (steppers.append((self, why, self._num_replays)), release(self, why)),
    )

    def make(parameters):
        return kind(parameters, lr=1e-2) if kind is torch.optim.AdamW else kind(parameters, lr=1e-2, momentum=0.9)

    results = []
    for graph in ("on", "off"):
        model, optimizer = train(
            tmp_path / graph,
            make,
            schedule=made,
            overrides={"graph": graph},
            **({"schedule_interval": "epoch"} if schedule == "StepLR" else {}),
        )
        results.append((losses_of(tmp_path / graph), model.state_dict()))
        assert isinstance(optimizer.param_groups[0]["lr"], float), "the user's groups stay as they were"
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])
    (stepper, reason, replays), *_ = steppers
    assert reason == "the session is over"
    assert replays >= 15
    assert stepper._captures_update is (schedule != "OneCycleLR")


def test_an_optimizer_that_is_fused_already_is_captured_simulated(graphs, tmp_path):
    """torch captures fused kernels only with capturable=True, which changes no bits."""
    results = []
    for graph in ("on", "off"):
        model, optimizer = train(
            tmp_path / graph, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), overrides={"graph": graph}
        )
        results.append(model.state_dict())
        assert setting_of(tmp_path / graph, "graph")["value"] == graph
        assert setting_of(tmp_path / graph, "optimizer_kernels")["value"] == "fused", "yours: not in the graph"
        assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["capturable"]) == (True, False)
    assert_same(*results)


def test_a_run_leaves_the_update_of_rmsprop_out_of_its_graphs_simulated(graphs, tmp_path):
    results = []
    for graph in ("on", "off"):
        model, _ = train(tmp_path / graph, torch.optim.RMSprop, schedule=one_cycle_of_rates, overrides={"graph": graph})
        results.append((losses_of(tmp_path / graph), model.state_dict()))
        assert setting_of(tmp_path / graph, "graph")["value"] == graph
        assert setting_of(tmp_path / graph, "optimizer_kernels")["value"] == "yours"
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])


def one_cycle_of_rates(optimizer):
    return OneCycleLR(optimizer, max_lr=1e-2, total_steps=24, cycle_momentum=False)


def test_the_first_steps_decide_whether_steps_are_captured_simulated(graphs, monkeypatch, tmp_path):
    overrides = {"graph": "launch_bound"}
    launch_bound, _ = train(tmp_path / "host", torch.optim.AdamW, overrides=overrides)
    assert setting_of(tmp_path / "host", "graph")["value"] == "on"
    # Simulated: the device computes for a long time after all kernels are launched.
    monkeypatch.setattr(CpuDevice, "sync", lambda _: time.sleep(0.3))
    busy, _ = train(tmp_path / "device", torch.optim.AdamW, overrides=overrides)
    setting = setting_of(tmp_path / "device", "graph")
    assert setting["value"] == "off"
    assert "the device is busy" in setting["reason"]
    assert_same(busy.state_dict(), launch_bound.state_dict())


def test_all_optimizers_return_to_their_own_kernels_together(tmp_path):
    """A resume follows the plan, which has one setting for all of them."""
    first, second = make_net(), make_net()
    second[0].bias.requires_grad_(False)
    own = {name: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for name, m in (("a", first), ("b", second))}
    with whet.Session(
        [first, second], own, rows(64), global_batch_size=8, run=tmp_path / "run", device="cpu"
    ) as session:
        for batch in session:
            for name, model in (("a", first), ("b", second)):
                session.step(
                    lambda micro, model=model: functional.cross_entropy(model(micro[0]), micro[1]),
                    batch,
                    optimizer=name,
                )
            assert not any(optimizer.param_groups[0]["fused"] for optimizer in own.values())
    assert setting_of(tmp_path / "run", "optimizer_kernels")["value"] == "yours"


class Doubled(torch.optim.SGD):
    """A subclass whose step does something else, then what its base does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2.0)
        return super().step(closure)


def test_an_update_calls_the_step_of_a_subclass_and_of_a_scheduler():
    weight = nn.Parameter(torch.ones(1))
    optimizer = Doubled([weight], lr=0.25)
    weight.grad = torch.ones(1)
    update(optimizer)
    assert weight.item() == 0.5
    calls = []
    # As torch's schedulers do, which count the steps of an optimizer.
    optimizer.step = lambda: calls.append("step")
    update(optimizer)
    assert calls == ["step"]


@pytest.mark.parametrize("place", ["before", "after", "before all", "after all"])
def test_an_update_runs_hooks(place):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.5)
    weight.grad = torch.ones(1)
    calls = []
    hook = {
        "before": optimizer.register_step_pre_hook,
        "after": optimizer.register_step_post_hook,
        "before all": register_optimizer_step_pre_hook,
        "after all": register_optimizer_step_post_hook,
    }[place](lambda *_: calls.append(place))
    update(optimizer)
    hook.remove()
    assert calls == [place]
    # The watch of a session is no reason to run them: it ignores the optimizers of the session.
    watch = watch_updates(lambda *_: calls.append("watch"))
    update(optimizer)
    watch.remove()
    assert calls == [place]


def test_a_profiler_sees_the_label_of_an_update():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        update(optimizer)
    assert any(event.key == "Optimizer.step#AdamW.step" for event in profile.key_averages())


def test_an_update_without_hooks_has_the_same_bits(monkeypatch):
    def trained():
        model = make_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x, y = rows(8)
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            update(optimizer)
        return model

    short = trained()
    monkeypatch.setattr("whet.step.optimizer_kernels._HOOKED_STEP", None)
    assert_same(trained().state_dict(), short.state_dict())
