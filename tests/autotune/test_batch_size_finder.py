"""The batch size finder on simulated machines: its choice, its cost and its progress reports."""

import math

import pytest

from simulated_step_bench import SimulatedStepBench, gaussian, heavy_tailed, landscape
from whet.autotune.batch_size import (
    batch_sizes_to_try,
    choose_batch_size,
    describe_scaling,
    lr_scaling,
    measure_batch_sizes,
)
from whet.autotune.search import search
from whet.autotune.step_bench import TuningProgress
from whet.autotune.sweeps import batch_sizes_to_sweep
from whet.base.errors import UsageError, WhetError
from whet.config.options import CommonConfig
from whet.config.resolve import resolve_config
from whet.machine.known import load_machine
from whet.plan.plan import make_plan, read_plan, with_auto_batch
from whet.plan.render import explain_setting, plan_lines
from whet.plan.workload import AutoBatch
from whet.recipes.text.config import TextConfig, describe

TEXT = describe(TextConfig()).model_copy(update={"num_samples": 40_000, "num_steps": 3_750, "mean_length": 46.0})
MACHINE = load_machine("linux-2core")


def simulated_bench(seconds, *, samples: int | None = 40_000, **more) -> SimulatedStepBench:
    plan = make_plan(MACHINE, TEXT.model_copy(update={"num_samples": samples}))
    return SimulatedStepBench(plan, lambda plan: seconds(plan.workload.global_batch_size), **more)


def saturating(at: int):
    """Return step times with a fixed launch cost plus a cost per sample; the rate saturates around `at` samples."""
    return lambda batch: 0.001 * (at + batch) / 100


def chosen(bench: SimulatedStepBench, *, budget: float = 20.0, watch=None) -> AutoBatch:
    return choose_batch_size(bench, base_rates=[1e-3], scaling="square root", budget_seconds=budget, on_progress=watch)


@pytest.mark.parametrize(("at", "expected"), [(4, 32), (50, 256), (120, 1024)])
def test_finds_the_saturating_batch_size_of_a_simulated_curve(at: int, expected: int) -> None:
    bench = simulated_bench(saturating(at), noise=gaussian(0.02), batch_spread=0.05)
    result = chosen(bench)
    # Near saturation a doubling gains a tenth, so noise may move the choice by one size.
    assert expected / 2 <= result.batch <= expected * 2
    assert bench.plan.workload.global_batch_size == result.batch
    assert bench.alive == 0
    assert result.rates[0] == pytest.approx(1e-3 * math.sqrt(result.batch / 32))
    assert len(result.points) >= 3
    assert all(point.steps >= 8 for point in result.points if point.samples_per_second), "where there is time for them"
    assert [point.batch for point in result.points] == sorted(point.batch for point in result.points)


def test_smallest_batch_wins_if_all_simulated_sizes_are_equally_fast() -> None:
    result = chosen(simulated_bench(lambda batch: batch / 1000, noise=gaussian(0.01), batch_spread=0.02))
    assert result.batch == 8
    assert result.rates[0] == pytest.approx(5e-4)
    assert result.lines[0].startswith("global batch 8: the smallest within 10 % of the fastest")


def test_hiccups_of_a_simulated_machine_do_not_end_the_search_early() -> None:
    batches = [chosen(simulated_bench(saturating(200), noise=heavy_tailed, seed=seed)).batch for seed in range(20)]
    assert min(batches) >= 512


def test_one_slow_size_does_not_end_the_simulated_search() -> None:
    result = chosen(simulated_bench(lambda batch: saturating(200)(batch) * (2.5 if batch == 64 else 1)))
    assert result.batch >= 512


def test_drift_of_a_simulated_machine_favors_no_size() -> None:
    steady, drifting = (
        {
            point.batch: point.samples_per_second
            for point in chosen(simulated_bench(saturating(100), noise=noise, batch_spread=0.0), budget=60).points
        }
        for noise in (lambda *_: 1.0, lambda now, _: 1 + 0.2 * now)
    )
    both = sorted({*steady, *drifting})[-3:]
    ratios = [drifting[size] / steady[size] for size in both]
    assert max(ratios) < 1.15 * min(ratios)


@pytest.mark.parametrize("budget", [2.0, 5.0, 20.0])
@pytest.mark.parametrize("step", [0.0005, 0.05, 1.0])
def test_simulated_budget_is_kept_and_a_size_is_found(budget: float, step: float) -> None:
    bench = simulated_bench(
        lambda batch: step * (32 + batch) / 64, noise=gaussian(0.05), preparation=lambda _: 8 * step
    )
    if step == 1.0 and budget < 20:
        # The first steps alone take longer.
        with pytest.raises(WhetError, match="no global batch size could be measured"):
            chosen(bench, budget=budget)
    else:
        assert not [point for point in chosen(bench, budget=budget).points if "timeout" in point.note]
    assert bench.now <= 1.1 * budget


