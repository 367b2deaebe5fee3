"""Ranks from the environment, and errors for unsupported combinations before torch is imported."""

from pathlib import Path

import pytest

from paths import Run
from whet.base.errors import LostRankError, UsageError
from whet.cli import output, ranks
from whet.distributed.heartbeat import StallDetector
from whet.distributed.ranks import RankInfo, check_not_mps, read_rank_info
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.plan.workload import Workload

pytestmark = pytest.mark.torch

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_ranks_are_read_from_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_rank_info() == RankInfo()
    for name, value in {**TORCHRUN, **ADDRESS}.items():
        monkeypatch.setenv(name, value)
    assert read_rank_info() == RankInfo(rank=1, size=3, local_rank=1, local_size=3)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(UsageError, match="contradict"):
        read_rank_info()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_incomplete_torchrun_variables_are_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Each of the processes would train its own run."""
    for name, value in {**TORCHRUN, **ADDRESS}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(UsageError, match=f"no {missing}"):
        read_rank_info()


def test_a_world_size_of_one_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert read_rank_info().is_single_process
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert read_rank_info().is_single_process


@pytest.mark.parametrize("port", ["abc", "0", "99999"])
def test_a_port_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    for name, value in {**TORCHRUN, **ADDRESS, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"MASTER_PORT={port}"):
        read_rank_info()


@pytest.mark.parametrize(
    ("number", "device", "is_mac", "is_refused"),
    [
        (2, "mps", True, True),
        (2, "mps", False, True),
        (2, "auto", True, True),
        (2, "auto", False, False),
        (2, "cpu", True, False),
        (1, "mps", True, False),
    ],
)
def test_several_processes_on_mps_are_refused(number: int, device: str, is_mac: bool, is_refused: bool) -> None:
    if not is_refused:
        check_not_mps(number, device=device, is_mac=is_mac)
        return
    with pytest.raises(UsageError) as refused:
        check_not_mps(number, device=device, is_mac=is_mac)
    reported = str(refused.value)
    for word in ("no collective", "one process", "--device cpu", "gloo", "would lift this"):
        assert word in reported


@pytest.mark.parametrize("way", ["nproc", "torchrun"])
def test_mps_is_refused_without_torch(whet: Run, way: str) -> None:
    environment = {**TORCHRUN, **ADDRESS, "RANK": "0", "LOCAL_RANK": "0"} if way == "torchrun" else {}
    words = [] if way == "torchrun" else ["--nproc", "2"]
    ended = whet("train", "text", "--device", "mps", *words, PYTHONPROFILEIMPORTTIME="1", **environment)
    assert ended.returncode == 2
    assert "several processes cannot train together on MPS" in ended.stderr
    assert " torch\n" not in ended.stderr, "torch was imported"


def test_an_error_on_another_rank_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two machines lacks a file: a rank that the first one does not stop must report its error."""
    waited: list[float] = []
    monkeypatch.setattr(output.time, "sleep", waited.append)
    monkeypatch.setattr(output, "rank", 1)
    output.error(LostRankError("gone"))
    assert (waited, capsys.readouterr().err) == ([], "")
    output.error(UsageError("the data is not there", got="data=/shared/talks", try_="a file"))
    reported = capsys.readouterr().err
    assert waited == [output._RANK_ZERO_GRACE_SECONDS]
    assert reported.splitlines()[:2] == ["error: rank 1: the data is not there", "  got: data=/shared/talks"]


