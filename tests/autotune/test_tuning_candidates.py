"""Candidates of a search, overrides, and plans with their evidence."""

import json

import pytest

from simulated_step_bench import SimulatedStepBench, gaussian, landscape
from whet.autotune.candidates import ABOUT, candidates, plan_with
from whet.autotune.result import TuningResult
from whet.autotune.search import search
from whet.machine.known import load_machine
from whet.plan.plan import make_plan, read_plan
from whet.plan.workload import Workload
from whet.recipes.text.config import TextConfig, describe

TEXT = describe(TextConfig()).model_copy(update={"num_steps": 50_000, "mean_length": 46.0, "num_samples": 7_320})
PLAN = make_plan(load_machine("linux-2core"), TEXT)
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


def test_overrides_are_never_tried_on_a_simulated_machine() -> None:
    overrides = {"precision": "fp32", "threads": 2, "micro_batch": 16}
    plan = make_plan(load_machine("linux-2core"), TEXT, overrides=overrides)
    bench = SimulatedStepBench(plan, landscape(3))
    actual = search(plan, bench, budget_seconds=60)
    assert actual.trials
    assert not {trial.setting for trial in actual.trials} & set(overrides)
    assert not {name for tried in bench.prepared for name in tried} & set(overrides)
    assert not set(actual.measured) & set(overrides)
    offered = [candidate for about in ABOUT for candidate in candidates(plan, about)]
    assert offered
    assert not [candidate for candidate in offered if set(candidate.changes) & set(overrides)]


@pytest.mark.parametrize("name", ["m2-air-8gb", "m3-max-64gb", "h200", "linux-2core"])
@pytest.mark.parametrize("about", ABOUT)
def test_candidates_are_valid_and_change_something(name: str, about: str) -> None:
    workload = TEXT.model_copy(update={"has_batchnorm": False, "global_batch_size": 48})
    for plan in (make_plan(load_machine(name), workload), make_plan(load_machine(name), BATCH_64)):
        for candidate in candidates(plan, about):
            tried = plan_with(plan, candidate.changes)
            assert all(tried.settings[key].value == value for key, value in candidate.changes.items())
            assert tried.settings != plan.settings
            assert candidate.value != plan.settings[candidate.setting].value
            read_plan(tried.as_json(), where="here")


def test_batchnorm_batches_are_not_split() -> None:
    plan = make_plan(load_machine("linux-2core"), TEXT.model_copy(update={"has_batchnorm": True}))
    assert not list(candidates(plan, "micro_batch"))
    assert not list(candidates(plan, "precision with micro_batch"))


def test_micro_batches_respect_the_row_limit() -> None:
    long = BATCH_64.model_copy(update={"max_length": 2_048, "activation_bytes": 1024**2, "num_parameters": 1_000})
    plan = make_plan(load_machine("m2-air-8gb"), long)
    assert plan.micro_batch == 16
    assert max(c.changes["micro_batch"] for c in candidates(plan, "micro_batch")) <= 16


def test_plan_of_a_simulated_search_survives_json() -> None:
    for seed in range(12):
        bench = SimulatedStepBench(PLAN, landscape(seed), noise=gaussian(0.01), seed=seed)
        actual = search(PLAN, bench, budget_seconds=60, seed=seed)
        plan = make_plan(
            PLAN.machine, TEXT, measured=actual.measured, trials=actual.trials, system_state=PLAN.system_state
        )
        assert bench.alive == 0, "losers are closed, and the winner at the end"
        expected = plan_with(PLAN, actual.settings)
        assert {n: s.value for n, s in plan.settings.items()} == {n: s.value for n, s in expected.settings.items()}
        assert read_plan(json.loads(json.dumps(plan.as_json(), allow_nan=False)), where="here") == plan
        assert TuningResult.from_json(json.loads(json.dumps(actual.as_json(), allow_nan=False)), where="here") == actual
        assert plan.trials[-1].setting == "plan"
        for measured in actual.measured.values():
            assert measured.reason
            assert "\n" not in measured.reason
            assert {"repeats", "median", "interval", "bytes"} <= set(measured.evidence)


def test_settings_that_win_only_together_are_both_in_the_simulated_plan() -> None:
    times = {("fp32", 32): 0.06, ("bf16", 32): 0.07, ("fp32", 16): 0.07, ("bf16", 16): 0.03}
    bench = SimulatedStepBench(PLAN, lambda p: times.get((p.precision, p.micro_batch), 0.2))
    actual = search(PLAN, bench, budget_seconds=60)
    assert actual.settings == {"precision": "bf16", "micro_batch": 16}
    assert actual.measured["micro_batch"].value == 16
    assert actual.measured["micro_batch"].reason.startswith("together with precision: ")
    plan = make_plan(PLAN.machine, TEXT, measured=actual.measured)
    assert (plan.precision, plan.micro_batch, plan.accumulation) == ("bf16", 16, 2)


def test_a_plan_from_before_trials_were_recorded_is_read() -> None:
    data = PLAN.as_json()
    del data["trials"]
    assert read_plan(data, where="here") == PLAN


def test_simulated_search_is_reproducible() -> None:
    first, second, other = (
        search(PLAN, SimulatedStepBench(PLAN, landscape(5), noise=gaussian(0.03)), budget_seconds=60, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other
