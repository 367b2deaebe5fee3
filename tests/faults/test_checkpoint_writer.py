"""One write at a time, off the hot path; saving takes under 1 % of the time; complete checkpoints are kept."""

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import whet
from fault_runs import FaultRuns
from whet.base.errors import WhetError
from whet.checkpoint import store, writer
from whet.checkpoint.snapshot import Snapshot
from whet.checkpoint.writer import CheckpointWriter, PendingWrite, StagingBuffer
from whet.device.cpu import CpuDevice, CpuMemory
from whet.machine.known import load_machine
from whet.plan.plan import Plan, make_plan
from whet.plan.workload import Workload
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.callbacks.checkpoint_schedule import (
    MAX_SAVE_SHARE,
    SaveInterval,
    StepTimes,
    WriteMode,
    best_interval,
)

pytestmark = pytest.mark.torch


def snapshot(step: int) -> Snapshot:
    return Snapshot(tensors={"model/a": torch.full((300, 10), float(step))}, facts={"step": step})


def save_all(folder: Path, *steps: int) -> None:
    for step in steps:
        store.save_checkpoint(folder, snapshot(step), step=step)


# --- the writer ------------------------------------------------------------------------------------------------------


def test_a_write_runs_in_the_background_and_is_collected_once() -> None:
    writer, gate = CheckpointWriter(), threading.Event()

    def job(write: PendingWrite) -> None:
        gate.wait()
        write.num_bytes = 5

    writer.begin(3, job, in_background=True, start=time.perf_counter())
    assert writer.is_busy
    assert writer.collect(wait=False) is None
    gate.set()
    done = writer.collect(wait=True)
    assert done is not None
    assert (done.step, done.num_bytes, done.error) == (3, 5, None)
    assert writer.collect(wait=True) is None


@pytest.mark.parametrize("in_background", [True, False])
def test_a_failed_write_is_handed_over_and_not_raised(in_background: bool) -> None:
    def job(write: PendingWrite) -> None:
        raise WhetError("no")

    writer = CheckpointWriter()
    writer.begin(3, job, in_background=in_background, start=0.0)
    done = writer.collect(wait=True)
    assert done is not None
    assert isinstance(done.error, WhetError)


def test_the_buffer_is_reused_and_holds_a_copy() -> None:
    staging = StagingBuffer(CpuDevice())
    live = snapshot(1)
    held = staging.copy(live)
    live.tensors["model/a"].fill_(9)
    assert held.tensors["model/a"].eq(1).all()
    again = staging.copy(live)
    assert again.tensors["model/a"].data_ptr() == held.tensors["model/a"].data_ptr()


def test_a_device_that_shares_memory_writes_in_the_foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StagingBuffer(CpuDevice()).has_capacity(1000)
    assert not StagingBuffer(CpuDevice()).has_capacity(2**60)
    monkeypatch.setattr(CpuMemory, "is_shared_with_host", True)
    assert not StagingBuffer(CpuDevice()).has_capacity(1000)


def test_an_interrupted_process_joins_the_writer(fault_runs: FaultRuns) -> None:
    """A signal during a write: the write completes before the process exits."""
    (code, errors), started = fault_runs.end(fault_runs.folder / "run", width=512, stop_at={"3": "SIGINT"})
    assert code == 130, errors
    assert started.reported("save") == started.reported("saved")
    saved = [event.step for event in read_events(fault_runs.folder / "run", kinds=("checkpoint",))]
    assert saved == [0, 2, 3]
    events = list(read_events(fault_runs.folder / "run"))
    assert events[-1].kind == "end", "everything is logged before the end"


# --- when ------------------------------------------------------------------------------------------------------------


def plan(**overrides: float) -> Plan:
    workload = Workload(recipe="x", num_parameters=10, global_batch_size=8, num_samples=80)
    return make_plan(load_machine("m2-air-8gb"), workload, overrides=overrides)


