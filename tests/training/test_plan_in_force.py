"""A run executes what its plan says, also where the environment has decided."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import whet
from small_models import convnet, images
from whet.base.errors import UsageError
from whet.device.open import current_machine
from whet.machine.known import load_machine
from whet.plan.plan import make_plan, read_plan, with_more_facts, with_runtime_changes, with_smaller_micro_batch
from whet.plan.setting import MeasuredSetting
from whet.plan.workload import Workload
from whet.run.folder import open_run
from whet.step.optimizers import OptimizerChoice
from whet.training.callback import Callback
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config
from whet.training.workload import describe_workload

pytestmark = pytest.mark.torch


class Observer(Callback):
    """Keeps the plan, and what is in force in a step."""

    def on_start(self, run: Any) -> None:
        self.plan = run.plan

    def before_step(self, state: Any) -> None:
        self.threads = torch.get_num_threads()
        self.is_deterministic = torch.are_deterministic_algorithms_enabled()


def observe(run: Path | None = None, *, max_steps: int = 2, on_event: Any = None, **overrides: Any) -> Observer:
    torch.manual_seed(0)
    model, observer = convnet(), Observer()
    whet.train(
        model,
        images(16, seed=0),
        loss=lambda micro: torch.nn.functional.cross_entropy(model(micro.x), micro.y),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch_size=8,
        max_steps=max_steps,
        epochs=9,
        measure=False,
        on_event=on_event,
        device="cpu",
        run=run,
        overrides={"micro_batch": 8, **overrides},
        callbacks=[observer],
    )
    return observer


def test_the_threads_of_the_environment_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        monkeypatch.setenv("OMP_NUM_THREADS", str(number))
        seen = observe()
        setting = seen.plan.settings["threads"]
        assert (setting.value, setting.source, seen.threads) == (number, "environment", number)
    assert observe(threads=1).threads == 1, "the user's override wins"


def test_deterministic_kernels_that_are_on_stay_on_and_are_planned() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        seen = observe()
        assert (seen.plan.deterministic, seen.plan.settings["deterministic"].source) == ("on", "environment")
        assert seen.is_deterministic
        off = observe(deterministic="off")
        assert (off.plan.deterministic, off.is_deterministic) == ("off", False)
        assert torch.are_deterministic_algorithms_enabled(), "restored"
    finally:
        torch.use_deterministic_algorithms(before)
    assert observe().plan.settings["deterministic"].source == "rule"


def test_a_compiler_that_is_disabled_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert observe().plan.settings["compile"].source == "environment"
    with pytest.raises(UsageError, match="compile is fixed by the environment"):
        observe(compile="on")


def test_a_resumed_run_shows_what_is_in_force_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    assert observe(tmp_path / "run").plan.settings["compile"].source == "rule"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert observe(tmp_path / "run", max_steps=4).plan.settings["compile"].source == "environment"
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    assert observe(tmp_path / "run", max_steps=6).plan.settings["compile"].source == "rule"


@pytest.mark.parametrize("name", ["accumulation", "gradient_accumulation_steps"])
def test_accumulation_follows_from_the_micro_batch(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not a setting") as refused:
        observe(tmp_path / "run", **{name: 4})
    assert "global_batch_size / micro_batch" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_an_override_without_effect_is_in_the_warnings_and_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = observe(tmp_path / "run", on_event="line", mps_fallback="on")
    assert "mps_fallback: your on has no effect: only MPS has it" in capsys.readouterr().err
    assert seen.plan.mps_fallback == "off"
    assert any("your on has no effect" in line for line in whet.summarize(tmp_path / "run").warnings)
    assert observe(tmp_path / "run", max_steps=4, mps_fallback="on").plan.mps_fallback == "off", "the same call resumes"


@pytest.mark.parametrize("split_batch", ["auto", False, True])
def test_a_micro_batch_with_batchnorm_is_executed_or_refused(split_batch: Any, tmp_path: Path) -> None:
    x, y = images(32, seed=0)
    sizes: list[int] = []
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(x[0].numel()), torch.nn.LazyLinear(10))
    model(x)

    def loss(batch: Any) -> torch.Tensor:
        sizes.append(len(batch[1]))
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def train() -> Any:
        observer = Observer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: Any = {"global_batch_size": 16, "split_batch": split_batch, "overrides": {"micro_batch": 4}}
        keywords: Any = {"run": tmp_path / "run", "callbacks": [observer], "on_event": None, "measure": False}
        whet.train(model, (x, y), loss=loss, optimizer=optimizer, **options, **keywords)
        return observer.plan

    if split_batch is True:
        plan = train()
        assert (plan.micro_batch, set(sizes)) == (4, {4})
        assert any("BatchNorm" in line for line in plan.warnings)
    else:
        with pytest.raises(UsageError, match="micro_batch=4 would change what is trained"):
            train()
        assert not (tmp_path / "run").exists()


def test_changes_at_run_time_survive_a_loss_that_needs_the_whole_batch(tmp_path: Path) -> None:
    """A second loss makes a new plan. The settings that are in force, and those of evaluation, stay as they are."""
    torch.manual_seed(0)
    model, (x, y) = convnet(), images(32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changes = {"graph": "off", "optimizer_kernels": "yours", "precision": "fp32", "eval_batch": 3, "lengths": "fixed"}

    def mean(batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def largest(batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none").max()

    overrides = {"precision": "bf16", "graph": "on"}
    keywords: Any = {"measure": False, "on_event": None, "device": "cpu", "overrides": overrides}
    with whet.Session(
        model, optimizer, (x, y), global_batch_size=16, epochs=3, run=tmp_path / "run", **keywords
    ) as session:
        for number, batch in enumerate(session):
            if number == 1:
                session.run.use_plan(
                    with_runtime_changes(
                        with_smaller_micro_batch(session.plan, 4, reason="memory ran out", problem="for this test"),
                        {name: MeasuredSetting(value=v, reason="test", evidence={}) for name, v in changes.items()},
                    )
                )
            session.step(mean if number < 2 else largest, batch)
            if number == 2:
                assert session.plan.workload.split_obstacle is not None
                assert session.plan.micro_batch == 16, "the step was not split, so the plan must not say that it was"
                break
    saved = read_plan(open_run(tmp_path / "run").plan, where="the test")
    for plan in (session.plan, saved):
        assert {name: plan.settings[name].value for name in changes} == changes


def test_a_measured_micro_batch_gives_way_to_whole_batches() -> None:
    measured = {"micro_batch": MeasuredSetting(value=4, reason="fastest", evidence={})}
    workload = Workload(recipe="test", num_parameters=1_000, global_batch_size=16, max_length=1)
    plan = make_plan(load_machine("linux-2core"), workload, measured=measured)
    assert (plan.micro_batch, with_more_facts(plan, {"split_obstacle": "a maximum"}, is_started=True).micro_batch) == (
        4,
        16,
    )


def test_memory_per_sample_decides_again_only_what_is_not_in_force_yet() -> None:
    workload = Workload(recipe="test", num_parameters=1_000, global_batch_size=64, max_length=1)
    machine = load_machine("m2-air-8gb")
    plan = with_smaller_micro_batch(make_plan(machine, workload), 4, reason="memory ran out", problem="for this test")
    plan = with_runtime_changes(plan, {"precision": MeasuredSetting(value="fp32", reason="wrong", evidence={})})
    for activation_bytes, expected in ((1, 4), (2**31, 2)):
        again = with_more_facts(plan, {"activation_bytes": activation_bytes}, is_started=False)
        assert again.workload.activation_bytes == activation_bytes
        assert again.micro_batch == expected, "at most what fitted, and at most what is predicted to fit"
        assert again.precision == "fp32"


def test_measured_steps_run_under_the_settings_of_training() -> None:
    """Deterministic kernels and explicit masks hold in measured steps, in the first loss and in trained steps."""
    torch.manual_seed(0)
    model, data = convnet(), images(16, seed=0)
    overrides = {"deterministic": "on", "causal_mask": "explicit", "micro_batch": 8}
    flag, in_force = functional.scaled_dot_product_attention, list[tuple[bool, Any]]()

    def loss(batch: Any) -> torch.Tensor:
        in_force.append((torch.are_deterministic_algorithms_enabled(), functional.scaled_dot_product_attention))
        return functional.cross_entropy(model(batch[0]), batch[1])

    training = parse_training_config({"global_batch_size": 8})
    machine, system_state = current_machine()
    workload = describe_workload(model, data, training, recipe="net")
    plan = make_plan(machine, workload, overrides={**overrides, "device": "cpu"}, system_state=system_state)
    with LocalStepBench(model, OptimizerChoice(), data, training, loss=loss, plan=plan) as bench:
        in_force.clear()
        bench.first_loss()
        prepared = bench.prepare({}, seconds=60.0)
        prepared.step(0)
        prepared.close()
    measured = set(in_force)
    in_force.clear()
    keywords: Any = {"global_batch_size": 8, "measure": False, "on_event": None, "device": "cpu"}
    whet.train(model, data, loss=loss, optimizer=OptimizerChoice(), max_steps=2, overrides=overrides, **keywords)
    assert measured == {in_force[-1]}, "also the same function: another one would be compiled again"
    ((is_deterministic, attention),) = measured
    assert is_deterministic
    assert attention is not flag
    assert functional.scaled_dot_product_attention is flag
    assert not torch.are_deterministic_algorithms_enabled()