def test_torch_is_silenced_before_the_recipe_imports_it(whet: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text("import os, sys\nsys.exit(os.environ.get('TORCH_CPP_LOG_LEVEL'))")
    first = {**TORCHRUN, **ADDRESS, "RANK": "0", "LOCAL_RANK": "0"}
    ended = whet("train", str(recipe), "--device", "cpu", **first)
    assert "ERROR" in ended.stderr


def test_puzzles_self_play_and_two_launchers_are_refused(warm_whet: Run) -> None:
    ended = warm_whet("train", "puzzle", "--nproc", "2", "--device", "cpu")
    assert (ended.returncode, "keeps its puzzle" in ended.stderr) == (2, True)
    ended = warm_whet("train", "hex", "selfplay=True", "--nproc", "2", "--device", "cpu")
    assert (ended.returncode, "self-play runs in one process" in ended.stderr) == (2, True)
    first = {**TORCHRUN, **ADDRESS, "RANK": "0", "LOCAL_RANK": "0"}
    ended = warm_whet("train", "text", "--nproc", "2", "--device", "cpu", **first)
    assert (ended.returncode, "already started the processes" in ended.stderr) == (2, True)


def test_more_processes_than_samples_or_than_the_memory_holds_are_refused(warm_whet: Run) -> None:
    """Checked before any process starts: a thousand would exhaust the machine."""
    ended = warm_whet("train", "text", "--nproc", "1000", "--device", "cpu")
    assert (ended.returncode, "1000 processes, global_batch_size=32" in ended.stderr) == (2, True)
    with pytest.raises(UsageError, match="more processes than samples") as refused:
        ranks._check_process_count(3, 1, global_batch_size=2)
    assert "at most 2 processes" in str(refused.value)
    ranks._check_process_count(2, 2, global_batch_size=2)
    with pytest.raises(UsageError, match="not enough memory"):
        ranks._check_process_count(10**6, 10**6, global_batch_size=10**7)


def test_a_restart_needs_a_run_folder(warm_whet: Run) -> None:
    first = {**TORCHRUN, **ADDRESS, "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}
    ended = warm_whet("train", "text", "--device", "cpu", **first)
    assert (ended.returncode, "--run-dir DIR" in ended.stderr) == (2, True)


def plan_of(world_size: int, *, parameters: int = 10**6, **overrides: object):
    workload = Workload(
        recipe="text",
        num_parameters=parameters,
        global_batch_size=32,
        activation_bytes=10**6,
        world_size=world_size,
        local_size=world_size,
    )
    return make_plan(load_machine("h200"), workload, overrides=overrides)


def test_a_plan_divides_the_batch_and_not_the_training() -> None:
    plan = plan_of(3)
    assert (plan.micro_batch, plan.accumulation) == (11, 1)
    assert plan.workload.global_batch_size == 32
    assert (plan.sharding, plan.bucket_mb) == ("off", 1)
    assert (plan_of(1).sharding, plan_of(1).bucket_mb) == ("unused", None)


def test_a_model_that_does_not_fit_is_sharded() -> None:
    plan = plan_of(8, parameters=2 * 10**10)
    assert plan.sharding == "full"
    assert "sharded" in plan.settings["sharding"].reason
    assert plan_of(8, parameters=2 * 10**10, sharding="off").sharding == "off"


def test_a_late_rank_is_detected_from_earlier_durations() -> None:
    now = [0.0]
    detector = StallDetector(is_single_process=False, clock=lambda: now[0])

    def is_late_after(seconds: float) -> bool:
        now[0] += seconds
        return detector.status().startswith("late ")

    assert not is_late_after(10_000), "outside steps"
    with detector.working("step 1"):
        assert not is_late_after(299)
        assert is_late_after(2)
        detector.progress()
        assert not is_late_after(299), "each micro-batch counts"
    for _ in range(40):
        with detector.working("step"):
            now[0] += 0.5
    with detector.working("step 41"):
        assert not is_late_after(19.9)
        assert is_late_after(0.2)
        with detector.waiting():
            now[0] += 10_000
            assert detector.status() == "waits"
        assert not is_late_after(19.9)
        detector.restart()
        detector.is_compiled = True
        assert not is_late_after(299)
    with detector.working("step 42"):
        assert not is_late_after(20 * 299), "after a slow step, another one is expected"
