"""Benchmarks on simulated benches: ratios under drift, budgets, failures as rows, tables and the picture."""

import math
import random
import xml.etree.ElementTree as ET

import pytest

from simulated_benchmark import GB, WORKLOAD, SimulatedSweepBench
from whet.autotune.benchmark import BenchmarkContext, disturbances, measure_sweep
from whet.autotune.statistics import StepTimings, median_interval
from whet.autotune.step_bench import ProbeFailedError
from whet.autotune.sweeps import Variant, plain_loop, select_sweeps, sweep_variants
from whet.base.errors import UsageError
from whet.machine.facts import SystemState
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.report import bench_report
from whet.report.bench_report import bench_chart
from whet.report.svg import ChartPanel, ChartPoint, draw_chart, round_ticks
from whet.run.bench_result import BenchInterval, BenchResult, BenchRow, BenchSweep


def micro(plan) -> int:
    return plan.micro_batch


def by_micro_batch(plan, now) -> float:
    """Smaller micro-batches take longer; 0.1 s for all 32 samples."""
    return 0.1 * (1 + (32 / micro(plan) - 1) / 4)


def swept(bench: SimulatedSweepBench, setting: str = "micro_batch", *, seconds: float = 300.0, **changes):
    table = BenchmarkContext(bench=bench, rule_plan=bench.plan, own={}, **changes)
    return table, measure_sweep(table, setting, sweep_variants(bench.plan, {}, setting), until=bench.clock() + seconds)


def result(sweep: BenchSweep, *, plan=None, **changes) -> BenchResult:
    plan = plan or make_plan(load_machine("linux-2core"), WORKLOAD)
    known = {
        "created": "2026-11-15",
        "machine": plan.machine.model_copy(update={"name": "this machine", "origin": "probed"}),
        "workload": WORKLOAD,
        "plan": {name: setting.value for name, setting in plan.settings.items()},
        "limit_bytes": 4 * GB,
        "budget_seconds": 60.0,
        "spent_seconds": 30.0,
        "sweeps": (sweep,),
    }
    return BenchResult(**{**known, **changes})


# --- measuring -------------------------------------------------------------------------------------------------------


def test_sweep_measures_simulated_ratios_with_two_prepared_settings_at_most():
    bench = SimulatedSweepBench(seconds=by_micro_batch, memory=lambda plan: micro(plan) * 2**25)
    _, sweep = swept(bench)
    assert [row.value for row in sweep.rows] == [1, 2, 4, 8, 16, 32]
    for row in sweep.rows:
        expected = 0.1 / (0.1 * (1 + (32 / row.value - 1) / 4))
        assert row.samples_per_second.median == pytest.approx(320 * expected)
        assert row.is_plan or row.speedup.median == pytest.approx(expected)
        assert row.peak_bytes == row.value * 2**25
    assert [row.is_plan for row in sweep.rows] == [False] * 5 + [True]
    assert bench.most_alive == 2
    assert bench.alive == 0


def test_ratios_hold_while_a_simulated_machine_slows_down():
    noise = random.Random(0)
    bench = SimulatedSweepBench(
        seconds=lambda plan, now: by_micro_batch(plan, now) * (1 + now / 60) * math.exp(noise.gauss(0, 0.02))
    )
    table, sweep = swept(bench)
    for row in sweep.rows[:-1]:
        expected = 1 / (1 + (32 / row.value - 1) / 4)
        assert row.speedup.low <= expected * 1.03
        assert row.speedup.high >= expected * 0.97
        # The chart must not depend on which variant ran while the machine was cool.
        plan_rate = sweep.rows[-1].samples_per_second.median
        assert row.samples_per_second.median == pytest.approx(plan_rate * row.speedup.median)
    words = " ".join(disturbances(table))
    assert "as long in the last third as in the first: heat, or other programs" in words


def test_disturbances_of_simulated_machines_are_described():
    table, _ = swept(SimulatedSweepBench(seconds=by_micro_batch))
    assert next(disturbances(table)) == "no heat sensor can be read here"
    assert "within the noise" in list(disturbances(table))[1]
    table, _ = swept(
        SimulatedSweepBench(), read_system_state=lambda: SystemState(thermal="heavy", memory_pressure="warn")
    )
    assert next(disturbances(table)).startswith("throttling: thermal pressure heavy in ")
    assert "memory was short" in list(disturbances(table))
    table, _ = swept(
        SimulatedSweepBench(), read_system_state=lambda: SystemState(thermal="nominal"), cpu_use=[3.0, 97.0]
    )
    assert "other programs were busy: 97 % of all cores while nothing was measured" in list(disturbances(table))
    table, _ = swept(
        SimulatedSweepBench(), read_system_state=lambda: SystemState(thermal="nominal"), cpu_use=[3.0, 9.0]
    )
    assert not any("other programs were" in line for line in disturbances(table))
    assert next(disturbances(table)) == "no throttling by the sensor"


