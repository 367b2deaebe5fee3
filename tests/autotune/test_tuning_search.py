"""The search on simulated machines: best settings, false claims, budgets and failures."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amounts import amount
from paths import ReportCount
from simulated_step_bench import GRID, SimulatedStepBench, drifting, gaussian, heavy_tailed, landscape, periodic
from whet.autotune.candidates import ABOUT, plan_with
from whet.autotune.result import TuningResult, cuda_budget_seconds, finish_estimate
from whet.autotune.search import search
from whet.autotune.step_bench import LaunchFacts, ProbeFailedError
from whet.base.units import GB
from whet.machine.facts import Accelerator, CpuFacts, Machine, OperatingSystem, TorchFacts
from whet.machine.known import load_machine
from whet.plan.plan import Plan, make_plan
from whet.plan.workload import Workload
from whet.recipes.text.config import TextConfig, describe

TEXT = describe(TextConfig()).model_copy(update={"num_steps": 50_000, "mean_length": 46.0, "num_samples": 7_320})
PLAN = make_plan(load_machine("linux-2core"), TEXT)
MAC = Machine(
    name="a Mac",
    os=OperatingSystem(name="macOS", version="15.1"),
    cpu=CpuFacts(fast_cores=4, slow_cores=4),
    memory_bytes=8 * GB,
    accelerators=(Accelerator(kind="mps", usable_bytes=int(5.33 * GB), shares_memory=True, capability="apple9"),),
    torch=TorchFacts(version="2.13.0"),
)
BATCH_64 = Workload(
    recipe="text",
    num_parameters=109_482_240,
    global_batch_size=64,
    num_samples=7_320,
    num_steps=5_000,
    max_length=128,
    sample_bytes=1_032,
    activation_bytes=140 * 1024**2,
)


def of(actual: TuningResult, setting: str) -> list[str]:
    return [trial.verdict for trial in actual.trials if trial.setting == setting]


# --- the best settings -----------------------------------------------------------------------------------------------


def test_cpu_is_chosen_for_a_tiny_model_on_a_simulated_mac() -> None:
    tiny = Workload(recipe="hex", num_parameters=40_000, global_batch_size=64, num_steps=20_000, activation_bytes=4_096)
    plan = make_plan(MAC, tiny)
    assert plan.device == "mps"
    bench = SimulatedStepBench(plan, lambda p: 0.0004 if p.device == "cpu" else 0.003, noise=gaussian(0.05))
    actual = search(plan, bench, budget_seconds=20)
    assert actual.settings["device"] == "cpu"
    assert actual.gain is not None
    assert actual.gain.low > 6
    assert "mps" in actual.measured["device"].reason
    assert actual.measured["device"].evidence["repeats"] >= 3


def test_cpu_is_not_tried_for_a_large_model_on_a_simulated_mac() -> None:
    large = BATCH_64.model_copy(update={"mean_length": 100.0})
    plan = make_plan(MAC.model_copy(update={"cpu": CpuFacts(fast_cores=4, slow_cores=4, logical_cores=8)}), large)
    bench = SimulatedStepBench(plan, lambda p: 400.0 if p.device == "cpu" else 0.5, noise=gaussian(0.01))
    actual = search(plan, bench, budget_seconds=60)
    (trial,) = (t for t in actual.trials if t.setting == "device")
    assert trial.verdict == "not tried"
    assert "its arithmetic alone would take" in trial.note


def regret(seed: int, noise) -> float:
    seconds, cells = landscape(seed), GRID
    best = min(
        seconds(plan_with(PLAN, dict(zip(cells, cell, strict=True)))) for cell in itertools.product(*cells.values())
    )
    bench = SimulatedStepBench(PLAN, seconds, noise=noise, seed=seed)
    actual = search(PLAN, bench, budget_seconds=60, seed=seed)
    assert bench.alive == 0
    assert bench.most_alive <= 2
    assert actual.spent_seconds <= 66
    return seconds(plan_with(PLAN, actual.settings)) / best - 1


@pytest.mark.slow
def test_search_finds_the_best_of_864_settings_within_5_percent_on_simulated_machines(
    report_count: ReportCount,
) -> None:
    regrets = [regret(seed, gaussian(0.01)) for seed in range(25)]
    report_count(f"25 landscapes of 864 cells: regret {max(regrets):.1%} at most")
    assert max(regrets) <= 0.05


@pytest.mark.slow
def test_noise_costs_little_speed_on_simulated_machines(report_count: ReportCount) -> None:
    regrets = sorted(regret(seed, heavy_tailed) for seed in range(25))
    report_count(f"25 landscapes under heavy tails: regret {regrets[12]:.1%} in the middle, {regrets[-1]:.1%} at most")
    assert regrets[12] <= 0.05


# --- no claims inside the noise --------------------------------------------------------------------------------------

NOISES = {"gaussian": gaussian(0.04), "heavy tails": heavy_tailed, "drift": drifting, "periodic": periodic(0.21)}


@pytest.mark.parametrize("noise", NOISES)
def test_at_most_one_false_claim_in_200_simulated_null_searches(noise: str, report_count: ReportCount) -> None:
    claims, searches = 0, amount(20, 200)
    for seed in range(searches):
        bench = SimulatedStepBench(PLAN, lambda _plan: 0.05, noise=NOISES[noise], seed=seed)
        actual = search(PLAN, bench, budget_seconds=30, seed=seed)
        claims += bool(actual.settings) or actual.gain is not None
        if not actual.settings:
            assert all(measured.value == PLAN.settings[name].value for name, measured in actual.measured.items())
    report_count(f"{noise}: {claims} false claims in {searches} searches where nothing makes a difference")
    assert claims <= searches / 200


def test_likely_simulated_gain_is_kept_together_with_a_certain_one() -> None:
    """Dropping one of the two settings would lose the gain, so the final comparison includes both."""
    likely = 0
    for seed in range(20):
        bench = SimulatedStepBench(PLAN, _one_large_gain_and_one_small, noise=gaussian(0.07), seed=seed)
        actual = search(PLAN, bench, budget_seconds=60, seed=seed)
        kept = [t for t in actual.trials if t.verdict == "likely" and t.settings.items() <= actual.settings.items()]
        likely += bool(kept)
        for trial in kept:
            assert (trial.repeats, trial.interval[0] > 1.02) == (24, True)
        assert actual.gain is not None
    assert likely >= 5


def _one_large_gain_and_one_small(plan: Plan) -> float:
    large = 0.5 if plan.optimizer_kernels == "loop" else 1.0
    return 0.05 * large * (0.93 if plan.threads == 1 else 1.0)


def test_simulated_gain_that_is_not_confirmed_is_reverted() -> None:
    """Faster during its trial, but not in the final comparison with the rules."""
    bench = SimulatedStepBench(PLAN, lambda _plan: 0.05, noise=gaussian(0.01))
    make_step, prepares = bench.make_step, bench.prepared

    def fading(settings, index):
        is_last = prepares.count({}) == 2
        taken = make_step(settings, index)
        gain = 0.5 if settings.get("optimizer_kernels") == "loop" and not is_last else 1.0
        bench.now -= taken * (1 - gain)
        return taken * gain

    bench.make_step = fading
    actual = search(PLAN, bench, budget_seconds=60)
    assert "faster" in of(actual, "optimizer_kernels")
    assert (actual.settings, actual.gain) == ({}, None)
    assert actual.trials[-1].setting == "plan"
    assert actual.measured["optimizer_kernels"].value == "fused"
    assert "rule-based plan is kept: the gain was not confirmed" in actual.measured["optimizer_kernels"].reason


# --- memory ----------------------------------------------------------------------------------------------------------


def test_search_avoids_a_simulated_swap_cliff() -> None:
    """Predictions are a third too low. Above the limit a step does not fail; it takes ten times as long."""
    plan = make_plan(MAC, BATCH_64)
    limit = plan.memory_gb * GB
    rule_micro = plan.micro_batch
    assert rule_micro < 64

    def predicted(p: Plan) -> int:
        return int(1.5 * GB + p.micro_batch * 30 * 1024**2)

    def true(p: Plan) -> int:
        return int(1.9 * GB + p.micro_batch * 110 * 1024**2)

    def seconds(p: Plan) -> float:
        pieces = 64 / p.micro_batch
        return (0.3 + 0.1 * pieces) * (10 if true(p) > limit else 1)

    bench = SimulatedStepBench(plan, seconds, predicted=predicted, bytes=true, noise=gaussian(0.01))
    assert true(plan) <= limit < true(plan_with(plan, {"micro_batch": 64}))
    assert predicted(plan_with(plan, {"micro_batch": 64})) <= limit, "predictions alone would exceed the limit"
    actual = search(plan, bench, budget_seconds=60)
    assert all(true(plan_with(plan, tried)) <= limit for tried in bench.prepared), "the limit was exceeded"
    refused = [t for t in actual.trials if t.verdict == "not tried" and t.setting == "micro_batch"]
    assert refused
    assert "needs" in refused[0].note
    assert "of 5.3 GB" in refused[0].note


def test_simulated_candidate_over_the_memory_limit_is_not_chosen() -> None:
    def true(plan: Plan) -> int:
        return 40 * GB if plan.compile != "off" else GB

    bench = SimulatedStepBench(PLAN, lambda p: 0.05 if p.compile == "off" else 0.01, bytes=true)
    actual = search(PLAN, bench, budget_seconds=60)
    assert (actual.settings, of(actual, "compile")) == ({}, ["failed", "not tried"])
    assert "40 GB" in actual.measured["compile"].reason


# --- the budget ------------------------------------------------------------------------------------------------------


@settings(max_examples=amount(40, 150))
@given(
    step=st.floats(0.0001, 40),
    preparation=st.floats(0, 30),
    slow=st.dictionaries(st.sampled_from([*ABOUT]), st.floats(0.2, 300), max_size=4),
    hanging=st.sets(st.sampled_from([*ABOUT]), max_size=3),
    crashing=st.sets(st.sampled_from([*ABOUT]), max_size=3),
    budget=st.floats(0.05, 60),
    spread=st.floats(0, 0.15),
    seed=st.integers(0, 99),
)
def test_no_simulated_search_exceeds_its_budget_by_more_than_10_percent(
    step, preparation, slow, hanging, crashing, budget, spread, seed
) -> None:
    def is_changed(plan: Plan, name: str) -> bool:
        return name in plan.settings and plan.settings[name].value != PLAN.settings[name].value

    def seconds(plan: Plan) -> float:
        total = step
        for name, factor in slow.items():
            total *= factor if is_changed(plan, name) else 1
        return total

    def failure(plan: Plan):
        if any(is_changed(plan, name) for name in hanging):
            return "timeout"
        return "crash" if any(is_changed(plan, name) for name in crashing) else None

    bench = SimulatedStepBench(
        PLAN,
        seconds,
        noise=lambda _now, draw: draw.uniform(1 - spread, 1 + spread),
        preparation=lambda _plan: preparation,
        failure=failure,
        batch_spread=0.05,
        seed=seed,
    )
    actual = search(PLAN, bench, budget_seconds=budget, seed=seed)
    assert bench.now <= 1.1 * budget
    assert actual.spent_seconds == pytest.approx(bench.now)
    assert bench.alive == 0


def test_final_simulated_comparison_keeps_the_budget() -> None:
    """The gain is close to the noise, so without a limit the comparison would take twice the remaining time."""
    overrides = {
        name: PLAN.settings[name].value for name in ("threads", "precision", "micro_batch", "lengths", "compile")
    }
    plan = make_plan(load_machine("linux-2core"), TEXT, overrides=overrides)
    confirmed = 0
    for seed in range(30):
        bench = SimulatedStepBench(
            plan,
            lambda p: 0.47 if p.optimizer_kernels == "loop" else 0.5,
            noise=gaussian(0.015),
            batch_spread=0.05,
            seed=seed,
        )
        actual = search(plan, bench, budget_seconds=22, seed=seed)
        confirmed += actual.trials[-1].setting == "plan"
        assert bench.now <= 1.1 * 22
    assert confirmed >= 5, "the test needs the last comparison to be reached"


def test_simulated_search_without_time_lists_skipped_candidates() -> None:
    bench = SimulatedStepBench(PLAN, lambda _plan: 0.5, preparation=lambda _plan: 1.0)
    actual = search(PLAN, bench, budget_seconds=8)
    assert any("no time was left for" in line for line in actual.summary)


def test_simulated_search_does_not_list_tried_settings_as_skipped() -> None:
    bench = SimulatedStepBench(PLAN, lambda _plan: 0.5, preparation=lambda _plan: 1.0)
    actual = search(PLAN, bench, budget_seconds=24)
    assert {"precision": "bf16"} in [trial.settings for trial in actual.trials]
    (line,) = [line for line in actual.summary if line.startswith("no time was left for ")]
    left_out = line.removeprefix("no time was left for ").split(", ")
    assert "precision=bf16 with micro_batch=16" in left_out
    assert "precision=bf16" not in left_out


def test_spent_budget_is_given_as_the_reason_for_no_final_comparison() -> None:
    """The last preparation takes longer than before, as if a process had to be started again."""
    bench = SimulatedStepBench(PLAN, lambda p: 0.02 if p.optimizer_kernels == "loop" else 0.05)
    bench.preparation = lambda _plan: 60.0 if bench.prepared.count({}) == 2 else 0.2
    actual = search(PLAN, bench, budget_seconds=15)
    assert bench.now >= 15
    assert actual.settings == {"optimizer_kernels": "loop"}
    assert "the budget of 15 s was spent before a final comparison, which 30 s would allow" in actual.summary[0]
    assert "failed" not in actual.summary[0]


def test_slow_start_of_a_simulated_machine_is_given_as_the_reason() -> None:
    bench = SimulatedStepBench(PLAN, lambda _plan: 0.05, recovery_seconds=18.0)
    actual = search(PLAN, bench, budget_seconds=20)
    assert actual.trials == ()
    assert "starting took 18 s here" in actual.summary[-1]


def test_simulated_search_without_trials_gives_a_rough_estimate() -> None:
    none = search(PLAN, SimulatedStepBench(PLAN, lambda _plan: 0.05, recovery_seconds=18.0), budget_seconds=20)
    assert none.summary[0].startswith("nothing was compared in ")
    assert "rough guess, not a measurement" in finish_estimate(PLAN, none)
    some = search(PLAN, SimulatedStepBench(PLAN, lambda _plan: 0.05), budget_seconds=20)
    assert "trials in" in some.summary[0]
    assert "guess" not in finish_estimate(PLAN, some)


@pytest.mark.parametrize(
    ("seconds", "speed"), [(0.001, "32,000 samples/s"), (0.03201, "1,000 samples/s"), (0.1, "320 samples/s")]
)
def test_fast_throughput_is_readable(seconds: float, speed: str) -> None:
    assert f" at {speed}, " in finish_estimate(PLAN, TuningResult(step_seconds=seconds))


def test_simulated_failure_of_the_rule_plan_ends_the_search() -> None:
    bench = SimulatedStepBench(PLAN, lambda _plan: 0.05, failure=lambda _plan: "crash")
    actual = search(PLAN, bench, budget_seconds=8)
    assert (actual.settings, actual.trials, actual.measured) == ({}, (), {})
    assert "could not be tried" in actual.summary[0]


# --- bad probes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["crash", "oom", "timeout", "error"])
def test_failed_simulated_candidate_is_recorded_and_the_search_continues(kind: str) -> None:
    def seconds(plan: Plan) -> float:
        return 0.02 if plan.optimizer_kernels == "loop" else 0.05

    bench = SimulatedStepBench(PLAN, seconds, failure=lambda plan: kind if plan.precision == "bf16" else None)
    actual = search(PLAN, bench, budget_seconds=60)
    assert of(actual, "precision") == ["cut off" if kind == "timeout" else "failed"]
    reason = actual.measured["precision"].reason
    assert ("not ready after" if kind == "timeout" else kind) in reason
    assert actual.settings == {"optimizer_kernels": "loop"}


def test_simulated_candidate_that_dies_while_stepping_is_recorded() -> None:
    from whet.autotune.step_bench import ProbeFailedError

    bench = SimulatedStepBench(PLAN, lambda _plan: 0.05)
    make_step = bench.make_step

    def dying(settings, index):
        if settings.get("precision") == "bf16" and index > 2:
            raise ProbeFailedError("killed by signal 9", kind="crash")
        return make_step(settings, index)

    bench.make_step = dying
    actual = search(PLAN, bench, budget_seconds=60)
    assert of(actual, "precision") == ["failed"]
    assert "signal 9" in actual.measured["precision"].reason
    assert bench.alive == 0


def test_simulated_precision_that_disagrees_is_not_used() -> None:
    def seconds(plan: Plan) -> float:
        return 0.01 if plan.precision == "bf16" else 0.05

    bench = SimulatedStepBench(PLAN, seconds, agrees=lambda plan: plan.precision == "fp32")
    actual = search(PLAN, bench, budget_seconds=60)
    assert "precision" not in actual.settings
    assert set(of(actual, "precision")) == {"disagrees"}
    assert "computes different results" in actual.measured["precision"].reason
    assert search(PLAN, SimulatedStepBench(PLAN, seconds), budget_seconds=60).settings["precision"] == "bf16"


def test_slow_simulated_bf16_is_stopped_with_its_factor() -> None:
    bench = SimulatedStepBench(PLAN, lambda plan: 1.5 if plan.precision == "bf16" else 0.025)
    actual = search(PLAN, bench, budget_seconds=60)
    assert of(actual, "precision") == ["cut off"]
    assert actual.measured["precision"].value == "fp32"
    assert "60x slower in its first step, stopped" in actual.measured["precision"].reason
    assert actual.spent_seconds < 20


def test_simulated_gain_survives_an_aborted_last_candidate() -> None:
    """Stopping one candidate ends the process that holds all others; preparing the best one again takes time."""
    bench = SimulatedStepBench(
        PLAN,
        lambda plan: 0.05 if plan.threads == 1 else 0.4,
        preparation=lambda plan: 1000.0 if plan.compile == "on" else 0.5,
        recovery_seconds=6.0,
        noise=gaussian(0.02),
    )
    actual = search(PLAN, bench, budget_seconds=40)
    assert of(actual, "compile") == ["no gain", "cut off"]
    assert actual.settings["threads"] == 1
    assert actual.gain is not None
    assert actual.spent_seconds <= 1.1 * 40


def test_simulated_winner_is_kept_if_the_final_comparison_fails() -> None:
    bench = SimulatedStepBench(PLAN, lambda plan: 0.05 if plan.threads == 1 else 0.4, noise=gaussian(0.02))
    prepare = bench.prepare

    def fails_at_last(settings, *, seconds):
        if not settings and bench.prepared:
            raise ProbeFailedError("simulated", kind="crash")
        return prepare(settings, seconds=seconds)

    bench.prepare = fails_at_last
    actual = search(PLAN, bench, budget_seconds=40)
    assert actual.settings["threads"] == 1
    assert actual.gain is not None
    assert 7 < actual.gain.low < 9
    assert "by the trials alone" in actual.summary[0]
    assert actual.measured["threads"].value == 1
    assert actual.step_seconds == pytest.approx(0.05, rel=0.5)
    assert bench.alive == 0


GPU_PLAN = make_plan(load_machine("h200"), TEXT)


def faster_compiled(plan: Plan) -> float:
    return {"off": 0.06, "blocks": 0.04, "on": 0.03}[str(plan.compile)]


def test_simulated_gpu_compiles_the_whole_model_and_not_its_blocks() -> None:
    bench = SimulatedStepBench(
        GPU_PLAN, faster_compiled, preparation=lambda plan: 20.0 if plan.compile != "off" else 0.2, noise=gaussian(0.01)
    )
    actual = search(GPU_PLAN, bench, budget_seconds=60, compile_seconds=60)
    assert actual.settings["compile"] == "on"
    assert of(actual, "compile") == ["faster"]
    # What does not compile the model again comes first. The rest is tried only as long as the search itself may take.
    compiled = [trial for trial in actual.trials if trial.against.get("compile") == "on" and trial.setting != "plan"]
    reuses = [trial.setting in ("graph", "optimizer_kernels") for trial in compiled]
    assert sum(reuses) >= 2
    assert reuses == sorted(reuses, reverse=True)
    assert len(compiled) - sum(reuses) <= 2


def test_simulated_settings_that_reuse_compiled_code_are_tried_on_it() -> None:
    """Preparing compiled code takes 30 s once. After that, only settings that change the code take as long again."""
    compiled: set[tuple[object, ...]] = set()

    def preparation(plan: Plan) -> float:
        code = plan.compile, plan.precision, plan.micro_batch, plan.lengths, plan.attention
        if plan.compile == "off" or code in compiled:
            return 0.2
        compiled.add(code)
        return 30.0

    def seconds(plan: Plan) -> float:
        kernels = {"fused": 1.0, "foreach": 0.8, "loop": 1.1}[str(plan.optimizer_kernels)]
        return faster_compiled(plan) * (kernels if plan.compile == "on" else 1.0)

    bench = SimulatedStepBench(GPU_PLAN, seconds, preparation=preparation, noise=gaussian(0.01))
    actual = search(GPU_PLAN, bench, budget_seconds=25, compile_seconds=60)
    assert {"compile": "on", "optimizer_kernels": "foreach"}.items() <= actual.settings.items()
    assert len(compiled) <= 2, "there is no time to compile for other settings"


def test_simulated_setting_that_lost_is_not_compiled_for() -> None:
    """tf32 lost to bf16 before compiling. Trying it again would take as long as all other trials."""
    workload = Workload(recipe="net", num_parameters=10**8, global_batch_size=16, num_steps=50_000)
    plan = make_plan(load_machine("h200"), workload, overrides={"micro_batch": 16})

    def seconds(plan: Plan) -> float:
        return faster_compiled(plan) * (1.0 if plan.precision == "bf16" else 1.35)

    bench = SimulatedStepBench(plan, seconds, noise=gaussian(0.004))
    actual = search(plan, bench, budget_seconds=200)
    assert {"precision": "bf16", "compile": "on"}.items() <= actual.settings.items()
    tried = [trial.settings["precision"] for trial in actual.trials if trial.against.get("compile") == "on"]
    assert "tf32" not in tried


# --- graphs ----------------------------------------------------------------------------------------------------------

ONE_SHAPE_PLAN = make_plan(
    load_machine("h200"),
    Workload(recipe="net", num_parameters=10**8, global_batch_size=16, num_steps=50_000, activation_bytes=1000**2),
    overrides={"precision": "bf16", "micro_batch": 16, "optimizer_kernels": "fused"},
)
BUSY = LaunchFacts(is_captured=False, share=0.34, obstacle="launching kernels takes 34 % of a step")
WAITS = LaunchFacts(is_captured=False, obstacle="the step waits for the device, at model.py:7")


def graph_trials(bench: SimulatedStepBench) -> list[tuple[str, str]]:
    """The modes of compilation and capture that were prepared, besides what the first steps decide."""
    plans = map(bench.planned, bench.prepared)
    return [(str(p.compile), str(p.graph)) for p in plans if p.device == "cuda" and p.graph != "launch_bound"]


def test_simulated_search_does_not_repeat_what_the_first_steps_decided() -> None:
    assert ONE_SHAPE_PLAN.graph == "launch_bound"

    def seconds(plan: Plan) -> float:
        return faster_compiled(plan) / (1.05 if (plan.compile, plan.graph) == ("on", "on") else 1.0)

    bench = SimulatedStepBench(ONE_SHAPE_PLAN, seconds, noise=gaussian(0.004), launches=lambda _: BUSY)
    actual = search(ONE_SHAPE_PLAN, bench, budget_seconds=60)
    # Compiled kernels are shorter, so a graph is tried on them.
    assert graph_trials(bench) == [("on", "on")]
    assert actual.settings == {"compile": "on", "graph": "on"}
    tried = [trial.note for trial in actual.trials if trial.setting == "graph" and trial.verdict == "not tried"]
    assert tried == ["graph=on: not tried, launching kernels takes 34 % of a step"]


@pytest.mark.parametrize(
    ("launches", "tried"),
    [
        (BUSY, []),
        (WAITS, []),
        (LaunchFacts(is_captured=False, share=0.6, obstacle="launching kernels takes 60 % of a step"), ["on"]),
        (LaunchFacts(is_captured=True, share=0.9), ["off"]),
        (LaunchFacts(), ["on", "off"]),
    ],
)
def test_simulated_graphs_are_tried_where_they_may_gain(launches: LaunchFacts, tried: list[str]) -> None:
    bench = SimulatedStepBench(ONE_SHAPE_PLAN, lambda _: 0.05, noise=gaussian(0.01), launches=lambda _: launches)
    actual = search(ONE_SHAPE_PLAN, bench, budget_seconds=60)
    assert [graph for _, graph in graph_trials(bench)] == tried
    assert len([trial for trial in actual.trials if trial.setting == "graph"]) == (len(tried) or 1)


@pytest.mark.parametrize(("launches", "value"), [(BUSY, "off"), (LaunchFacts(is_captured=True, share=0.9), "on")])
def test_simulated_run_gets_the_graph_setting_that_was_measured(launches: LaunchFacts, value: str) -> None:
    """The first steps of the run could decide otherwise: a ViT was captured in its run, and 1.85 times as slow."""
    bench = SimulatedStepBench(ONE_SHAPE_PLAN, lambda _: 0.05, noise=gaussian(0.01), launches=lambda _: launches)
    plan = search(ONE_SHAPE_PLAN, bench, budget_seconds=60).applied_to(ONE_SHAPE_PLAN)
    assert plan.graph == value
    assert plan.settings["graph"].source == "measured"
    assert plan.settings["graph"].reason == (launches.obstacle or "the device waits for the host to launch kernels")


def test_simulated_graph_of_compiled_code_is_tried_although_eager_steps_wait() -> None:
    """The step reads a value of the device, and compiled code does not. It is tried once more, not after every gain."""
    plan = make_plan(
        ONE_SHAPE_PLAN.machine,
        ONE_SHAPE_PLAN.workload.model_copy(update={"num_steps": 900}),
        overrides={"precision": "bf16", "micro_batch": 16},
    )
    plan = plan_with(plan, {"graph": "off"})

    def seconds(plan: Plan) -> float:
        kernels = {"fused": 1.0, "foreach": 0.8, "loop": 0.7}[str(plan.optimizer_kernels)]
        return faster_compiled(plan) * kernels / (1.5 if plan.graph == "on" else 1.0)

    def failure(plan: Plan):
        return "unsupported" if (plan.graph, plan.compile) == ("on", "off") else None

    bench = SimulatedStepBench(plan, seconds, noise=gaussian(0.004), failure=failure)
    actual = search(plan, bench, budget_seconds=60)
    assert graph_trials(bench).count(("off", "on")) == 1
    assert actual.settings.items() >= {"compile": "on", "graph": "on"}.items()


# --- compiling -------------------------------------------------------------------------------------------------------


def test_simulated_gpu_compiles_blocks_if_the_whole_model_takes_too_long() -> None:
    takes = {"off": 0.2, "blocks": 8.0, "on": 1000.0}
    bench = SimulatedStepBench(
        GPU_PLAN, faster_compiled, preparation=lambda plan: takes[str(plan.compile)], noise=gaussian(0.01)
    )
    actual = search(GPU_PLAN, bench, budget_seconds=60, compile_seconds=60)
    assert of(actual, "compile") == ["cut off", "faster"]
    assert actual.settings["compile"] == "blocks"


@pytest.mark.parametrize(("compiled", "expected"), [(0.0016, "faster"), (0.00193, "not worth it")])
def test_simulated_short_run_on_a_gpu_compiles_if_that_pays(compiled: float, expected: str) -> None:
    """A run of 200 s. Compiling takes 8 s, and comparing the code another 4 s."""
    plan = make_plan(
        load_machine("h200"),
        ONE_SHAPE_PLAN.workload.model_copy(update={"num_steps": 100_000}),
        overrides={"precision": "bf16", "micro_batch": 16, "optimizer_kernels": "fused", "device": "cuda"},
    )
    budget, compile_seconds = cuda_budget_seconds(200)
    bench = SimulatedStepBench(
        plan,
        lambda p: compiled if p.compile == "on" else 0.002,
        preparation=lambda p: 8.0 if p.compile != "off" else 0.1,
        noise=gaussian(0.004),
        launches=lambda _: BUSY,
        check_seconds=1.0,
    )
    actual = search(plan, bench, budget_seconds=budget, compile_seconds=compile_seconds)
    assert of(actual, "compile")[0] == expected
    assert (actual.settings.get("compile") == "on") == (expected == "faster")
    assert bench.now <= 1.1 * 20


def test_simulated_compiled_code_that_differs_is_not_used() -> None:
    bench = SimulatedStepBench(
        GPU_PLAN, faster_compiled, noise=gaussian(0.01), compiles_correctly=lambda plan: plan.compile != "on"
    )
    actual = search(GPU_PLAN, bench, budget_seconds=60, compile_seconds=60)
    assert of(actual, "compile") == ["failed", "faster"]
    assert actual.settings["compile"] == "blocks"
    assert "differs from the eager model" in next(t.note for t in actual.trials if t.verdict == "failed")


def test_simulated_search_compiles_again_only_until_it_takes_too_long() -> None:
    """The code of the best settings is cached. That of all others takes minutes, and ends the process of the search."""

    def preparation(plan: Plan) -> float:
        is_cached = (plan.precision, plan.micro_batch, plan.attention) == cached
        return 0.2 if plan.compile == "off" else 3.0 if is_cached else 200.0

    workload = TEXT.model_copy(update={"layers": ("sdpa",), "lengths_vary": False})
    plan = make_plan(load_machine("h200"), workload, overrides={"precision": "bf16"})
    cached = plan.precision, plan.micro_batch, plan.attention
    bench = SimulatedStepBench(
        plan, faster_compiled, preparation=preparation, noise=gaussian(0.01), recovery_seconds=3.0
    )
    actual = search(plan, bench, budget_seconds=60, compile_seconds=100)
    assert actual.settings["compile"] == "on"
    verdicts = [trial.verdict for trial in actual.trials if trial.against.get("compile") == "on"]
    assert verdicts.count("cut off") == 1


def test_simulated_compiled_code_without_time_for_its_check_is_not_a_failure() -> None:
    """The check takes longer than everything else. The process is killed, and the next search does not wait a month."""
    bench = SimulatedStepBench(
        GPU_PLAN, faster_compiled, noise=gaussian(0.01), check_seconds=400.0, recovery_seconds=2.0
    )
    actual = search(GPU_PLAN, bench, budget_seconds=60, compile_seconds=30)
    assert "failed" not in of(actual, "compile")
    assert of(actual, "compile")[0] == "not checked"
    assert actual.settings.get("compile", "off") == "off"
    assert "2.00x as fast, but not checked in time, staying eager" in actual.measured["compile"].reason
    assert not actual.is_complete
    assert bench.now <= 1.1 * 90


def test_simulated_compiled_code_has_time_reserved_for_its_check() -> None:
    """Timed pairs end early enough. Without a reserve they take the time that the check needs."""
    fixed = {name: GPU_PLAN.settings[name].value for name in ABOUT if name in GPU_PLAN.settings and name != "compile"}
    plan = make_plan(load_machine("h200"), TEXT, overrides=fixed)
    verdicts = []
    for seed in range(5):
        bench = SimulatedStepBench(
            plan,
            lambda plan: 0.5 if plan.compile == "on" else 0.55,
            preparation=lambda plan: 12.0 if plan.compile != "off" else 0.2,
            noise=gaussian(0.03),
            check_seconds=6.0,
            seed=seed,
        )
        verdicts += of(search(plan, bench, budget_seconds=50, seed=seed), "compile")[:1]
    assert "not checked" not in verdicts
    assert "faster" in verdicts


def test_simulated_blocks_that_lost_are_not_compiled_again() -> None:
    def seconds(plan: Plan) -> float:
        kernels = 0.7 if plan.optimizer_kernels == "foreach" else 1.0
        # A gain only with other kernels: it is found in the second pass, when blocks have lost already.
        threads = 1.0 if plan.threads == PLAN.threads else 0.7 if kernels < 1 else 1.1
        return 0.06 * kernels * threads * (2.0 if plan.compile == "blocks" else 1.0)

    bench = SimulatedStepBench(
        PLAN, seconds, noise=gaussian(0.01), failure=lambda plan: "error" if plan.compile == "on" else None
    )
    actual = search(PLAN, bench, budget_seconds=300)
    assert actual.settings == {"optimizer_kernels": "foreach", "threads": 1}
    assert of(actual, "compile") == ["no gain", "failed"]


def test_simulated_model_that_the_user_compiles_is_measured_like_others() -> None:
    plan = make_plan(load_machine("h200"), TEXT, overrides={"compile": "on"})
    bench = SimulatedStepBench(plan, lambda plan: 0.03 if plan.precision == "bf16" else 0.06, noise=gaussian(0.01))
    assert search(plan, bench, budget_seconds=120).settings == {"precision": "bf16"}


def test_simulated_fp16_is_tried_if_bf16_disagrees() -> None:
    bench = SimulatedStepBench(
        GPU_PLAN,
        lambda plan: 0.03 if plan.precision in ("bf16", "fp16") else 0.06,
        noise=gaussian(0.01),
        agrees=lambda plan: plan.precision != "bf16",
    )
    actual = search(GPU_PLAN, bench, budget_seconds=60)
    assert of(actual, "precision")[0] == "disagrees"
    assert actual.settings["precision"] == "fp16"


def test_simulated_gpu_with_tensor_cores_tries_neither_fp16_nor_fp32() -> None:
    bench = SimulatedStepBench(GPU_PLAN, lambda plan: 0.06, noise=gaussian(0.01))
    actual = search(GPU_PLAN, bench, budget_seconds=60)
    tried = {trial.settings["precision"] for trial in actual.trials if "precision" in trial.settings}
    assert tried | {GPU_PLAN.precision} == {"bf16", "tf32"}


def test_simulated_compile_must_pay_within_the_run() -> None:
    def found_with(num_steps: int) -> TuningResult:
        plan = make_plan(load_machine("linux-2core"), TEXT.model_copy(update={"num_steps": num_steps}))
        bench = SimulatedStepBench(
            plan,
            lambda p: 0.03 if p.compile == "on" else 0.06,
            preparation=lambda p: 20.2 if p.compile == "on" else 0.2,
            noise=gaussian(0.01),
        )
        return search(plan, bench, budget_seconds=60)

    short, long = found_with(300), found_with(5_000)
    assert (short.settings, of(short, "compile")) == ({}, ["no gain", "not worth it"])
    assert "on: 20 s to compile, would save" in short.measured["compile"].reason
    assert long.settings == {"compile": "on"}
    assert "pays after step" in long.measured["compile"].reason
    assert "of 5,000" in long.measured["compile"].reason