def test_simulated_batch_that_does_not_fit_ends_the_search_with_a_reason() -> None:
    limit = 17 * 1024**3
    bench = simulated_bench(saturating(500), bytes=lambda plan: plan.workload.global_batch_size * limit // 200)
    result = chosen(bench)
    assert result.batch <= 128
    assert max(point.batch for point in result.points) == 256
    assert "256 was not measured: it took" in result.reason
    crash = chosen(
        simulated_bench(saturating(500), failure=lambda p: "oom" if p.workload.global_batch_size > 64 else None)
    )
    assert crash.batch == 64
    assert "128 was not measured: oom" in crash.reason


def test_sizes_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(UsageError, match="known length"):
        chosen(simulated_bench(saturating(50), samples=None))
    with pytest.raises(UsageError, match="too few samples"):
        chosen(simulated_bench(saturating(50), samples=300))
    with pytest.raises(WhetError, match="no global batch size could be measured"):
        chosen(simulated_bench(saturating(50), failure=lambda _: "error"))
    assert batch_sizes_to_try(32, 330) == [8, 16]
    assert batch_sizes_to_try(48, 2_000) == [12, 24, 48, 96]
    assert batch_sizes_to_try(7, 300) == [7, 14]
    assert batch_sizes_to_try(256, 2_000) == [8, 16, 32, 64]


def test_learning_rate_scaling_has_a_reason_and_a_source() -> None:
    assert "Malladi et al. 2022" in describe_scaling((1e-3, 1e-4, 1e-3), before=32, after=64, scaling="square root")
    assert "Goyal et al. 2017" in describe_scaling((0.1,), before=32, after=64, scaling="linear")
    assert describe_scaling((0.1,), before=32, after=32, scaling="linear") == "lr stays 0.1: it is meant for this batch"
    assert lr_scaling("AdamW") == lr_scaling("adafactor") == "square root"
    assert lr_scaling("SGD") == "linear"
    with pytest.raises(UsageError, match="no learning rate scaling rule"):
        lr_scaling("Lion")


def test_plan_keeps_the_measurements_of_its_simulated_batch_size() -> None:
    bench = simulated_bench(saturating(120))
    result = chosen(bench)
    plan = with_auto_batch(bench.plan, result)
    assert read_plan(plan.as_json(), where="here").workload.batch == result
    assert f"global batch {result.batch} (measured)" in "\n".join(plan_lines(plan, width=100))
    why = explain_setting(plan, "global_batch_size")
    assert all(f"{point.batch:,}: " in why for point in result.points)
    assert "Malladi" in why
    assert "a plan never changes it" in explain_setting(bench.plan, "global_batch_size")


def test_auto_needs_a_command_that_measures() -> None:
    with pytest.raises(UsageError, match="has to be measured"):
        resolve_config(CommonConfig, ["global_batch_size=auto"])
    result = resolve_config(CommonConfig, ["batch_size=auto", "lr=0.01"], can_measure=True)
    assert (result.is_batch_open, result.config.global_batch_size, result.given) == (True, 32, ("lr",))
    settled = result.with_batch(chosen(simulated_bench(saturating(50))))
    assert not settled.is_batch_open
    assert settled.config.model_dump()["global_batch_size"] == settled.batch.batch


# --- progress --------------------------------------------------------------------------------------------------------


def test_simulated_search_reports_progress() -> None:
    logged: list[TuningProgress] = []
    plan = make_plan(MACHINE, TEXT)
    times = {("fp32", 32): 0.06, ("bf16", 32): 0.07, ("fp32", 16): 0.07, ("bf16", 16): 0.03}
    bench = SimulatedStepBench(plan, lambda p: times.get((p.precision, p.micro_batch), 0.2))
    search(plan, bench, budget_seconds=60, on_progress=logged.append)
    assert logged[0].message == "measuring: the rules' plan, 0 of 60 s"
    assert any(one.doing == "precision bf16" for one in logged)
    assert any(one.doing == "precision bf16 and micro_batch 16" for one in logged)
    times = [one.spent_seconds for one in logged]
    assert times == sorted(times)
    assert times[-1] <= 60
    # A few times per second, in addition to the starts of trials.
    assert len(logged) < 60 * 4 + len({one.doing for one in logged}) * 10
    assert bench.tick is None


def test_progress_reports_do_not_change_a_simulated_search() -> None:
    plan = make_plan(MACHINE, TEXT)
    result = [
        search(plan, SimulatedStepBench(plan, landscape(5), noise=gaussian(0.03)), budget_seconds=60, on_progress=watch)
        for watch in (None, lambda _: None)
    ]
    assert result[0] == result[1]


def test_all_given_sizes_are_measured_on_a_simulated_machine_and_the_bench_keeps_its_own() -> None:
    bench = simulated_bench(saturating(50), batch_spread=0.0)
    points = measure_batch_sizes(bench, [128, 16, 64], budget_seconds=20)
    assert [point.batch for point in points] == [16, 64, 128]
    assert bench.plan.workload.global_batch_size == 32
    # Visited up, down and up again.
    assert all(point.steps >= 24 for point in points)
    for point in points:
        assert point.samples_per_second == pytest.approx(point.batch / saturating(50)(point.batch), rel=0.01)
        assert point.micro_batch == point.batch
    assert bench.alive == 0


def test_a_simulated_size_without_time_is_a_point_with_its_reason() -> None:
    points = measure_batch_sizes(simulated_bench(saturating(50)), [16, 32, 4096], budget_seconds=1.5)
    assert points[0].samples_per_second
    assert points[-1].note


def test_the_sizes_of_a_sweep_are_given_or_halves_and_doubles() -> None:
    plan = make_plan(MACHINE, TEXT)
    assert batch_sizes_to_sweep(plan, ()) == [8, 16, 32, 64, 128]
    assert batch_sizes_to_sweep(plan, (64, 16, 64)) == [16, 64]
    for values in ((16, "x"), (0,), (True,), (16, 50_000)):
        with pytest.raises(UsageError, match="global batch"):
            batch_sizes_to_sweep(plan, values)