def test_rounds_alternate_direction_and_pairs_share_batches():
    bench = SimulatedSweepBench(seconds=by_micro_batch)
    swept(bench)
    others = [micro_batch for micro_batch, _ in bench.visited if micro_batch != 32]
    order = [value for value, before in zip(others, [None, *others], strict=False) if value != before]
    assert order == [16, 8, 4, 2, 1, 2, 4, 8, 16]
    pairs = list(zip(bench.visited[::2], bench.visited[1::2], strict=True))
    assert all(first[1] == second[1] for first, second in pairs)
    assert all({first[0], second[0]} & {32} and first[0] != second[0] for first, second in pairs)
    plan_first = sum(first[0] == 32 for first, _ in pairs)
    assert plan_first == len(pairs) / 2


@pytest.mark.parametrize("kind", ["crash", "oom", "error"])
@pytest.mark.parametrize("when", ["faults", "late_faults"])
def test_value_that_fails_on_a_simulated_bench_is_a_row_with_a_reason(kind, when):
    error = ProbeFailedError("its process died: ended by SIGKILL", kind=kind)
    _, sweep = swept(SimulatedSweepBench(seconds=by_micro_batch, **{when: {8: error}}))
    rows = {row.value: row for row in sweep.rows}
    assert rows[8].outcome == ("does not fit" if kind == "oom" else "failed")
    assert "SIGKILL" in rows[8].note
    assert rows[8].samples_per_second is None
    assert all(rows[value].speedup.repeats == 40 for value in (1, 2, 4, 16))


def test_plan_that_fails_on_a_simulated_bench_ends_the_sweep_with_a_note():
    error = ProbeFailedError("its process died", kind="crash")
    _, sweep = swept(SimulatedSweepBench(late_faults={32: error}))
    assert sweep.note == "ended early: the plan's own steps failed (its process died)"
    _, sweep = swept(SimulatedSweepBench(faults={32: error}))
    assert sweep.rows[-1].outcome == "failed"
    assert {row.outcome for row in sweep.rows[:-1]} == {"no time"}


def test_value_that_would_not_fit_is_not_tried():
    tried = []
    bench = SimulatedSweepBench(
        seconds=lambda plan, now: tried.append(micro(plan)) or 0.1,
        memory=lambda plan: micro(plan) * GB,
        plan=make_plan(load_machine("linux-2core"), WORKLOAD.model_copy(update={"activation_bytes": GB})),
    )
    _, sweep = swept(bench)
    rows = {row.value: row for row in sweep.rows}
    assert rows[32].outcome == "does not fit"
    assert rows[32].needed_bytes == 32 * GB
    assert "not tried: needs 32 GB of" in rows[32].note
    assert 32 not in tried


def test_one_hiccup_on_a_simulated_bench_does_not_rule_out_a_value():
    times = {8: [50.0, 0.1]}
    bench = SimulatedSweepBench(
        seconds=lambda plan, now: times.get(micro(plan), [0.1]).pop(0) if times.get(micro(plan)) else 0.1
    )
    bench.prepare, usual = lambda settings, seconds: usual(settings, seconds=1000.0), bench.prepare
    _, sweep = swept(bench)
    assert {row.value: row for row in sweep.rows}[8].speedup.median == pytest.approx(1.0)


def test_few_repeats_are_noted():
    _, sweep = swept(SimulatedSweepBench(seconds=lambda plan, now: 3.0), "threads", seconds=40.0)
    few = [row for row in sweep.rows if not row.is_plan]
    assert few
    assert all("repeats only" in row.note or "one step only" in row.note for row in few)


def test_far_slower_value_is_stopped_and_one_without_time_is_noted():
    bench = SimulatedSweepBench(
        seconds=lambda plan, now: 2.5 if micro(plan) == 8 else 1000.0 if micro(plan) == 4 else 0.1
    )
    _, sweep = swept(bench, seconds=120)
    rows = {row.value: row for row in sweep.rows}
    assert (rows[8].outcome, rows[8].note) == ("far slower", "a step took 2.5 s, stopped; one step only")
    assert rows[8].samples_per_second.median == pytest.approx(32 / 2.5)
    assert (rows[4].outcome, rows[4].samples_per_second) == ("far slower", None)
    assert "was ended" in rows[4].note
    assert rows[16].speedup.repeats == 40
    _, sweep = swept(SimulatedSweepBench(), seconds=1.1)
    assert {row.outcome for row in sweep.rows[:-1]} == {"no time"}


