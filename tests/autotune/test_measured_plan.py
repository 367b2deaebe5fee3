"""Measured plans: evidence, the cache, and training that is unchanged by measuring."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import whet
from whet.autotune.process_bench import ProcessStepBench
from whet.autotune.result import TuningResult
from whet.base.errors import UsageError
from whet.plan.setting import MeasuredSetting
from whet.recipes import runner
from whet.run.events import History
from whet.step.optimizers import OptimizerChoice
from whet.training import auto_batch_size, tune
from whet.training.measurement import MeasurementStoppedError

pytestmark = pytest.mark.torch

TRAINING = {"global_batch_size": 32, "epochs": 10, "clip": 1.0}


def a_model(*, dropout: float = 0.0):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 5)
    )


def some_data(num_samples: int = 160):
    drawn = torch.Generator().manual_seed(2)
    return torch.randn(num_samples, 64, generator=drawn), torch.randint(0, 5, (num_samples,), generator=drawn)


ONE_THREAD = {"threads": 1}
"""On busy cores, a step with two threads takes a hundred times as long and uses up a small budget."""


class Loss:
    """Counts its calls."""

    def __init__(self, model):
        self.model, self.calls = model, 0

    def __call__(self, micro):
        self.calls += 1
        return functional.cross_entropy(self.model(micro.x), micro.y)


def losses_of(run):
    return [event.get("loss") for event in History(whet.open_run(run)).events(kinds=("step",))]


TUNING_KINDS = ("tuning", "measuring", "estimate")


@pytest.fixture(autouse=True)
def a_home_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    # Otherwise a busy machine adds messages.
    monkeypatch.setattr(tune, "_SILENT_SECONDS", math.inf)


def a_session(model, *, logged=None, **changes):
    return whet.Session(
        model,
        OptimizerChoice(lr=1e-3),
        some_data(),
        on_event=None
        if logged is None
        else lambda kind, fields: logged.append(fields["message"]) if kind in TUNING_KINDS else None,
        **{"overrides": ONE_THREAD} if "plan" not in changes and "overrides" not in changes else {},
        **{**TRAINING, "epochs": 100_000, **changes},
    )


def test_tune_returns_a_plan_with_trials_and_keeps_the_model_unchanged():
    model = a_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = whet.tune(
        model, some_data(), loss=Loss(model), optimizer=OptimizerChoice(), overrides=ONE_THREAD, budget=6, **TRAINING
    )
    assert plan.trials
    assert {trial.setting for trial in plan.trials} & {"precision", "micro_batch"}
    measured = [name for name, setting in plan.settings.items() if setting.source == "measured"]
    assert measured
    for name in measured:
        assert plan.settings[name].evidence["verdict"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_overrides_are_never_tried():
    model = a_model()
    overrides = {"micro_batch": 16, "threads": 1, "precision": "fp32"}
    plan = whet.tune(
        model, some_data(), loss=Loss(model), optimizer=OptimizerChoice(), overrides=overrides, budget=4, **TRAINING
    )
    assert not {trial.setting for trial in plan.trials} & set(overrides)
    assert {name: plan.settings[name].value for name in overrides} == overrides


def test_measured_plan_trains_like_the_same_overrides(tmp_path):
    """Fifty losses are equal bit for bit, with settings that differ from the rules."""
    actual = {"micro_batch": 8, "optimizer_kernels": "foreach", "threads": 1}
    model = a_model(dropout=0.1)
    by_rules = whet.tune(model, some_data(), loss=Loss(model), optimizer=OptimizerChoice(), budget=1, **TRAINING)
    plan = whet.make_plan(
        by_rules.machine,
        by_rules.workload,
        system_state=by_rules.system_state,
        measured={name: MeasuredSetting(value=value, reason="tried", evidence={}) for name, value in actual.items()},
    )
    by_hand = {"overrides": actual}
    for run, how in {"measured": {"plan": plan}, "by hand": by_hand}.items():
        model = a_model(dropout=0.1)
        whet.train(
            model, some_data(), loss=Loss(model), optimizer=OptimizerChoice(lr=1e-3), on_event=None,
            run=tmp_path / run, **how, **TRAINING,
        )  # fmt: skip
    measured, given = losses_of(tmp_path / "measured"), losses_of(tmp_path / "by hand")
    assert len(measured) == 50
    assert measured == given


def test_measured_plan_trains_like_the_rules_up_to_rounding(tmp_path):
    actual = {"micro_batch": 8, "optimizer_kernels": "loop", "threads": 1}
    for run, overrides in {"rules": {}, "measured": actual}.items():
        model = a_model()
        whet.train(
            model, some_data(), loss=Loss(model), optimizer=OptimizerChoice(lr=1e-3), on_event=None,
            run=tmp_path / run, overrides=overrides, measure=False, **TRAINING,
        )  # fmt: skip
    rules, measured = torch.tensor(losses_of(tmp_path / "rules")), torch.tensor(losses_of(tmp_path / "measured"))
    assert len(rules) == 50
    assert float(((rules - measured).abs() / rules).max()) <= 1e-5


def test_long_run_is_measured_once_and_cached(monkeypatch):
    monkeypatch.setattr(tune, "budget_seconds", lambda _: 6.0)
    # Independent of the load of the test machine.
    monkeypatch.setattr(TuningResult, "is_reusable", True)
    logged: list[str] = []
    session = a_session(a_model(), logged=logged)
    session.config = tune.with_measured_plan(session.config, Loss(session.model))
    assert logged[0].startswith("about ")
    assert logged[1].startswith("measuring which plan is fastest, 6.0 s at most; this run would take about ")
    assert any("trials in" in line for line in logged)
    plan = session.config.plan
    assert plan.trials

    logged.clear()
    again = a_session(a_model(), logged=logged)
    loss = Loss(again.model)
    again.config = tune.with_measured_plan(again.config, loss)
    assert loss.calls == 0
    assert logged[0].startswith("measured before on this machine: ")
    assert again.config.plan.trials == plan.trials

    logged.clear()
    # Whether it is measured, not what is found.
    monkeypatch.setattr(tune, "MIN_BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(tune, "budget_seconds", lambda _: 0.5)
    other = a_session(a_model(), logged=logged, global_batch_size=16)
    other.config = tune.with_measured_plan(other.config, Loss(other.model))
    assert logged[1].startswith("measuring")


def test_slow_steps_before_the_measurement_are_reported(monkeypatch):
    monkeypatch.setattr(tune, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(tune, "steps_per_visit", lambda _: 1)
    logged: list[str] = []
    session = a_session(a_model(), logged=logged, epochs=40)
    tune.with_measured_plan(session.config, Loss(session.model))
    assert logged[:2] == [f"timing steps before the start, {done} done" for done in (0, 1)]


def test_pauses_of_a_busy_core_count_in_the_estimate_of_a_tiny_model():
    """A step takes 0.2 ms, and every 20th is interrupted for 4 ms, which is half of the time."""

    class Paused:
        preparation_seconds, step_seconds, num_steps = 0.0, 0.0002, 0

        def step(self, _index):
            self.num_steps += 1
            return 0.0042 if self.num_steps % 20 == 0 else 0.0002

        def close(self):
            pass

    class Bench:
        prepared = Paused()

        def prepare(self, _settings, *, seconds):
            return self.prepared

        def clock(self):
            return 0.0

    bench = Bench()
    _, seconds = tune._time_steps(bench, None)
    assert seconds == pytest.approx(0.0004)
    assert 500 <= bench.prepared.num_steps <= 1_000


def test_short_run_reports_that_it_is_not_measured():
    logged: list[str] = []
    session = a_session(a_model(), logged=logged, epochs=40)
    session.config = tune.with_measured_plan(session.config, Loss(session.model))
    assert session.config.plan is None
    assert logged[0].startswith(("about ", "less than a second"))
    assert logged[0].endswith(", too short to measure which settings are fastest")


@pytest.mark.parametrize(("kind", "expected"), [("cuda", (6.0, 14.0)), ("cpu", (6.0, 0.0))])
def test_run_of_three_minutes_may_compile_on_a_gpu(monkeypatch, kind, expected):
    """Simulated: the plan is for a GPU."""
    searched: list[dict[str, object]] = []

    def search(_config, _loss, _plan, **options):
        searched.append(options)
        return TuningResult(summary=("nothing",))

    monkeypatch.setattr(tune, "device_kind", lambda _: kind)
    monkeypatch.setattr(tune, "_time_steps", lambda *_: (200.0, 0.0))
    monkeypatch.setattr(tune, "_search", search)
    logged: list[str] = []
    session = a_session(a_model(), logged=logged, epochs=40)
    tune.with_measured_plan(session.config, Loss(session.model))
    ((budget, compiling),) = [(options["budget"], options["compile_budget"]) for options in searched]
    assert (budget, compiling) == pytest.approx(expected)
    assert ("and 14 s to compile" in logged[1]) == (kind == "cuda")


def test_run_of_a_minute_says_what_tuning_could_try(monkeypatch):
    monkeypatch.setattr(tune, "_time_steps", lambda *_: (0.0, 61.0 / 160))
    logged: list[str] = []
    session = a_session(a_model(), logged=logged, epochs=40)
    assert session.config.training.total_steps(4) == 160
    tune.with_measured_plan(session.config, Loss(session.model))
    assert ", too short to measure which settings are fastest; whet.tune could try bf16 and compile: up to" in logged[0]


def test_ctrl_c_while_a_recipe_is_measured_returns_a_result(monkeypatch, tmp_path):
    def interrupt(*_, **__):
        raise MeasurementStoppedError("stopped by Ctrl-C while measuring")

    monkeypatch.setattr(runner, "train_recipe", interrupt)
    result = whet.train("text", run=tmp_path / "run", on_event=None)
    assert (result.state, result.step, result.exit_code, result.path) == ("stopped", 0, 130, None)


@pytest.mark.parametrize("where", ["prepare", "search", "batch size"])
def test_ctrl_c_while_measuring_says_that_nothing_was_lost(monkeypatch, tmp_path, where):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    places = {
        "prepare": (tune.LocalStepBench, "prepare"),
        "search": (tune, "_search"),
        "batch size": (auto_batch_size, "measure_batch_size"),
    }
    monkeypatch.setattr(*places[where], interrupt)
    messages = []
    model, (x, y) = a_model(), some_data()
    result = whet.train(
        model,
        (x, y),
        loss=functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        run=tmp_path / "run",
        on_event=lambda kind, fields: messages.append(fields.get("message")) if kind == "stopping" else None,
        **{**TRAINING, "epochs": 10**6, **({"global_batch_size": "auto"} if where == "batch size" else {})},
    )
    assert messages == ["stopped by Ctrl-C while measuring: nothing was trained and nothing was written"]
    assert (result.state, result.step, result.exit_code, result.reason) == ("stopped", 0, 130, messages[0])
    assert not (tmp_path / "run").exists()


def test_a_run_that_may_not_be_measured_says_what_measuring_could_try():
    logged: list[str] = []
    tune.report_unmeasured(a_session(a_model(), logged=logged, epochs=10_000).config)
    assert len(logged) == 1
    assert logged[0].startswith("not measured: measure=False; whet.tune could try bf16 and compile: up to 4 minutes")
    tune.report_unmeasured(a_session(a_model(), logged=logged, epochs=10).config)
    fixed = {"precision": "fp32", "compile": "off"}
    tune.report_unmeasured(a_session(a_model(), logged=logged, epochs=10_000, overrides=fixed).config)
    assert len(logged) == 1


def test_very_short_runs_and_streams_are_not_measured():
    session = a_session(a_model(), epochs=10)
    loss = Loss(session.model)
    session.config = tune.with_measured_plan(session.config, loss)
    assert loss.calls == 0

    reads = itertools.count()
    stream = ({"x": torch.randn(64), "y": torch.tensor(0), "n": torch.tensor(next(reads))} for _ in range(10**6))
    model = a_model()
    session = whet.Session(model, OptimizerChoice(), stream, global_batch_size=8, max_steps=1000)
    session.config = tune.with_measured_plan(session.config, loss)
    assert next(reads) == 0
    with pytest.raises(UsageError, match="an iterable dataset cannot be used for measuring"):
        whet.tune(model, stream, loss=loss, optimizer=OptimizerChoice(), global_batch_size=8, max_steps=1000)


def test_run_starts_although_the_measuring_process_died(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "budget_seconds", lambda _: 6.0)
    logged: list[str] = []
    model = a_model()
    result = whet.train(
        model,
        some_data(),
        loss=Loss(model),
        optimizer=OptimizerChoice(),
        on_event=lambda kind, fields: logged.append(str(fields.get("message"))),
        open_bench=lambda: ProcessStepBench("no.such.module:bench", {}, environment={}),
        run=tmp_path / "run",
        **{**TRAINING, "epochs": 30},
    )
    assert result.state == "done"
    assert any(line.startswith("not measured: the measuring process could not start") for line in logged)


def test_run_starts_although_measuring_failed():
    logged: list[str] = []
    model = a_model()
    loss = Loss(model)

    def fails_at_first(micro):
        actual = loss(micro)
        # Later than the first checks of the loss, which take a failure as an answer.
        if loss.calls == 8:
            raise KeyError("only now")
        return actual

    result = whet.train(
        model,
        some_data(),
        loss=fails_at_first,
        optimizer=OptimizerChoice(),
        on_event=lambda kind, fields: logged.append(str(fields.get("message"))),
        **{**TRAINING, "epochs": 30},
    )
    assert result.state == "done"
    assert "not measured: KeyError: 'only now'" in logged


def test_plan_for_another_workload_is_rejected(tmp_path):
    model = a_model()
    plan = whet.tune(model, some_data(), loss=Loss(model), optimizer=OptimizerChoice(), budget=1, **TRAINING)
    with (
        pytest.raises(UsageError, match="made for a different workload"),
        a_session(model, plan=plan, global_batch_size=8),
    ):
        pass
    with pytest.raises(UsageError, match="already contains its overrides"):
        a_session(model, plan=plan, overrides={"threads": 1})
    for budget in (0, -1, "much"):
        with pytest.raises(UsageError, match="budget must be above 0"):
            whet.tune(model, some_data(), loss=Loss(model), optimizer=OptimizerChoice(), budget=budget, **TRAINING)
