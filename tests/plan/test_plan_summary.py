"""The head of a training: a few lines with what differs from a plain PyTorch loop."""

from typing import Any

import pytest

from whet.config.resolve import resolve_config
from whet.machine.known import load_machine
from whet.plan.plan import Plan, make_plan
from whet.plan.setting import TuneTrial
from whet.plan.summary import notable_settings, summary_lines
from whet.recipes.recipe import load_recipe


def planned(machine: str, *settings: str, trials: tuple[TuneTrial, ...] = ()) -> Plan:
    recipe = load_recipe("text")
    resolved = resolve_config(recipe.Config, settings)
    workload = recipe.describe(resolved.config)
    return make_plan(load_machine(machine), workload, overrides=resolved.overrides, trials=trials)


@pytest.mark.parametrize("machine", ["m2-air-8gb", "h200"])
@pytest.mark.parametrize("width", [80, 120])
def test_the_head_has_few_lines_that_fit(machine: str, width: int) -> None:
    lines = summary_lines(planned(machine), width=width, run="runs/text-001")
    assert len(lines) <= (8 if width == 120 else 10)
    assert all(len(line) <= width for line in lines)
    labels = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert labels[:4] == ["machine", "workload", "plan", "time"]
    assert set(labels[4:]) <= {"note"}


def test_only_what_differs_from_a_plain_loop_is_named() -> None:
    assert list(notable_settings(planned("m2-air-8gb"))) == ["mps", "fp32", "fused optimizer", "bucketed lengths"]
    chosen = planned("m2-air-8gb", "checkpoint_steps=200", "micro_batch=8", "workers=2", "compile=on", "threads=4")
    assert list(notable_settings(chosen)) == [
        "mps", "fp32", "micro-batch 8 (x4)", "fused optimizer", "compiled", "bucketed lengths", "2 workers",
        "checkpoint_steps=200",
    ]  # fmt: skip


def test_the_time_is_measured_estimated_or_unknown() -> None:
    def time(plan: Plan, **more: Any) -> str:
        return next(line for line in summary_lines(plan, width=200, **more) if line.startswith("time"))

    plan = planned("m2-air-8gb")
    assert plan.workload.num_steps == 1650
    assert ", estimated from 3.6 TFLOPS" in time(plan)
    assert time(plan, estimate="about 9 s") == "time      about 9 s"
    trial = TuneTrial(
        setting="plan", settings={}, verdict="faster", note="", median_seconds=0.4, peak_bytes=2 * 1024**3
    )
    measured = planned("m2-air-8gb", trials=(trial,))
    assert time(measured) == "time      about 11 min at 80 samples/s, as measured, 2 GB of 5.3 GB"
    assert time(measured, estimate="about 9 s") == time(measured)
    assert time(measured, num_done=1500).startswith("time      about 60 s at ")
    endless = plan.model_copy(update={"workload": plan.workload.model_copy(update={"num_steps": None})})
    assert time(endless) == "time      unknown, because the data has no length"
