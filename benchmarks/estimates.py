"""Compare estimated speeds with measured steps, for sizes that were chosen before any of them was measured.

python benchmarks/estimates.py [first|second]

The range is that of `whet plan RECIPE KEYS threads=1 --machine linux-2core`, which reads no data. The measured figure
is samples per CPU second of one thread: on busy cores the time of a step says nothing.

The second set was chosen after the first was measured and the estimate changed, before any of it was measured.
"""

import argparse
import time

import results

from whet.config.resolve import resolve_config
from whet.device.open import current_machine
from whet.machine.known import load_machine
from whet.plan.estimate import estimate_speed
from whet.plan.plan import make_plan
from whet.recipes.recipe import load_recipe
from whet.recipes.runner import prepare_recipe
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config

MACHINE = "linux-2core"
OVERRIDES = {"threads": 1}
MIN_SECONDS, MIN_STEPS = 6.0, 8

FIRST = {
    "text": (
        "arch.hidden_size=64 arch.layers=2 global_batch_size=64",
        "arch.layers=6 global_batch_size=128",
        "arch.hidden_size=256 arch.layers=4 arch.heads=8 global_batch_size=16",
        "arch.hidden_size=384 arch.layers=6 arch.heads=12 arch.max_length=128 global_batch_size=8",
        "arch.hidden_size=512 arch.layers=2 arch.heads=8 arch.vocab_size=8192 global_batch_size=48",
    ),
    "chat": (
        "arch.preset=tiny global_batch_size=4",
        "arch.hidden_size=64 arch.num_heads=2 global_batch_size=16",
        "arch.hidden_size=256 arch.num_heads=8 arch.H_cycles=1 arch.L_cycles=4 global_batch_size=8",
        "arch.kind=gpt arch.hidden_size=192 arch.num_heads=6 global_batch_size=8",
        "arch.L_layers=4 arch.H_cycles=3 global_batch_size=32",
    ),
    "puzzle": (
        "arch.hidden_size=128 global_batch_size=32",
        "arch.hidden_size=256 arch.num_heads=8 arch.L_layers=1 global_batch_size=16",
        "arch.mlp_t=false global_batch_size=128",
        "arch.H_cycles=1 arch.L_cycles=6 global_batch_size=64",
        "arch.hidden_size=96 arch.L_layers=4 global_batch_size=16",
    ),
    "hex": (
        "size=7 arch.depth=2 arch.width=16 global_batch_size=256",
        "size=11 arch.depth=6 arch.width=64 global_batch_size=32",
        "size=9 arch.depth=10 arch.width=48 global_batch_size=16",
        "size=13 arch.depth=3 arch.width=128 global_batch_size=8",
        "size=5 arch.kind=attention arch.width=64 global_batch_size=64",
    ),
}
SECOND = {
    "text": (
        "arch.hidden_size=192 arch.layers=3 arch.heads=6 arch.max_length=32 global_batch_size=24",
        "arch.layers=4 arch.max_length=256 global_batch_size=32",
        "arch.hidden_size=320 arch.heads=5 global_batch_size=96",
    ),
    "chat": ("arch.hidden_size=96 arch.L_layers=3 global_batch_size=12",),
    "puzzle": ("arch.hidden_size=192 arch.num_heads=6 arch.H_cycles=2 arch.L_cycles=3 global_batch_size=48",),
    "hex": (
        "size=6 arch.depth=1 arch.width=24 global_batch_size=512",
        "size=8 arch.depth=12 arch.width=32 global_batch_size=24",
        "size=13 arch.depth=5 arch.width=80 global_batch_size=12",
        "size=10 arch.depth=3 arch.width=96 arch.block=bottleneck global_batch_size=48",
    ),
}
SETS = {"first": FIRST, "second": SECOND}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", nargs="?", choices=SETS, default="first")
    parser.add_argument("--ranges", action="store_true", help="print the ranges without measuring")
    arguments = parser.parse_args()
    print("| recipe and keys | estimated, samples/s | measured | measured over middle | inside |")
    print("| --- | --- | --- | --- | --- |")
    num_outside = 0
    for recipe, rows in SETS[arguments.set].items():
        for words in rows:
            low, high = estimated(recipe, words)
            cells = ["", "", ""]
            if not arguments.ranges:
                rate = measured(recipe, words)
                num_outside += not low < rate < high
                cells = [f"{rate:,.4g}", f"{rate / (low * high) ** 0.5:.2f}", "yes" if low < rate < high else "**no**"]
            print(f"| {recipe} {words} | {low:,.4g} to {high:,.4g} | {' | '.join(cells)} |", flush=True)
    return results.BELOW_TARGET if num_outside else 0


def estimated(recipe: str, words: str) -> tuple[float, float]:
    loaded = load_recipe(recipe)
    workload = loaded.describe(resolve_config(loaded.Config, words.split()).config)
    made = estimate_speed(make_plan(load_machine(MACHINE), workload, overrides=OVERRIDES))
    assert made is not None
    return made.samples_per_second


def measured(recipe: str, words: str) -> float:
    """Return samples per CPU second of this process, with one thread."""
    loaded = load_recipe(recipe)
    made = prepare_recipe(loaded, resolve_config(loaded.Config, [*words.split(), "epochs=1000"]).config)
    machine, state = current_machine()
    plan = make_plan(machine, made.workload, overrides={**OVERRIDES, "device": "cpu"}, system_state=state)
    training = parse_training_config(made.training)
    with LocalStepBench(made.model, made.optimizer, made.data.train, training, loss=made.loss, plan=plan) as bench:
        step = bench.prepare({}, seconds=60.0)
        start, steps = time.process_time(), 0
        while steps < MIN_STEPS or time.process_time() - start < MIN_SECONDS:
            step.step(steps)
            steps += 1
        seconds = time.process_time() - start
        step.close()
    return steps * plan.workload.global_batch_size / seconds


if __name__ == "__main__":
    raise SystemExit(main())
