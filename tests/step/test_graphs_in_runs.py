"""Captured steps in whole runs and in measurements, with graphs simulated on the CPU."""

import functools
import time

import pytest
import torch
from torch.nn import functional

import whet
from captured_steps import Norm, assert_same, mean_loss, plain_loss, rows, waits
from fake_device import SimulatedGraphs
from small_models import convnet, images
from whet.autotune.step_bench import ProbeFailedError
from whet.device.cpu import CpuDevice
from whet.run.events import History
from whet.step import graphs as step_graphs
from whet.step.optimizers import OptimizerChoice
from whet.training.step_bench import LocalStepBench

pytestmark = pytest.mark.torch


@pytest.fixture
def graphs(monkeypatch):
    """Simulated: the CPU captures steps too."""
    monkeypatch.setattr(CpuDevice, "graphs", lambda _: SimulatedGraphs())


def run(path, model=None, *, loss=None, graph="on", overrides=None, on_event=None, **options):
    torch.manual_seed(0)
    model = model or convnet(dropout=0.2)
    whet.train(
        model,
        images(64, seed=0),
        loss=functools.partial(loss or plain_loss, model),
        optimizer=OptimizerChoice(lr=1e-2),
        run=path,
        on_event=on_event,
        measure=False,
        **{
            "device": "cpu",
            "global_batch_size": 12,
            "epochs": 4,
            "ema": True,
            "seed": 1,
            "overrides": {"threads": 1, "micro_batch": 12, "graph": graph, **(overrides or {})},
            **options,
        },
    )
    return model


def losses_of(path):
    return [(e.step, e.fields["loss"]) for e in History(whet.open_run(path)).events(kinds=("step",))]


def changes_of(path):
    events = History(whet.open_run(path)).events(kinds=("plan",))
    return [event.fields["message"] for event in events if "message" in event.fields]


def test_a_run_with_graphs_equals_one_without_and_resumes_bit_for_bit(graphs, tmp_path):
    whole, plain = run(tmp_path / "whole"), run(tmp_path / "plain", graph="off")
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "plain")
    run(tmp_path / "twice", max_steps=9)
    resumed = run(tmp_path / "twice", max_steps=None)
    assert losses_of(tmp_path / "twice") == losses_of(tmp_path / "whole")
    for model in (plain, resumed):
        assert_same(model.state_dict(), whole.state_dict())
    assert not changes_of(tmp_path / "whole")
    phases = {
        phase
        for e in History(whet.open_run(tmp_path / "whole")).events(kinds=("step",))
        for phase in e.fields["seconds"]
    }
    assert "graph" in phases, "nothing was replayed"


def test_an_uncapturable_run_logs_the_reason_once_and_in_its_plan(graphs, tmp_path):
    logged = []
    run(tmp_path / "run", loss=waits, on_event=lambda kind, fields: logged.append((kind, fields)))
    reason = "the step waits for the device, at _local_scalar_dense"
    assert changes_of(tmp_path / "run") == [f"steps are not captured as graphs: {reason}"]
    assert [fields["message"] for kind, fields in logged if kind == "plan"] == changes_of(tmp_path / "run")
    setting = whet.open_run(tmp_path / "run").plan["settings"]["graph"]
    assert (setting["value"], setting["reason"]) == ("off", reason)


def test_a_device_without_graphs_logs_that_and_trains(tmp_path):
    run(tmp_path / "run", max_steps=3)
    assert changes_of(tmp_path / "run") == ["steps are not captured as graphs: cpu cannot capture a step"]


def test_activation_checkpointing_prevents_capture(graphs, tmp_path):
    run(tmp_path / "run", max_steps=3, overrides={"activation_checkpointing": "on"})
    assert "activation checkpointing restores generators" in changes_of(tmp_path / "run")[0]


