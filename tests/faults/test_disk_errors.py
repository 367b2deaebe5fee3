"""A disk that refuses any single call: training continues, reports it once, and the next save succeeds."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fault_runs import ALL, BOUNDED, FaultRuns, Started, counts, digest, published
from fork_server import ForkServer, ProcessExit
from whet.run.events import read_events

pytestmark = pytest.mark.torch

ERRORS = ("ENOSPC", "EIO", "EROFS", "EDQUOT", "EMFILE")


def judge(run: Path, ended: ProcessExit, started: Started, *, expected: str) -> str:
    """Classify the effect of a refused call; anything but the three allowed outcomes fails."""
    assert "Traceback" not in ended.errors or "WhetError" in ended.errors, ended.errors
    assert published(run)[1] == []
    if ended.code == 0:
        assert digest(run) == expected
        warnings = list(read_events(run, kinds=("warning",)))
        assert len(warnings) == len(started.reported("warning")) <= 1
        for warning in warnings:
            assert {"reason", "path", "errno", "free_bytes", "retry"} <= warning.fields.keys()
        return "warned" if warnings else "unharmed"
    assert ended.code == 1, ended
    ready, over = started.reported("ready"), started.reported("over")
    if not over:
        # Before the first step, a disk error ends the run immediately.
        steps = started.reported("step")
        assert not ready or steps == ["1"], started.lines()
        return "refused at the start"
    assert "WhetError" in ended.errors
    return "error at the end"


@pytest.mark.parametrize("size", [BOUNDED, ALL])
def test_an_error_at_any_call_stops_no_training(
    fault_runs: FaultRuns, report_count: Callable[[str], None], size: str
) -> None:
    whole = fault_runs.finish(fault_runs.folder / "whole")
    expected, last = digest(fault_runs.folder / "whole"), int(whole.reported("end")[0].split(" ")[1])
    # After the end, only the log is closed.
    last += 4
    tried = [(at, ERRORS[at // 11 % 5]) for at in range(1, last + 1, 11)] + [(at, "EIO") for at in (last - 4, last - 1)]
    if size == "all":
        tried = [(at, error) for at in range(1, last + 1) for error in ERRORS]
    came_to: dict[str, int] = {}
    for at, error in tried:
        run = fault_runs.folder / f"{error}-{at}"
        ended, started = fault_runs.end(run, fault=error, at=at)
        what = judge(run, ended, started, expected=expected)
        came_to[what] = came_to.get(what, 0) + 1
        if ended.code != 0:
            # The same command ends with the same result.
            fault_runs.finish(run)
            assert digest(run) == expected, (at, error)
        shutil.rmtree(run)
    report_count(
        counts(calls=last, refused=len(tried), **{name.replace(" ", "_"): n for name, n in sorted(came_to.items())})
    )
    assert came_to["warned"] >= len(tried) / 6
    assert came_to["refused at the start"] > 0
    assert came_to["error at the end"] > 0


# --- real disks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate filesystem of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"no filesystem can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize(
    ("acts", "code"),
    [
        ({"3": "fill", "9": "empty"}, "ENOSPC"),
        pytest.param({"3": "ro", "9": "rw"}, "EROFS", marks=pytest.mark.slow),
        ({"3": "vanish"}, None),
    ],
    ids=["full for a while", "read-only for a while", "checkpoints removed by hand"],
)
def test_a_disk_that_fails_for_a_while(
    fork_server: ForkServer, small_disk: Path, tmp_path: Path, acts: dict[str, str], code: str | None
) -> None:
    fault_runs = FaultRuns(
        fork_server, tmp_path, width=64, samples=96, epochs=1, evaluates=False, overrides={"checkpoint_steps": 2}
    )
    fault_runs.finish(tmp_path / "whole")
    run = small_disk / "run"
    started = fault_runs.finish(run, act_at=acts)
    assert digest(run) == digest(tmp_path / "whole")
    warnings = started.reported("warning")
    if code is None:
        assert warnings == []
    else:
        assert len(warnings) == 1, "only one warning"
        assert warnings[0].startswith(code)
        assert "again in 60 s or after step" in warnings[0]
        assert str(run) in warnings[0]
        saved = [event.step for event in read_events(run, kinds=("checkpoint",))]
        assert not {4, 6, 8} & set(saved)
        assert {2, 10, 12} <= set(saved), "saved again when the disk works again"
        (back,) = [e for e in read_events(run, kinds=("checkpoint",)) if e.get("failures_before")]
        assert back.get("failures_before") >= 3


def test_a_disk_that_stays_full_is_an_error_at_the_end(
    fork_server: ForkServer, small_disk: Path, tmp_path: Path
) -> None:
    fault_runs = FaultRuns(
        fork_server, tmp_path, width=64, samples=96, epochs=1, evaluates=False, overrides={"checkpoint_steps": 2}
    )
    fault_runs.finish(tmp_path / "whole")
    run = small_disk / "run"
    ended, _ = fault_runs.end(run, act_at={"5": "fill"})
    assert ended.code == 1
    assert "the last state, after step 12, could not be saved" in ended.errors
    assert "step-000000004 is complete; 8 steps are lost" in ended.errors
    assert "resumes from step 4" in ended.errors
    assert max(published(run)[0]) == 4
    (small_disk / "ballast").unlink()
    assert fault_runs.finish(run).resumed_from == 4
    assert digest(run) == digest(tmp_path / "whole")
