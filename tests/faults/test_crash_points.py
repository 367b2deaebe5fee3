"""kill -9 before and after every call that changes the disk: at the start, while saving, deleting and resuming."""

import itertools
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fault_runs import ALL, BOUNDED, FaultRuns, assert_kept, counts, digest, leftovers

pytestmark = pytest.mark.torch

EVERY = {"bounded": 41, "all": 1}


def num_calls(run_end: list[str]) -> int:
    return int(run_end[0].split(" ")[1])


@pytest.mark.parametrize("size", [BOUNDED, ALL])
def test_killed_at_every_call_of_a_whole_run(
    fault_runs: FaultRuns, report_count: Callable[[str], None], size: str
) -> None:
    whole = fault_runs.finish(fault_runs.folder / "whole")
    expected, last = digest(fault_runs.folder / "whole"), num_calls(whole.reported("end"))
    hit = in_thread = left = 0
    for at, fault in itertools.product(range(1, last + 1, EVERY[size]), ("before", "after")):
        run = fault_runs.folder / f"{fault}-{at}"
        (code, errors), started = fault_runs.end(run, fault=fault, at=at)
        assert code in (0, -signal.SIGKILL), errors
        hit += code != 0
        in_thread += any("whet-checkpoint" in line for line in started.reported("fault"))
        left += leftovers(run)
        assert_kept(run, started)
        fault_runs.finish(run)
        assert digest(run) == expected, (at, fault)
        assert leftovers(run) == 0
        shutil.rmtree(run)
    report_count(counts(calls=last, killed_at=hit, in_the_writing_thread=in_thread, **{"left-overs_seen": left}))
    assert hit >= 2 * (last - 12) / EVERY[size] - 4
    assert in_thread > 0
    assert left > 0


@pytest.mark.parametrize("size", [BOUNDED, ALL])
def test_killed_at_every_call_of_a_resume(
    fault_runs: FaultRuns, report_count: Callable[[str], None], size: str
) -> None:
    fault_runs.finish(fault_runs.folder / "whole")
    expected = digest(fault_runs.folder / "whole")
    stopped = fault_runs.folder / "stopped"
    (code, errors), _ = fault_runs.end(stopped, stop_at={"3": "SIGKILL"})
    assert code == -signal.SIGKILL, errors
    # Include the leftovers of a power cut, so that their removal is among the calls.
    shutil.copytree(
        stopped / "checkpoints" / "step-000000000", stopped / "checkpoints" / ".tmp-step-000000002-1-0123abcd"
    )
    copy = fault_runs.folder / "copy"
    shutil.copytree(stopped, copy)
    last = num_calls(fault_runs.finish(copy).reported("end"))
    shutil.rmtree(copy)
    hit = 0
    for at, fault in itertools.product(range(1, last + 1, EVERY[size]), ("before", "after")):
        run = fault_runs.folder / f"{fault}-{at}"
        shutil.copytree(stopped, run)
        (code, errors), started = fault_runs.end(run, fault=fault, at=at)
        assert code in (0, -signal.SIGKILL), errors
        hit += code != 0
        assert_kept(run, started)
        fault_runs.finish(run)
        assert digest(run) == expected, (at, fault)
        shutil.rmtree(run)
    report_count(counts(calls_of_a_resumed_life=last, killed_at=hit))
    assert hit >= 2 * (last - 12) / EVERY[size] - 4


@pytest.mark.parametrize("size", [BOUNDED, ALL])
def test_short_writes_change_nothing(fault_runs: FaultRuns, report_count: Callable[[str], None], size: str) -> None:
    last = num_calls(fault_runs.finish(fault_runs.folder / "whole").reported("end"))
    expected = digest(fault_runs.folder / "whole")
    for at in range(3, last + 1, EVERY[size]):
        run: Path = fault_runs.folder / f"short-{at}"
        started = fault_runs.finish(run, fault="short", at=at)
        assert started.reported("warning") == []
        assert digest(run) == expected
        shutil.rmtree(run)
    report_count(counts(calls_with_a_short_write=len(range(3, last + 1, EVERY[size]))))