def test_a_run_with_graphs_rolls_back_from_nan(graphs, tmp_path):
    for graph in ("on", "off"):
        calls = []

        def breaks_once(model, micro, calls=calls):
            calls.append(len(micro.sample_ids))
            return functional.cross_entropy(model(micro.x), micro.y)

        torch.manual_seed(0)
        model = convnet()
        with whet.Session(
            model,
            OptimizerChoice(lr=1e-2),
            images(64, seed=0),
            run=tmp_path / graph,
            device="cpu",
            global_batch_size=16,
            epochs=4,
            seed=1,
            overrides={"threads": 1, "micro_batch": 16, "graph": graph, "checkpoint_steps": 4},
        ) as session:
            has_broken = False
            for batch in session:
                session.step(functools.partial(breaks_once, model), batch)
                if session.state.step == 9 and not has_broken:
                    has_broken = True
                    with torch.no_grad():
                        model[0].weight.fill_(float("nan"))
        assert session.state.step == 16
    events = History(whet.open_run(tmp_path / "on")).events(kinds=("resume", "skip"))
    assert any(event.fields.get("rollback_reason") for event in events)
    assert dict(losses_of(tmp_path / "on")) == dict(losses_of(tmp_path / "off"))


def test_a_wrong_replay_rolls_back_and_the_run_ends_correctly(graphs, tmp_path):
    class Deep:
        factor = 1.0

    finals = []
    for graph in ("on", "off"):
        torch.manual_seed(0)
        model, deep = convnet(), Deep()

        def loss(micro, model=model, deep=deep):
            return functional.cross_entropy(model(micro.x), micro.y) * deep.factor

        with whet.Session(
            model,
            OptimizerChoice(lr=1e-2),
            images(64, seed=0),
            run=tmp_path / graph,
            device="cpu",
            global_batch_size=16,
            epochs=4,
            seed=1,
            overrides={"threads": 1, "micro_batch": 16, "graph": graph, "checkpoint_steps": 3},
        ) as session:
            for batch in session:
                # Changes from the fourth step on, deep in an object: replay 4, of step 5, is checked.
                deep.factor = 2.0 if session.state.step >= 4 else 1.0
                session.step(loss, batch)
        finals.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert "a graph does not see" in changes_of(tmp_path / "on")[0]
    assert_same(finals[0], finals[1])


@pytest.mark.parametrize(
    ("samples", "failing", "reason"),
    [
        (12, [2], "capturing failed: RuntimeError: CUDA out of memory."),
        (4, [1, 2], "memory ran out, and graphs hold some"),
    ],
)
def test_out_of_memory_releases_graphs(graphs, tmp_path, samples, failing, reason):
    """In the capture of a shape that has run, or in both the capture and the run of another one."""
    calls = []

    def hungry(model, micro):
        calls.append(len(micro.sample_ids))
        if calls[-1] == samples and calls.count(samples) in failing:
            raise RuntimeError("CUDA out of memory.")
        return plain_loss(model, micro)

    run(tmp_path / "run", loss=hungry, epochs=1)
    run(tmp_path / "plain", graph="off", epochs=1)
    assert changes_of(tmp_path / "run") == [f"steps are not captured as graphs: {reason}"]
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "plain")


# --- measured ---------------------------------------------------------------------------------------------------------


def a_rig(model, loss, data):
    from whet.device.open import current_machine
    from whet.plan.plan import make_plan
    from whet.training.training_config import parse_training_config
    from whet.training.workload import describe_workload

    training = parse_training_config({"global_batch_size": 16, "epochs": 2, "ema": True})
    machine, system_state = current_machine()
    plan = make_plan(
        machine,
        describe_workload(model, data, training, recipe="net"),
        overrides={"device": "cpu"},
        system_state=system_state,
    )
    return LocalStepBench(model, OptimizerChoice(lr=1e-2), data, training, loss=loss, plan=plan)