@pytest.mark.parametrize("step", [0.0004, 0.03, 0.7, 3.0])
@pytest.mark.parametrize("seconds", [2.0, 10.0, 60.0])
def test_budget_is_kept_on_a_simulated_clock(step, seconds):
    bench = SimulatedSweepBench(seconds=lambda plan, now: step * 32 / micro(plan))
    swept(bench, seconds=seconds)
    assert bench.now <= 1.1 * seconds
    assert bench.alive == 0


def test_rows_of_other_precisions_show_their_agreement():
    plan = make_plan(load_machine("h200"), WORKLOAD)
    bench = SimulatedSweepBench(seconds=lambda plan, now: 0.1, plan=plan)
    _, sweep = swept(bench, "precision")
    words = {row.value: row.note for row in sweep.rows}
    assert words.pop(plan.precision) == ""
    assert words.pop("fp16") == "gradients DIFFER from fp32's"
    assert set(words.values()) == {"agrees with fp32"}


# --- sweeps ----------------------------------------------------------------------------------------------------------


def test_default_sweeps_have_something_to_vary():
    cpu, gpu = make_plan(load_machine("linux-2core"), WORKLOAD), make_plan(load_machine("h200"), WORKLOAD)
    assert select_sweeps(cpu, []) == ["micro_batch", "threads", "precision"]
    assert select_sweeps(gpu, []) == ["device", "micro_batch", "precision"]
    decoding = WORKLOAD.model_copy(update={"needs_decoding": True, "has_batchnorm": True})
    assert select_sweeps(make_plan(load_machine("linux-2core"), decoding), []) == ["threads", "workers", "precision"]
    wished = make_plan(load_machine("linux-2core"), WORKLOAD, overrides={"threads": 1})
    assert select_sweeps(wished, []) == ["micro_batch", "precision"]
    with pytest.raises(UsageError, match="threads cannot be swept here\n  got: you set threads=1\n  try: --sweep "):
        select_sweeps(wished, ["threads"])
    with pytest.raises(UsageError, match="nothing has to be decoded"):
        select_sweeps(cpu, ["workers"])
    with pytest.raises(UsageError, match="the CPU is the only device"):
        select_sweeps(cpu, ["device"])


