"""For any training and any stop, three resumes in a row end with the same bits."""

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fault_runs import FaultRuns, counts, digest
from pairwise_choices import Row, pairs_of, pairwise
from whet.checkpoint import store
from whet.run.events import read_events
from whet.training.restore import CUSTOM_LOOP

pytestmark = pytest.mark.torch

FACTORS = {
    "optimizer": ("adamw", "sgd", "adafactor"),
    "precision": ("fp32", "bf16", "fp16"),
    "ema": (True, False),
    "micro_batch": (8, 2),
    "workers": (None, 0, 2),
    "schedule": ("cosine", "plateau", "constant"),
    "place": ("mid", "epoch end", "last step", "before first"),
}
"""Of 12 steps, 6 an epoch. Without workers the data is a table; with 0 or 2 it is augmented, sample by sample."""

BREAKS = {
    "mid": ({"2": "SIGTERM"}, {"5": "SIGKILL"}, {"9": "SIGINT"}),
    "epoch end": ({"6": "SIGTERM"}, {"8": "SIGINT"}, {"9": "SIGKILL"}),
    "last step": ({"3": "SIGTERM"}, {"7": "SIGKILL"}, {"12": "SIGTERM"}),
    "after a save": ({"9": "SIGKILL"}, {"10": "SIGTERM"}, {"11": "SIGKILL"}),
    "before first": ({"1": "SIGKILL"}, {"4": "SIGTERM"}, {"8": "SIGINT"}),
}
"""The cause that ends each of the first three runs, and its step."""
ROWS = pairwise(FACTORS, at_least=40)
NUM_BOUNDED = 6


def options_of(row: Row) -> dict[str, Any]:
    workers = row["workers"]
    overrides = {
        "precision": row["precision"],
        "micro_batch": row["micro_batch"],
        "checkpoint_steps": 4,
        **({"loss_scaling": "dynamic"} if row["precision"] == "fp16" else {}),
        **({} if workers is None else {"workers": workers}),
    }
    return {
        "samples": 48,
        "epochs": 2,
        "eval_every": 3,
        "mapped": workers is not None,
        "overrides": overrides,
        **{name: row[name] for name in ("optimizer", "ema", "schedule")},
    }


def check_resume(fault_runs: FaultRuns, run: Path, place: str, *, expected: str, **options: Any) -> int:
    """Stop a run three times and resume it. Return how often it resumed from a step."""
    resumed = 0
    for stop_at in BREAKS[place]:
        (code, errors), started = fault_runs.end(run, stop_at=stop_at, **options)
        assert code in (0, 130, 143, -signal.SIGKILL), errors
        resumed += started.resumed_from > 0
    last = fault_runs.finish(run, **options)
    resumed += last.resumed_from > 0
    assert all(CUSTOM_LOOP in line for line in last.reported("resume"))
    assert digest(run) == expected
    return resumed


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if i < NUM_BOUNDED else pytest.mark.slow) for i, row in enumerate(ROWS)],
    ids=[" ".join(str(value) for value in row.values()) for row in ROWS],
)
def test_three_resumes_end_with_the_same_bits(fault_runs: FaultRuns, row: Row) -> None:
    options = options_of(row)
    fault_runs.finish(fault_runs.folder / "whole", **options)
    expected = digest(fault_runs.folder / "whole")
    resumed = check_resume(fault_runs, fault_runs.folder / "broken", row["place"], expected=expected, **options)
    assert resumed >= 2
    assert len(list(read_events(fault_runs.folder / "broken", kinds=("step",)))) == 12


def test_the_rows_cover_every_pair(report_count: Callable[[str], None]) -> None:
    pairs = {((a, x), (b, y)) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]}
    covered, bounded = (set().union(*map(pairs_of, rows)) for rows in (ROWS, ROWS[:NUM_BOUNDED]))
    assert pairs <= covered
    report_count(counts(rows=f"{NUM_BOUNDED} of {len(ROWS)}", pairs=f"{len(bounded & pairs)} of {len(pairs)}"))


def test_the_losses_are_scaled_where_they_should_be(fault_runs: FaultRuns) -> None:
    """Otherwise the rows with fp16 would not test the scaler."""
    fault_runs.finish(fault_runs.folder / "run", **options_of({**ROWS[0], "precision": "fp16"}))
    result = store.load_newest(fault_runs.folder / "run" / "checkpoints")
    assert result is not None
    assert result.snapshot.facts["scaler"]["scale"] > 1


def test_loading_and_saving_again_gives_the_same_files(fault_runs: FaultRuns) -> None:
    fault_runs.finish(fault_runs.folder / "run")
    folder = fault_runs.folder / "run" / "checkpoints"
    for step in store.list_steps(folder):
        copy = fault_runs.folder / "copy"
        store.save_checkpoint(copy, store.load_checkpoint(folder / store.checkpoint_name(step)), step=step)
        for path in (folder / store.checkpoint_name(step)).iterdir():
            assert (copy / store.checkpoint_name(step) / path.name).read_bytes() == path.read_bytes()
