"""Current load: heavy processes are named, the disk is timed briefly, nothing raises."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from whet.machine import load
from whet.machine.facts import SystemState
from whet.machine.load import (
    ProcessSample,
    busy_processes,
    complete_system_state,
    heaviest_processes,
    thread_times,
)

GIB = 1024**3


def test_heavy_processes_take_a_core_or_a_tenth_of_the_memory():
    before = {n: ProcessSample(f"p{n}", 10.0, 0) for n in range(1, 6)}
    after = {
        1: ProcessSample("p1", 10.21, 0),  # a whole core
        2: ProcessSample("p2", 10.1, 0),  # half a core
        3: ProcessSample("p3", 10.0, 2 * GIB),  # an eighth of the memory
        4: ProcessSample("p4", 10.9, 0),  # four cores
        5: ProcessSample("other", 99.0, 0),  # the pid was reused by another process
        6: ProcessSample("new", 99.0, 0),
    }
    result = heaviest_processes(before, after, seconds=0.2, memory_bytes=16 * GIB)
    assert [(p.name, p.pid) for p in result] == [("p4", 4), ("p1", 1), ("p3", 3)]
    assert result[0].cpu_percent == 450.0
    assert result[2].memory_bytes == 2 * GIB


def test_unknown_memory_names_only_busy_ones_and_at_most_five():
    before = {n: ProcessSample("p", 0.0, 2**50) for n in range(9)}
    assert heaviest_processes(before, before, seconds=0.2, memory_bytes=None) == ()
    after = {n: ProcessSample("p", 1.0 + n, 0) for n in range(9)}
    assert [p.pid for p in heaviest_processes(before, after, seconds=1, memory_bytes=None)] == [8, 7, 6, 5, 4]


def test_busy_processes_are_reported_except_our_children(monkeypatch):
    monkeypatch.setattr(load, "BUSY_PERCENT", 5)  # a loaded machine may not give it a whole core
    monkeypatch.setattr(load, "MAX_PROCESSES", 1000)
    loop = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"
    # A grandchild whose parent has ended counts as another process.
    start = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', {loop!r}], stdout=2).pid)"
    neighbour = int(subprocess.run([sys.executable, "-S", "-c", start], stdout=subprocess.PIPE, check=True).stdout)
    own = subprocess.Popen([sys.executable, "-S", "-c", loop])
    try:
        seen: set[int] = set()
        for _ in range(10):
            seen |= {p.pid for p in busy_processes(memory_bytes=None)}
            if neighbour in seen:
                break
        assert neighbour in seen
        assert own.pid not in seen
    finally:
        own.kill()
        own.wait()
        psutil.Process(neighbour).kill()


def test_inaccessible_processes_are_skipped(monkeypatch):
    class Hidden:
        pid = 4242

        def oneshot(self):
            raise psutil.AccessDenied(self.pid)

    class Gone(Hidden):
        def oneshot(self):
            raise psutil.NoSuchProcess(self.pid)

    monkeypatch.setattr(psutil, "process_iter", lambda: iter([Hidden(), Gone()]))
    assert busy_processes(memory_bytes=GIB, sample_seconds=0) == ()

    def denied():
        raise psutil.AccessDenied(1)
        yield

    monkeypatch.setattr(psutil, "process_iter", denied)
    assert busy_processes(memory_bytes=GIB, sample_seconds=0) == ()


def test_known_values_are_kept_and_others_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(load, "busy_processes", lambda **_: ())
    known = SystemState(memory_available_bytes=7, swap_used_bytes=0, power_source="battery", thermal="heavy")
    result = complete_system_state(known, folder=tmp_path)
    assert (result.memory_available_bytes, result.swap_used_bytes) == (7, 0)
    assert (result.power_source, result.thermal) == ("battery", "heavy")
    measured = complete_system_state(SystemState(), folder=tmp_path)
    assert measured.memory_available_bytes > 2**20
    assert SystemState.from_json(measured.as_json(), where="here") == measured


def test_system_state_is_unknown_if_psutil_fails(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise psutil.Error

    for name in ("virtual_memory", "swap_memory", "process_iter", "Process", "sensors_battery"):
        monkeypatch.setattr(psutil, name, fail, raising=False)
    result = complete_system_state(SystemState(), folder=tmp_path / "missing")
    assert result == SystemState()


@pytest.mark.parametrize(
    ("battery", "source"),
    [(None, None), (True, "mains"), (False, "battery")],
)
def test_power_by_psutil(battery, source, monkeypatch):
    class Battery:
        power_plugged = battery

    monkeypatch.setattr(psutil, "sensors_battery", lambda: None if battery is None else Battery(), raising=False)
    assert load._power_source() == source


def test_the_disk_is_timed_briefly_and_leaves_nothing(tmp_path, monkeypatch):
    # The speed of a shared disk is not under our control.
    monkeypatch.setattr(load.os, "fsync", lambda file: None)
    start = time.monotonic()
    speed = load.disk_read_speed(tmp_path)
    assert time.monotonic() - start < 3
    assert speed is None or 0 < speed < load._CACHE_SPEED
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_read_and_nothing_is_written(tmp_path, monkeypatch):
    (tmp_path / "data.bin").write_bytes(b"x" * (5 * 1024**2))
    (tmp_path / "small.bin").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data.bin")
    monkeypatch.setattr(load, "_write_random", lambda _: pytest.fail("wrote a file"))
    monkeypatch.setattr(load, "_CACHE_SPEED", float("inf"))
    assert load._largest_file(tmp_path) == tmp_path / "data.bin"
    assert load.disk_read_speed(tmp_path) > 0


def test_a_slow_disk_stops_at_the_deadline(tmp_path, monkeypatch):
    (tmp_path / "data.bin").write_bytes(b"x" * (8 * 1024**2))
    real, chunks = load.os.read, []

    def slow(file, size):
        time.sleep(0.06)
        chunks.append(size)
        return real(file, size)

    monkeypatch.setattr(load.os, "read", slow)
    speed = load.disk_read_speed(tmp_path)
    assert 1 <= len(chunks) <= 4
    assert 0 < speed < 18e6


def test_reads_from_a_cache_are_discarded(tmp_path, monkeypatch):
    (tmp_path / "data.bin").write_bytes(b"x" * (8 * 1024**2))
    monkeypatch.setattr(load, "_CACHE_SPEED", 1.0)
    assert load.disk_read_speed(tmp_path) is None


@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), OSError(28, "No space left on device")])
def test_the_speed_of_a_read_only_folder_is_unknown(tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(load.tempfile, "TemporaryFile", fail)
    assert load.disk_read_speed(tmp_path) is None


def test_the_speed_of_a_missing_folder_is_unknown(tmp_path):
    assert load.disk_read_speed(tmp_path / "missing") is None
    assert load.disk_read_speed(Path(__file__)) is None


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("7000000000 2500000000 31\n", (7.0, 2.5, 31)),
        ("0 0 0\n", (0.0, 0.0, 0)),
        ("7 x 31\n", None),
        ("", None),
        (None, None),
    ],
)
def test_the_times_of_a_thread(tmp_path: Path, text: str | None, times: tuple[float, float, int] | None) -> None:
    folder = tmp_path / "proc/self/task/123"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "schedstat").write_text(text)
    assert thread_times(123, root=tmp_path) == times


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts them")
def test_the_times_of_a_thread_leave_out_sleep() -> None:
    before = thread_times(threading.get_native_id())
    time.sleep(0.3)
    after = thread_times(threading.get_native_id())
    if before is None or after is None:
        pytest.skip("this kernel does not count them")
    assert 0 <= after.running - before.running < 0.2
