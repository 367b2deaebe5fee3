"""The estimated speed contains what was measured, for every recipe on the two machines that were measured."""

from collections.abc import Mapping

import pytest

from whet.config.resolve import resolve_config
from whet.machine.known import known_machine_names, load_machine
from whet.plan.estimate import SpeedEstimate, estimate_speed
from whet.plan.plan import make_plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.recipes.chat.config import describe_chat
from whet.recipes.puzzle.config import Sizes
from whet.recipes.puzzle.config import describe as describe_puzzle
from whet.recipes.recipe import load_recipe

HALF = {"precision": "bf16", "graph": "on"}
BERT = "arch.layers=12 arch.hidden_size=768 arch.heads=12 arch.max_length=128"
TRM = "arch.hidden_size=1024 arch.L_layers=6 arch.H_cycles=3 arch.L_cycles=1 arch.supervision=1 arch.seq_len=512"
SMALL_TRM = "arch.hidden_size=128 arch.L_layers=2 arch.H_cycles=3 arch.L_cycles=1 arch.supervision=1 arch.seq_len=64"
SUDOKU = "data=FILE arch.hidden_size=512 arch.num_heads=8 arch.L_layers=2 arch.H_cycles=3 arch.L_cycles=6"


def workload(recipe: str, words: str, **facts: object) -> Workload:
    loaded = load_recipe(recipe)
    config = resolve_config(loaded.Config, [word for word in words.split() if word != "data=FILE"]).config
    if recipe == "chat" and "vocab_size" in facts:
        return describe_chat(config, **facts)  # type: ignore[arg-type]
    if recipe == "puzzle" and "sizes" in facts:
        return describe_puzzle(config, facts["sizes"])  # type: ignore[arg-type]
    return loaded.describe(config).model_copy(update=facts)


def estimate(machine: str, work: Workload, overrides: Mapping[str, Scalar] | None = None) -> SpeedEstimate:
    made = estimate_speed(make_plan(load_machine(machine), work, overrides=overrides or {}))
    assert made is not None
    return made


# Measured samples per second, with the page in docs/bench.
MEASURED = {
    # architecture_h200_2026-11-17, peers-*_h200
    "text32 h200": (5_540, workload("text", f"{BERT} global_batch_size=32", mean_length=46.5), HALF),
    "text256 h200": (13_220, workload("text", f"{BERT} global_batch_size=256", mean_length=46.5), HALF),
    "hex h200": (60_900, workload("hex", "arch.depth=18 arch.width=128 size=13 global_batch_size=1024"), HALF),
    "chat h200": (
        480,
        workload("chat", f"{TRM} global_batch_size=32", vocab_size=8_192, longest=512, num_rows=2_048),
        HALF,
    ),
    # 88.4 ms for 768 samples
    "puzzle h200": (
        8_690,
        workload("puzzle", f"{SUDOKU} global_batch_size=768", sizes=Sizes(length=81, num_tokens=11, num_puzzles=1)),
        HALF,
    ),
    # peers_linux-2core_2026-11-16, two threads
    "text32 linux-2core": (577, workload("text", "arch.max_length=128", mean_length=46.3), {"threads": 2}),
    "hex linux-2core": (
        2_084,
        workload("hex", "arch.depth=3 arch.width=32 size=13 global_batch_size=64"),
        {"threads": 2},
    ),
    "chat linux-2core": (
        99,
        workload("chat", f"{SMALL_TRM} global_batch_size=8", vocab_size=512, longest=64, num_rows=512),
        {"threads": 2},
    ),
    # CPU seconds of one thread, because the machine was busy; estimate-constants_h200-linux-2core_2026-11-18
    "puzzle default linux-2core": (207, workload("puzzle", ""), {"threads": 1}),
    "chat default linux-2core": (14.8, workload("chat", ""), {"threads": 1}),
    "hex default linux-2core": (4_402, workload("hex", ""), {"threads": 1}),
    # text_linux-2core_2026-11-15, one thread, mean length 19
    "text default linux-2core": (696, workload("text", "", mean_length=19.0), {"threads": 1}),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_contains_the_measured_speed(name: str) -> None:
    measured, work, overrides = MEASURED[name]
    low, high = estimate(name.split()[-1], work, overrides).samples_per_second
    assert high / low == pytest.approx(4)
    assert low < measured < high, f"{low:,.0f} to {high:,.0f}"


def test_a_faster_machine_is_estimated_faster() -> None:
    work = workload("chat", "")
    names = ("linux-2core", "m1-air-8gb", "m1-pro-16gb", "m4-pro-24gb", "m4-max-128gb", "h200")
    lows = [estimate(name, work).samples_per_second[0] for name in names]
    assert lows == sorted(lows)


@pytest.mark.parametrize("recipe", ["text", "chat", "puzzle", "hex"])
def test_every_known_machine_has_an_estimate(recipe: str) -> None:
    work = workload(recipe, "")
    for name in known_machine_names():
        made = estimate(name, work)
        assert made.samples_per_second[0] > 0
        assert "never measured on such a machine" in made.line
        if work.num_steps is not None:
            assert made.total_seconds == pytest.approx([seconds * work.num_steps for seconds in made.step_seconds])
            assert "for all steps" in made.line


def test_a_model_without_figures_is_estimated_by_its_weights() -> None:
    work = Workload(recipe="own", num_parameters=124_000_000, global_batch_size=16, max_length=1_024)
    # GPT-2 with 124 M weights, compiled by hand on an H200 in bf16: 415 samples/s (a plain loop 196).
    low, high = estimate("h200", work, HALF).samples_per_second
    assert low < 415 < high
    # Frozen weights need no gradient of their own.
    frozen = work.model_copy(update={"num_parameters": 1_000_000, "num_frozen": 123_000_000})
    assert estimate("h200", frozen, HALF).step_seconds < estimate("h200", work, HALF).step_seconds


def test_an_unknown_device_has_no_estimate() -> None:
    machine = load_machine("h200")
    card = machine.accelerators[0].model_copy(update={"name": "Some new card"})
    other = machine.model_copy(update={"accelerators": (card,)})
    assert estimate_speed(make_plan(other, workload("text", ""))) is None
