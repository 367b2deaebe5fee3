"""Current load: heavy processes are named, nothing raises."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from whet.machine import load
from whet.machine.load import (
    ProcessSample,
    busy_processes,
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
