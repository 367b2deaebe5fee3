"""One process per run folder, until it releases the lock or dies."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whet.base.errors import WhetError
from whet.run import lock

HOLD = """
import sys, time
from pathlib import Path
from whet.run.lock import acquire
with acquire(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert err == ""
    return out


def test_a_second_process_is_refused_with_the_holder(tmp_path: Path) -> None:
    before = time.time()
    child = start(HOLD, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    began = time.monotonic()
    with pytest.raises(WhetError, match="another process is using the run") as caught:
        lock.acquire(tmp_path)
    assert time.monotonic() - began < lock._WAIT_SECONDS, "a live owner is not waited for"
    result = lock.holder(tmp_path)
    assert result is not None
    assert result.pid == child.pid
    assert before - 1 <= result.since <= time.time()
    assert f"process {child.pid}" in str(caught.value.got)
    assert "since 20" in str(caught.value.got)
    assert f"kill {child.pid}" in str(caught.value.try_)
    finish(child)
    with lock.acquire(tmp_path):
        pass


def test_a_killed_holder_releases_the_lock_at_once(tmp_path: Path) -> None:
    child = start(HOLD, tmp_path)
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert (tmp_path / lock.LOCK_FILE).read_text() != ""  # The process died without cleaning up,
    assert not lock.is_locked(tmp_path)  # but the lock is free.
    began = time.monotonic()
    with lock.acquire(tmp_path) as held:
        assert time.monotonic() - began < lock._WAIT_SECONDS
        assert held.holder.pid == os.getpid()


def test_reading_the_lock_does_not_release_it(tmp_path: Path) -> None:
    # Closing any descriptor of the file drops a lockf lock: the holder must not open it again.
    with lock.acquire(tmp_path):
        assert lock.is_locked(tmp_path)
        with pytest.raises(WhetError, match="another process"):
            lock.acquire(tmp_path)
        child = start(HOLD, tmp_path)
        out, err = child.communicate(timeout=120)
        assert out == ""
        assert f"process {os.getpid()}" in err
    assert not lock.is_locked(tmp_path)


def test_releasing_twice_is_fine_and_frees_once(tmp_path: Path) -> None:
    first = lock.acquire(tmp_path)
    first.release()
    second = lock.acquire(tmp_path)
    first.release()
    assert lock.is_locked(tmp_path)
    second.release()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_has_nor_frees_the_lock(tmp_path: Path) -> None:
    held = lock.acquire(tmp_path)
    child = os.fork()
    if child == 0:
        result = lock.holder(tmp_path)
        is_parents = result is not None and result.pid == os.getppid()
        held.release()
        os._exit(0 if is_parents else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "refused" in finish(start(TRY, tmp_path))
    assert (tmp_path / lock.LOCK_FILE).read_text() != ""
    held.release()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_sees_when_its_parent_released_the_lock(tmp_path: Path) -> None:
    held = lock.acquire(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(3 if lock.is_locked(tmp_path) else 0)
    held.release()
    os.write(write, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(read)
    os.close(write)


TRY = """
import sys
from pathlib import Path
from whet.base.errors import WhetError
from whet.run.lock import acquire
try:
    with acquire(Path(sys.argv[1])):
        print("got it")
except WhetError:
    print("refused")
"""

RACE = """
import os, sys, time
from pathlib import Path
from whet.base.errors import WhetError
from whet.run import lock
folder, won = Path(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
until = time.monotonic() + 100.0
while won < 20 and time.monotonic() < until:
    try:
        with lock.acquire(folder):
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))  # Fails when two are inside.
            time.sleep(0.001)
            os.unlink(folder / "inside")
            won += 1
    except WhetError:
        pass
    lock.is_locked(folder)
    time.sleep(0.002)
print(won)
"""


def test_never_two_holders_in_a_race(tmp_path: Path) -> None:
    racers = [start(RACE, tmp_path) for _ in range(3)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert [int(finish(racer)) for racer in racers] == [20, 20, 20]


def test_a_lock_that_is_free_again_in_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Like a reader that checks the lock, which holds it for some microseconds.
    real, refusals = fcntl.lockf, [3]

    def lockf(descriptor: int, how: int) -> None:
        if how & fcntl.LOCK_EX and refusals[0]:
            refusals[0] -= 1
            raise BlockingIOError(errno.EAGAIN, "busy")
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with lock.acquire(tmp_path):
        assert refusals == [0]


LOOK = """
import fcntl, os, sys, time
fcntl.lockf(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH)
print("on", flush=True)
time.sleep(0.6)
"""


def test_a_preempted_reader_of_the_lock_is_waited_for(tmp_path: Path) -> None:
    lock.acquire(tmp_path).release()
    looking = start(LOOK, tmp_path / lock.LOCK_FILE)
    assert looking.stdout is not None
    assert looking.stdout.readline() == "on\n"
    lock.acquire(tmp_path).release()
    finish(looking)


def test_a_reader_of_the_lock_does_not_keep_an_owner_out(tmp_path: Path) -> None:
    looking = start(
        "import sys,time\nfrom pathlib import Path\nfrom whet.run.lock import is_locked\nprint('on', flush=True)\n"
        "until=time.monotonic()+1.5\nwhile time.monotonic()<until: is_locked(Path(sys.argv[1]))",
        tmp_path,
    )
    lock.acquire(tmp_path).release()
    assert looking.stdout is not None
    looking.stdout.readline()
    for _ in range(200):
        lock.acquire(tmp_path).release()
    looking.kill()
    looking.communicate()


def test_a_missing_folder_or_lock(tmp_path: Path) -> None:
    assert lock.holder(tmp_path) is None
    assert lock.holder(tmp_path / "nowhere") is None
    with pytest.raises(WhetError, match="cannot lock"):
        lock.acquire(tmp_path / "nowhere")


def test_a_lock_on_a_removed_folder_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    old = lock.acquire(folder)
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    with lock.acquire(folder) as new:
        assert lock.holder(tmp_path / "moved") == old.holder
        assert lock.holder(folder) == new.holder
    old.release()