@given(cost=st.floats(0, 1e5), least=st.floats(1, 1e4))
def test_saving_never_takes_more_than_its_share(cost: float, least: float) -> None:
    assert cost <= MAX_SAVE_SHARE * best_interval(cost, least=least) * (1 + 1e-9)


def test_the_interval_grows_with_the_cost_of_saving_unless_it_is_set() -> None:
    now = [0.0]
    ours, yours = (
        SaveInterval(plan(), clock=lambda: now[0]),
        SaveInterval(plan(checkpoint_minutes=1), clock=lambda: now[0]),
    )
    for pace in (ours, yours):
        for _ in range(8):
            pace.restart()
        pace.learn(10.0)
    assert (ours.interval, yours.interval) == (pytest.approx(1314.5, rel=1e-3), 60)
    now[0] = 61.0
    assert [pace.is_due(7, epochs_done=None) for pace in (ours, yours)] == ["no", "time"]
    ours.learn(0.001)
    assert ours.interval == 300, "and shrinks again"


@pytest.mark.parametrize(
    ("cost", "expected"),
    [(0.01, [30, 60, 120, 240, 300, 300]), (1.0, [100, 100, 120, 240, 415.7, 415.7]), (60.0, [6000] * 6)],
)
def test_the_first_intervals_are_short_and_saving_costs_one_percent(cost: float, expected: list[float]) -> None:
    now = [0.0]
    pace = SaveInterval(plan(), clock=lambda: now[0])
    assert pace.interval == 30, "a resumed run has no cost yet"
    intervals = []
    for _ in range(6):
        pace.restart()
        pace.learn(cost)
        intervals.append(pace.interval)
        assert pace.is_due(1, epochs_done=None) == "no"
        now[0] += pace.interval
        assert pace.is_due(1, epochs_done=None) == "time"
    assert intervals == pytest.approx(expected, abs=0.1)


def test_a_requested_save_is_due_and_a_failed_one_is_retried() -> None:
    now = [0.0]
    pace = SaveInterval(plan(checkpoint_steps=4), clock=lambda: now[0])
    assert [pace.is_due(step, epochs_done=None) for step in (3, 4)] == ["no", "requested"]
    assert pace.retry_after(5) == "in 30 s or after step 8"
    now[0] = 30.0
    assert pace.is_due(7, epochs_done=None) == "time"


def test_slower_steps_during_a_write_are_counted() -> None:
    now = [0.0]
    times = StepTimes(lambda: now[0])
    overhead = 0.0
    for seconds, is_busy, elsewhere in [(1, False, 0), (1, False, 5), (1, False, 0), (1.5, True, 0), (1.5, True, 3)]:
        now[0] += seconds + elsewhere
        overhead += elsewhere
        times.tick(is_writing=is_busy, overhead=overhead)
    assert times.slowed() == pytest.approx(1.0)
    assert times.slowed() == 0.0


def test_the_cheaper_way_is_taken_and_a_busy_moment_decides_nothing() -> None:
    ways = WriteMode()
    ways.learn(is_background=False, cost=2.0, seconds=2.0, num_bytes=100)
    for cost in (9.0, 4.0):
        assert ways.is_background, "tried twice"
        ways.learn(is_background=True, cost=cost, seconds=10.0, num_bytes=100)
    assert not ways.is_background
    ways.learn(is_background=False, cost=50.0, seconds=50.0, num_bytes=100)
    assert not ways.is_background
    ways.learn(is_background=True, cost=1.0, seconds=10.0, num_bytes=100)
    assert ways.is_background


@pytest.mark.parametrize(("cost", "is_background"), [(0.2, True), (6.0, False)])
def test_the_other_way_is_tried_only_where_steps_suffer(cost: float, is_background: bool) -> None:
    ways = WriteMode()
    for _ in range(2):
        ways.learn(is_background=True, cost=cost, seconds=10.0, num_bytes=100)
    assert ways.is_background == is_background


