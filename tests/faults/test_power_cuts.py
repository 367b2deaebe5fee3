"""Power cuts at any moment: every acknowledged checkpoint exists afterwards and is complete.

The cut is simulated: ext4 is shut down, so that nothing more reaches its medium, and replays its journal afterwards.
"""

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import power_cut
from fault_runs import ALL, BOUNDED, FaultRuns, counts, digest, published
from fork_server import ForkServer

pytestmark = pytest.mark.torch

SEED = 7
CUTS = {"bounded": 6, "all": 100}


@pytest.fixture
def disk(memory_folder: Path) -> Iterator[power_cut.Disk]:
    trial = memory_folder / "trial"
    trial.mkdir()
    reason = power_cut.why_not(trial)
    if reason is not None:
        pytest.skip(reason)
    made = power_cut.Disk(memory_folder)
    yield made
    made.close()


def test_a_mount_held_elsewhere_does_not_hide_the_replayed_disk(disk: power_cut.Disk) -> None:
    """Any other process may have copied the mounts before the cut."""
    holder = subprocess.Popen(["unshare", "--mount", "cat"], stdin=subprocess.PIPE)
    try:
        time.sleep(0.2)
        disk.cut()
        disk.remount()
        (disk.place / "file").write_text("written after the cut")
    finally:
        holder.communicate()


def cut_once(
    fault_runs: FaultRuns, disk: power_cut.Disk, run: Path, *, seconds: float, **options: object
) -> tuple[int, int]:
    """Run a process until the power fails. Return the acknowledged steps and those that are lost or torn."""
    started = fault_runs.start(run, **options)
    started.wait_for("ready")
    time.sleep(seconds)
    disk.cut()
    started.life.send(signal.SIGKILL)
    started.life.wait()
    disk.remount()
    acknowledged = [int(step) for step in started.reported("saved")]
    whole, torn = published(run)
    is_lost = bool(acknowledged) and max(whole, default=-1) < max(acknowledged)
    return len(acknowledged), len(torn) + is_lost


def small_runs(fork_server: ForkServer, folder: Path) -> FaultRuns:
    return FaultRuns(fork_server, folder, width=48, samples=96, epochs=2, overrides={"checkpoint_steps": 1})


@pytest.mark.parametrize("size", [BOUNDED, ALL])
def test_a_power_cut_loses_no_acknowledged_checkpoint_simulated(
    fork_server: ForkServer, disk: power_cut.Disk, memory_folder: Path, report_count: Callable[[str], None], size: str
) -> None:
    fault_runs = small_runs(fork_server, memory_folder)
    begin = time.monotonic()
    fault_runs.finish(memory_folder / "whole")
    seconds = time.monotonic() - begin
    expected = digest(memory_folder / "whole")
    draw = random.Random(SEED)
    acknowledged = lost = 0
    for number in range(CUTS[size]):
        # Three cuts per run, then it resumes to its end.
        run = disk.place / f"run-{number // 3}"
        safe, gone = cut_once(fault_runs, disk, run, seconds=draw.uniform(0, 0.5 * seconds))
        acknowledged, lost = acknowledged + safe, lost + gone
        if number % 3 == 2:
            fault_runs.finish(run)
            assert digest(run) == expected
    report_count(counts(cuts=CUTS[size], acknowledged_checkpoints=acknowledged, lost_or_torn=lost, seed=SEED))
    assert lost == 0
    assert acknowledged >= CUTS[size] / 2


@pytest.mark.slow
def test_a_power_cut_after_the_commit_of_the_journal_simulated(
    fork_server: ForkServer, disk: power_cut.Disk, memory_folder: Path, report_count: Callable[[str], None]
) -> None:
    """ext4 commits by itself seconds later; anything torn then would stay torn."""
    fault_runs = FaultRuns(
        fork_server, memory_folder, width=48, samples=96, epochs=10_000, overrides={"checkpoint_steps": 5}
    )
    draw = random.Random(SEED)
    lost = 0
    for number in range(6):
        lost += cut_once(fault_runs, disk, disk.place / f"run-{number}", seconds=draw.uniform(5.5, 7.5))[1]
    report_count(counts(cuts=6, lost_or_torn=lost))
    assert lost == 0


@pytest.mark.parametrize("mutant", ["no fsync", "no file fsync", "no folder fsync"])
def test_the_power_cuts_notice_a_missing_sync_simulated(
    fork_server: ForkServer, disk: power_cut.Disk, memory_folder: Path, report_count: Callable[[str], None], mutant: str
) -> None:
    fault_runs = small_runs(fork_server, memory_folder)
    draw = random.Random(SEED)
    for number in range(40):
        run = disk.place / f"run-{number}"
        if cut_once(fault_runs, disk, run, seconds=draw.uniform(0.02, 0.3), mutant=mutant)[1]:
            report_count(counts(**{mutant.replace(" ", "_"): f"noticed at cut {number + 1}"}))
            return
    pytest.fail(f"{mutant}: 40 power cuts noticed nothing")