def test_micro_batches_of_a_sweep_are_even_and_few():
    plan = make_plan(load_machine("linux-2core"), WORKLOAD.model_copy(update={"global_batch_size": 3000}))
    values = [arm.value for arm in sweep_variants(plan, {}, "micro_batch")]
    assert values == sorted(values)
    assert values[-1] == 3000
    assert len(values) <= 7
    assert all(-(-3000 // -(-3000 // value)) == value for value in values)


@pytest.mark.parametrize(("machine", "kernels"), [("linux-2core", "loop"), ("h200", "foreach"), ("m2-air-8gb", "loop")])
def test_plain_loop_has_pytorch_defaults(machine, kernels):
    varying = WORKLOAD.model_copy(update={"lengths_vary": True, "can_pack": True, "max_length": 64})
    plan = make_plan(load_machine(machine), varying)
    bench = SimulatedSweepBench(plan=plan)
    plain = BenchmarkContext(bench=bench, rule_plan=plan, own={}).plan_with(plain_loop(plan, {}).settings)
    logged = {
        name: plain.settings[name].value for name in ("precision", "micro_batch", "lengths", "workers", "compile")
    }
    assert logged == {"precision": "fp32", "micro_batch": 32, "lengths": "fixed", "workers": 0, "compile": "off"}
    assert plain.optimizer_kernels == kernels
    assert plain.data_location == "host"
    assert plain.device == plan.device


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_median_interval_has_its_stated_coverage():
    draw = random.Random(1)
    for count, shape in ((5, draw.random), (12, lambda: draw.paretovariate(1.2)), (40, lambda: draw.expovariate(1))):
        truth = {5: 0.5, 12: 2 ** (1 / 1.2), 40: math.log(2)}[count]
        actual = [median_interval([shape() for _ in range(count)]) for _ in range(2000)]
        covered = sum(one.low <= truth <= one.high for one in actual) / len(actual)
        assert covered >= actual[0].confidence - 0.02
        assert actual[0].confidence >= 0.9375


def test_slow_steps_and_drift_need_enough_steps():
    series = StepTimings(visits=[1.0] * 7, steps=[1.0] * 19)
    assert (series.slow_steps, series.drift) == (None, None)
    series = StepTimings(visits=[1.0] * 4 + [1.5] * 4, steps=[1.0] * 18 + [3.0] * 2)
    assert (series.slow_steps, series.drift) == (3.0, 1.5)


# --- output ----------------------------------------------------------------------------------------------------------


def measured(value, *, rate=100.0, is_plan=False, device="cpu", **changes) -> BenchRow:
    interval = BenchInterval(median=rate, low=0.9 * rate, high=1.1 * rate, confidence=0.94, repeats=40)
    execution = {"device": device, "precision": "fp32", "micro_batch": 32}
    return BenchRow(
        value=value,
        is_plan=is_plan,
        execution=execution,
        outcome="measured",
        samples_per_second=interval,
        **{"peak_bytes": GB, **changes},
    )


def test_final_table_has_speed_memory_and_stability():
    bench = SimulatedSweepBench(seconds=lambda plan, now: 0.1 if plan.optimizer_kernels == "loop" else 0.05)
    table = BenchmarkContext(bench=bench, rule_plan=bench.plan, own={})
    both = [plain_loop(bench.plan, {}), Variant(value="plan", settings={}, is_plan=True)]
    sweep = measure_sweep(table, "against", both, until=60.0)
    lines = bench_report.render_bench(result(sweep)).splitlines()
    assert any(
        line.startswith("speed, samples/s") and "320" in line and "640" in line and "2.00x" in line for line in lines
    )
    assert any(line.startswith("memory of a step") and "1 GB" in line for line in lines)
    assert any(line.startswith("slow steps") and "1.00x" in line for line in lines)
    assert any(line.startswith("optimizer kernels") and "loop" in line and "fused" in line for line in lines)


def test_picture_shows_intervals_the_chosen_value_and_the_limit():
    missing = BenchRow(value=64, execution={}, outcome="does not fit", note="<needs> too much", needed_bytes=5 * GB)
    sweep = BenchSweep(setting="micro_batch", rows=(measured(16), measured(32, rate=150, is_plan=True), missing))
    drawn = ET.fromstring(bench_chart(result(sweep)))
    space = "{http://www.w3.org/2000/svg}"
    classes = [element.get("class") for element in drawn.iter()]
    assert classes.count("ring") == 2
    assert classes.count("limit") == 1
    assert classes.count("cross") == 1
    texts = [element.text for element in drawn.iter(f"{space}text")]
    assert "limit: 4 GB" in texts
    titles = [element.text for element in drawn.iter(f"{space}title")]
    assert "150 samples/s (135 to 165)" in titles
    assert "does not fit: <needs> too much" in titles
    bars = [e.get("d") for e in drawn.iter(f"{space}path") if e.get("class") in ("data", "chosen")]
    assert len(bars) == 2


def test_global_batch_sizes_have_a_table_with_steps_per_second_and_a_picture_beside_the_micro_batch():
    batches = BenchSweep(setting="global_batch_size", rows=(measured(16), measured(64, rate=320, is_plan=True)))
    micro = BenchSweep(setting="micro_batch", rows=(measured(16), measured(32, is_plan=True)))
    both = result(batches, sweeps=(batches, micro))
    lines = bench_report.render_bench(both).splitlines()
    header = next(line for line in lines if line.startswith("global_batch_size  "))
    assert header.split() == ["global_batch_size", "samples/s", "it/s", "memory", "note"]
    # 320 samples/s in batches of 64; the micro-batches are of a global batch of 32.
    assert next(line for line in lines if line.startswith("64 *")).split()[-3:] == ["5", "1", "GB"]
    steps = f"{100 / WORKLOAD.global_batch_size:.3g}"
    assert next(line for line in lines if line.startswith("32 *")).split()[6] == steps
    drawn = ET.fromstring(bench_chart(both))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("global batch size") == texts.count("micro-batch") == 2
    assert any("global batch size 64, micro-batch 32" in text for text in texts)


def test_far_limit_makes_the_scale_logarithmic():
    panel = ChartPanel(
        title="memory & more",
        x_title="",
        points=[ChartPoint(label=str(n), value=n * 1e6, is_chosen=n == 2) for n in (1, 2, 3)],
        format_y=str,
        limit=1e11,
        limit_label="limit",
    )
    svg = draw_chart('a "title" <b>', [panel])
    root = ET.fromstring(svg)
    assert "memory &amp; more, logarithmic" in svg
    assert root.get("aria-label") == 'a "title" <b>'
    height = float(root.get("height"))
    heights = [float(e.get(key)) for e in root.iter() for key in ("cy", "y1", "y2") if e.get(key)]
    assert all(0 <= y <= height for y in heights)


@pytest.mark.parametrize("top", [0.003, 0.9, 1.0, 7.0, 99.0, 1234.0, 5e9])
def test_ticks_are_few_and_round(top):
    ticks = round_ticks(top)
    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert top / 2 <= ticks[-1] <= top * (1 + 1e-9)


def test_file_name_is_portable():
    odd = result(BenchSweep(setting="plan"), workload=WORKLOAD.model_copy(update={"recipe": "../my model*"}))
    assert bench_report.bench_file_stem(odd) == "my-model_linux-2core_2026-11-15"