def test_a_step_bench_measures_graphs_and_reports_why_it_cannot(graphs):
    model = Norm()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with a_rig(model, mean_loss(model), rows(80)) as rig:
        plain, graphed = rig.prepare({}, seconds=30), rig.prepare({"graph": "on"}, seconds=30)
        for index in range(4):
            assert plain.step(index) > 0
            assert graphed.step(index) > 0
        assert graphed.preparation_seconds > 0
        graphed.close()
        plain.close()
    with a_rig(model, functools.partial(waits, model), rows(80)) as rig:
        with pytest.raises(ProbeFailedError) as failed:
            rig.prepare({"graph": "on"}, seconds=30)
        assert "waits for the device" in failed.value.reason
        assert failed.value.kind == "unsupported"
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize(
    ("graph", "device_seconds", "num_steps", "num_captured"),
    [("launch_bound", 0.15, 4, 0), ("on", 0.15, 7, 1), ("launch_bound", 0.0, 14, 1), ("off", 0.15, 3, 0)],
)
def test_a_step_bench_prepares_slow_steps_with_few_of_them(
    graphs, monkeypatch, graph, device_seconds, num_steps, num_captured
):
    """Simulated: the device computes for a while after the launches. Four steps show that capturing would not pay."""
    # Simulated replays take as long as eager steps.
    monkeypatch.setattr(step_graphs, "_MAX_REPLAY_RATIO", 1e9)
    monkeypatch.setattr(CpuDevice, "sync", lambda _: time.sleep(device_seconds))
    model = Norm()
    with a_rig(model, mean_loss(model), rows(80)) as rig:
        prepared = rig.prepare({"graph": graph, "micro_batch": 16}, seconds=60)
        assert prepared._number <= num_steps
        stepper = prepared._built.stepper
        decided = {"off": None, "on": True, "launch_bound": num_captured > 0}[graph]
        assert prepared.launches.is_captured is decided
        assert (prepared.launches.share is not None) == (graph == "launch_bound")
        assert (prepared.launches.obstacle or "").startswith("launching kernels") == (decided is False)
        assert getattr(stepper, "num_captured", 0) == num_captured
        if num_captured:
            assert stepper.num_replays >= 5
            # Timed steps are not compared with eager ones, as hardly any step of a run is.
            compared = []
            monkeypatch.setattr(stepper, "_check_loss", lambda *_: compared.append(1))
            for index in range(12):
                prepared.step(index)
            assert not compared
        prepared.close()


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_graphs_that_are_slower_than_eager_steps_are_given_up(graphs, monkeypatch, tmp_path, seconds):
    """Simulated: the kernels of a replay take longer than those of eager steps, as a ViT's did on an H200."""
    # The machine may be busy. Without the delay, replays and eager steps take a few milliseconds.
    monkeypatch.setattr(step_graphs, "_MAX_REPLAY_RATIO", 3.0 if seconds else 1e9)
    capture = SimulatedGraphs.capture

    def slow(self, work):
        replay, made = capture(self, work)
        return (lambda: (time.sleep(seconds), replay())), made

    monkeypatch.setattr(SimulatedGraphs, "capture", slow)
    eager, timed = run(tmp_path / "eager", graph="off"), run(tmp_path / "timed", graph="launch_bound")
    plan = whet.open_run(tmp_path / "timed").plan["settings"]["graph"]
    assert plan["value"] == ("off" if seconds else "on")
    assert ("times as long as an eager one" in plan["reason"]) == bool(seconds)
    assert_same(eager.state_dict(), timed.state_dict())


def test_a_step_bench_measures_eager_steps_where_graphs_are_slower(graphs, monkeypatch):
    """Simulated: the kernels of a replay take longer. The search must not take the steps that it times for captured."""
    monkeypatch.setattr(step_graphs, "_MAX_REPLAY_RATIO", 3.0)
    capture = SimulatedGraphs.capture

    def slow(self, work):
        replay, made = capture(self, work)
        return (lambda: (time.sleep(0.3), replay())), made

    monkeypatch.setattr(SimulatedGraphs, "capture", slow)
    model = Norm()
    with a_rig(model, mean_loss(model), rows(80)) as rig:
        prepared = rig.prepare({"graph": "launch_bound", "micro_batch": 16}, seconds=60)
        assert prepared.launches.is_captured is False
        assert "times as long as an eager one" in prepared.launches.obstacle
        prepared.close()
        assert "times as long as an eager one" in prepared.launches.obstacle, "also after the measurement"


def test_captures_count_once_as_preparation(graphs, monkeypatch):
    """Simulated: a capture takes long. Whether it happens in the first steps or after them, it is counted once."""
    capture = SimulatedGraphs.capture
    monkeypatch.setattr(SimulatedGraphs, "capture", lambda self, work: time.sleep(0.5) or capture(self, work))
    model = Norm()
    with a_rig(model, mean_loss(model), rows(80)) as rig:
        prepared = rig.prepare({"graph": "on", "micro_batch": 16}, seconds=60)
        assert 0.5 <= prepared.preparation_seconds < 0.95
        prepared.close()


def test_devices_without_graphs_return_none():
    assert CpuDevice().graphs() is None