def test_a_save_that_is_due_while_one_is_written_is_skipped(fault_runs: FaultRuns) -> None:
    """A save is always due, and writing a large state takes longer than a step."""
    overrides = {"checkpoint_minutes": 1e-6}
    fault_runs.finish(fault_runs.folder / "run", width=768, samples=320, evaluates=False, overrides=overrides)
    saved = [event.step for event in read_events(fault_runs.folder / "run", kinds=("checkpoint",))]
    assert {0, 40} <= set(saved)
    assert len(saved) < 41
    assert saved == sorted(set(saved))


# --- retention -------------------------------------------------------------------------------------------------------


def test_the_last_the_best_and_milestones_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in range(0, 1001, 50):
        save_all(folder, step)
        writer.apply_retention(folder, acknowledged=step, keep=2, best=150 if step >= 150 else None, total_steps=1000)
    assert store.list_steps(folder) == [150, 900, 950, 1000]
    folder = tmp_path / "others"
    for step in range(0, 641, 20):
        save_all(folder, step)
        writer.apply_retention(folder, acknowledged=step, keep=2, best=None, total_steps=1000)
    assert store.list_steps(folder) == [500, 600, 620, 640]


def test_nothing_is_deleted_without_a_complete_newer_checkpoint(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2, 3, 4)
    (tmp_path / store.checkpoint_name(4) / store.TENSORS).write_bytes(b"torn")
    assert writer.apply_retention(tmp_path, acknowledged=4, keep=2, best=None, total_steps=None) == []
    shutil.rmtree(tmp_path / store.checkpoint_name(4))
    assert writer.apply_retention(tmp_path, acknowledged=4, keep=2, best=None, total_steps=None) == []


def test_damaged_ones_do_not_count_among_the_last(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2, 3, 4)
    (tmp_path / store.checkpoint_name(3) / store.MANIFEST).unlink()
    assert writer.apply_retention(tmp_path, acknowledged=4, keep=2, best=None, total_steps=None) == [1, 3]
    assert store.list_steps(tmp_path) == [2, 4]


def test_rejected_checkpoints_with_correct_sizes_do_not_count(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2, 3, 4)
    assert writer.apply_retention(tmp_path, acknowledged=4, keep=2, best=None, total_steps=None, rejected={3}) == [1, 3]
    assert store.list_steps(tmp_path) == [2, 4]


def test_a_nearly_full_disk_drops_milestones_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, 100, 200, 300, 310, 320)
    monkeypatch.setattr(writer.durable, "free_bytes", lambda path: 1000)
    writer.free_disk_space(tmp_path, num_bytes=400, keep=2, best=100)
    assert len(store.list_steps(tmp_path)) == 5
    writer.free_disk_space(tmp_path, num_bytes=600, keep=2, best=100, rejected={320})
    assert store.list_steps(tmp_path) == [100, 300, 310, 320], "rejected checkpoints do not count as the last two"
    writer.free_disk_space(tmp_path, num_bytes=600, keep=2, best=100)
    assert store.list_steps(tmp_path) == [100, 310, 320]


def test_a_finished_write_is_logged_after_the_next_step_and_no_longer_counts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 4), torch.randn(64, 1)
    options = {"global_batch_size": 8, "max_steps": 8, "overrides": {"checkpoint_steps": 3, "device": "cpu"}}
    writing = []
    with whet.Session(model, optimizer, data, run=tmp_path / "run", **options) as session:
        for batch in session:
            checkpointer = session.run.checkpointer
            assert checkpointer is not None
            while checkpointer._writer.is_busy:
                time.sleep(0.01)
            writing.append(checkpointer.is_writing)
            session.step(torch.nn.functional.mse_loss, batch)
            if session.state.step == 4:
                logged = [e.step for e in read_events(open_run(tmp_path / "run"), kinds=("checkpoint",))]
                assert logged[-1] == 3
    assert writing == [False, False, False, True, False, False, True, False]
