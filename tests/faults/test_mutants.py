"""Test of the tests: each fault planted in whet must be detected by one of them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from test_damaged_checkpoints import check_damage
from test_exact_resume import ROWS, check_resume, options_of

import mutants
from fault_runs import FaultRuns, assert_kept, counts, digest
from whet.checkpoint import store

pytestmark = pytest.mark.torch

POWER = {"no fsync", "no file fsync", "no folder fsync"}
"""Faults that only power cuts detect; test_power_cuts.py plants them."""
CRASHES = {"written in place", "renamed before it is full", "old ones removed before the new one is there"}
HASHES = {"no manifest hash"}
RESUMES = mutants.PLANT.keys() - POWER - CRASHES - HASHES
IN_GATE = {"written in place", "renamed before it is full"}
IN_GATE |= {"optimizer not saved", "schedule not saved", "written from live tensors"}
"""The others are planted by `make test-all`."""


def planted(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in IN_GATE else pytest.mark.slow) for name in sorted(names)]


def check_crashes(fault_runs: FaultRuns, *, mutant: str | None, every: int) -> None:
    """kill -9 before calls of the training part of a run."""
    started = fault_runs.finish(fault_runs.folder / "whole", mutant=mutant)
    first, last = (int(started.reported(word)[0].split(" ")[-1]) for word in ("ready", "over"))
    for at in range(first, last, every):
        run = fault_runs.folder / f"run-{at}"
        _, killed = fault_runs.end(run, mutant=mutant, fault="before", at=at)
        assert_kept(run, killed)


@pytest.mark.parametrize("mutant", planted(CRASHES))
def test_crash_points_notice(fault_runs: FaultRuns, report_count: Callable[[str], None], mutant: str) -> None:
    with pytest.raises(AssertionError):
        check_crashes(fault_runs, mutant=mutant, every=3)
    report_count(counts(**{mutant.replace(" ", "_"): "noticed"}))


@pytest.mark.parametrize("mutant", planted(RESUMES))
def test_resumes_notice(fault_runs: FaultRuns, report_count: Callable[[str], None], mutant: str) -> None:
    row = {**ROWS[0], "optimizer": "adamw", "ema": True, "workers": None, "schedule": "plateau", "micro_batch": 8}
    row["precision"] = "fp16" if mutant == "scaler not saved" else "fp32"
    # A state that changed while it was written is visible only after a resume from it.
    place = "after a save" if mutant == "written from live tensors" else "mid"
    options = options_of(row)
    fault_runs.finish(fault_runs.folder / "whole", **options)
    expected = digest(fault_runs.folder / "whole")
    with pytest.raises(AssertionError):
        check_resume(fault_runs, fault_runs.folder / "run", place, expected=expected, mutant=mutant, **options)
    report_count(counts(**{mutant.replace(" ", "_"): "noticed"}))


def test_damage_notices(
    fault_runs: FaultRuns, monkeypatch: pytest.MonkeyPatch, report_count: Callable[[str], None]
) -> None:
    fault_runs.finish(fault_runs.folder / "run")
    monkeypatch.setattr(store, "read_verified", store.read_verified)
    mutants.PLANT["no manifest hash"]()
    accepted = check_damage(fault_runs.folder / "run", number=100)
    assert accepted > 0
    report_count(counts(no_manifest_hash="noticed", damaged_checkpoints_used=f"{accepted} of 100"))


def test_without_a_mutant_no_crash_is_noticed(fault_runs: FaultRuns) -> None:
    """The same checks without a fault pass; otherwise they would detect everything."""
    check_crashes(fault_runs, mutant=None, every=17)


@pytest.mark.parametrize(
    ("precision", "place"), [("fp32", "after a save"), pytest.param("fp16", "mid", marks=pytest.mark.slow)]
)
def test_without_a_mutant_no_resume_is_noticed(fault_runs: FaultRuns, precision: str, place: str) -> None:
    row = {**ROWS[0], "optimizer": "adamw", "ema": True, "workers": None, "schedule": "plateau", "micro_batch": 8}
    options = options_of({**row, "precision": precision})
    whole, run = fault_runs.folder / "whole", fault_runs.folder / "run"
    fault_runs.finish(whole, **options)
    check_resume(fault_runs, run, place, expected=digest(whole), **options)


def test_every_mutant_has_its_test() -> None:
    assert mutants.PLANT.keys() == POWER | CRASHES | HASHES | RESUMES
    assert len(mutants.PLANT) >= 10
    assert Path(__file__).with_name("test_power_cuts.py").read_text().count("no folder fsync") == 1
