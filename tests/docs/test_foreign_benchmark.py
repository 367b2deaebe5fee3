"""benchmarks/foreign.py: every model trains the same with a plain loop and with whet.train; the table can be parsed."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import foreign as command  # noqa: E402
from side_by_side import step_gate  # noqa: E402
from side_by_side.loops import plain_loop, whet_train_loop  # noqa: E402
from side_by_side.losses import BOUND, largest_difference  # noqa: E402
from side_by_side.spec import Spec  # noqa: E402
from side_by_side.timing import LoopComparison, LoopTimes  # noqa: E402
from side_by_side.workloads import foreign  # noqa: E402

SPEC = Spec(
    loop="plain",
    workload="foreign-mlp",
    device="cpu",
    scale="tiny",
    precision="fp32",
    total_steps=4,
    has_dropout=False,
    workers=0,
    records_losses=True,
)


def losses_of(loop, spec: Spec, **changes) -> list[float]:
    try:
        workload = foreign.make(spec)
    except ImportError as error:
        pytest.skip(str(error))
    answers = io.StringIO()
    gate = step_gate.StepGate("cpu", records_losses=True, orders=io.StringIO('{"steps": 1}\n'), answers=answers)
    loop.run(replace(workload, **changes), gate, spec)
    return json.loads(answers.getvalue().splitlines()[-1])["losses"]


@pytest.mark.parametrize(
    "model",
    # Importing transformers takes longer than all others.
    [pytest.param(model, marks=pytest.mark.slow) if model == "gpt2" else model for model in foreign.MODELS],
)
def test_whet_trains_the_model_as_a_plain_loop_does(model: str) -> None:
    spec = replace(SPEC, workload=f"foreign-{model}")
    plain = losses_of(plain_loop, spec)
    assert len(plain) == 4
    assert largest_difference(losses_of(whet_train_loop, replace(spec, loop="whet_train")), plain) <= BOUND["fp32"]


def taken(loop: str, blocks: list[float], **notes) -> LoopTimes:
    facts = {"first_step": 3.0, "warmup_steps": 9, "warmup_seconds": 2.0, "estimate": 0.1}
    return LoopTimes(loop=loop, name=loop, batch=10, blocks=blocks, notes=notes, **facts)


def rows_of(*times: LoopTimes) -> dict[str, list[str]]:
    comparison = LoopComparison(
        spec=SPEC,
        description="a model",
        flops=0.0,
        ceiling=None,
        times=list(times),
        missing={"Lightning": "not installed"},
        block_steps=4,
        second_start=2.5,
    )
    lines = list(command.table("mlp", comparison))
    assert "- Lightning: not installed" in lines
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {row[0]: dict(zip(command.HEAD, row, strict=True)) for row in rows}


def test_the_table_compares_with_the_plain_loop_and_the_better_expert() -> None:
    rows = rows_of(
        taken("plain", [0.4, 0.2] * 3, losses=[1.0, 2.0]),
        taken("expert-compiled", [0.2, 0.1] * 3, losses=[1.0, 2.0]),
        taken("expert-compiled-overhead", [0.1, 0.05] * 3, losses=[1.0, 2.0]),
        taken("whet_train-measured", [0.2, 0.1] * 3, losses=[1.0, 2.0], measuring=31.0),
    )
    measured = rows["whet_train-measured"]
    assert (measured["x plain loop"], measured["x better expert"]) == ("2.00 (2.00 to 2.00)", "0.50 (0.50 to 0.50)")
    assert (measured["of it measuring"], measured["second start"]) == ("31 s", "2.5 s")
    assert rows["plain"]["second start"] == ""


@pytest.mark.parametrize(
    ("losses", "plan", "is_equal"),
    [
        ([1.0, 2.00001], {}, True),
        ([1.0, 2.01], {}, False),
        ([1.0, 2.01], {"precision": "bf16"}, True),
        ([1.0, 2.1], {"precision": "bf16"}, False),
        ([1.0], {}, False),
    ],
)
def test_other_losses_are_reported(losses: list[float], plan: dict[str, str], is_equal: bool) -> None:
    rows = rows_of(
        taken("plain", [0.1] * 5, losses=[1.0, 2.0]), taken("whet_train", [0.1] * 5, losses=losses, plan=plan)
    )
    assert ("NOT EQUAL" in rows["whet_train"]["losses differ by"]) != is_equal


def test_other_batches_have_other_losses() -> None:
    plain = losses_of(plain_loop, SPEC)
    shifted = losses_of(whet_train_loop, replace(SPEC, loop="whet_train"), batch=7)
    assert largest_difference(shifted, plain) > BOUND["bf16"]


def test_a_loop_is_left_out_where_it_does_not_apply() -> None:
    given = command.parse(["--device", "cpu"])
    assert {spec.loop for spec in command.specs_of("mlp", given)} >= {"plain", "expert-compiled", "lightning"}
    assert {"trainer", "expert-compiled-overhead"}.isdisjoint(spec.loop for spec in command.specs_of("mlp", given))
    assert "lightning" not in {spec.loop for spec in command.specs_of("gpt2", given)}


@pytest.mark.slow
def test_smoke_run_of_the_command(tmp_path: Path) -> None:
    options = ["--small", "--threads", "1", "--model", "mlp", "--loops", "plain", "whet_train"]
    run = [sys.executable, BENCHMARKS / "foreign.py", *options, "--out", tmp_path / "found.md"]
    subprocess.run(run, check=True, capture_output=True)
    text = (tmp_path / "found.md").read_text()
    assert "| whet, default plan |" in text
    assert "NOT EQUAL" not in text
