"""A watched stderr: nothing is lost or reordered, the descriptor is restored, and the last output is included."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whet.device import stderr_watch

START = "import os, sys, subprocess, signal, time\nfrom whet.device.stderr_watch import StderrWatch\n"


def run(code: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", START + code], capture_output=True, timeout=600, **options)


def test_everything_passes_unchanged_and_in_order_also_from_children() -> None:
    done = run(
        "with StderrWatch('planted failure'):\n"
        "    for number in range(2000):\n"
        "        os.write(2, b'native %d \\xff\\x00\\n' % number)\n"
        "        print('python', number, file=sys.stderr)\n"
        "        if number % 500 == 0:\n"
        "            subprocess.run([sys.executable, '-c', f'import os; os.write(2, b\"child {number}\\\\n\")'])\n"
        "    os.write(2, b'\\0whe')\n"
        "print('after', file=sys.stderr)\n"
    )
    expected = b""
    for number in range(2000):
        expected += b"native %d \xff\x00\npython %d\n" % (number, number)
        expected += b"child %d\n" % number if number % 500 == 0 else b""
    assert done.stderr == expected + b"\0wheafter\n"
    assert done.returncode == 0


def test_large_writes_pass_unchanged() -> None:
    done = run("with StderrWatch('x y z'):\n    sys.stderr.write('abc\\n' * 500_000)\n")
    assert done.stderr == b"abc\n" * 500_000


def test_each_of_several_texts_is_reported_by_itself() -> None:
    done = run(
        "with StderrWatch('failed', 'a longer reason', 'never') as watch:\n"
        "    os.write(2, b'it failed')\n"
        "    print(sorted(watch.seen(wait=True)))\n"
        "    os.write(2, b', for a longer reason')\n"
        "    print(sorted(watch.seen(wait=True)))\n"
    )
    assert done.stdout.decode().splitlines() == ["['failed']", "['a longer reason', 'failed']"], done.stderr


@pytest.mark.parametrize(
    "pieces", [["a planted failure here\n"], ["a plan", "ted fail", "ure\n"], [*"planted failure"]]
)
def test_the_text_is_noticed_in_chunks_of_any_size(pieces: list[str]) -> None:
    done = run(
        "with StderrWatch('planted failure') as watch:\n"
        "    os.write(2, b'a planted fail, but not more\\n')\n"
        "    print(bool(watch.seen(wait=True)))\n"
        f"    for piece in {pieces!r}:\n"
        "        os.write(2, piece.encode())\n"
        "        watch.seen(wait=True)\n"
        "    print(bool(watch.seen(wait=True)))\n"
        "print(bool(watch.seen()))\n"
    )
    assert done.stdout.split() == [b"False", b"True", b"True"], done.stderr
    assert done.stderr == b"a planted fail, but not more\n" + "".join(pieces).encode()


def test_output_of_a_child_is_noticed() -> None:
    done = run(
        "with StderrWatch('planted failure') as watch:\n"
        "    subprocess.run(['sh', '-c', 'echo planted failure >&2'])\n"
        "    print(bool(watch.seen(wait=True)))\n"
    )
    assert done.stdout == b"True\n"


def test_a_mark_that_arrives_in_parts_is_taken_out_and_answered() -> None:
    command = [sys.executable, "-I", "-S", stderr_watch.__file__, "x"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as relay:
        assert relay.stdin
        assert relay.stdout
        assert relay.stderr
        for part in (b"before" + stderr_watch.MARK[:3], stderr_watch.MARK[3:] + b"after" + stderr_watch.MARK):
            relay.stdin.write(part)
            time.sleep(0.3)
        assert relay.stdout.read(2) == 2 * stderr_watch.PASSED
        relay.stdin.close()
        assert relay.stderr.read() == b"beforeafter"


def test_ctrl_c_leaves_the_relay_alone() -> None:
    code = START + (
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "with StderrWatch('planted failure') as watch:\n"
        "    os.killpg(0, signal.SIGINT); time.sleep(0.3)\n"
        "    print('planted failure', file=sys.stderr)\n"
        "    print(bool(watch.seen(wait=True)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600, start_new_session=True)
    assert done.stdout == b"True\n", done.stderr
    assert done.stderr == b"planted failure\n"


@pytest.mark.parametrize(
    ("end", "code"),
    [("os.abort()", -6), ("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("sys.exit(4)", 4)],
)
def test_the_last_output_arrives_however_the_process_ends(end: str, code: int) -> None:
    done = run(f"with StderrWatch('x'):\n    os.write(2, b'last words\\n' * 1000)\n    {end}\n")
    assert done.returncode == code
    assert done.stderr == b"last words\n" * 1000


def test_the_descriptor_is_the_old_one_again_and_nothing_is_left_open() -> None:
    done = run(
        "before, files = os.fstat(2), sorted(os.listdir('/dev/fd'))\n"
        "for _ in range(3):\n"
        "    with StderrWatch('x'): assert os.fstat(2) != before\n"
        "after = os.fstat(2)\n"
        "print((before.st_dev, before.st_ino) == (after.st_dev, after.st_ino))\n"
        "print(files == sorted(os.listdir('/dev/fd')))\n"
    )
    assert done.stdout == b"True\nTrue\n", done.stderr


def test_a_relay_that_is_killed_gives_standard_error_back() -> None:
    done = run(
        "with StderrWatch('x') as watch:\n"
        "    watch._relay.kill(); watch._relay.wait()\n"
        "    assert not watch.seen()\n"
        "    print('still heard', file=sys.stderr)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b"still heard\n"


def test_forked_process_may_outlive_the_stderr_watch() -> None:
    """A worker that exits later than the run; its output still arrives."""
    done = run(
        "has_left, leaves = os.pipe()\n"
        "with StderrWatch('x') as watch:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.read(has_left, 1); os.write(2, b'late\\n'); os._exit(0)\n"
        "    relay = watch._relay\n"
        "print('left', file=sys.stderr, flush=True); os.write(leaves, b'x'); os.waitpid(child, 0); relay.wait()\n"
    )
    assert done.stderr == b"left\nlate\n", done.stderr


def test_without_standard_error_nothing_changes() -> None:
    done = run("os.close(2)\nwith StderrWatch('x') as watch: print(bool(watch.seen(wait=True)))\n")
    assert done.stdout == b"False\n"


def test_a_progress_line_that_was_made_before_still_redraws_on_a_terminal(tmp_path: Path) -> None:
    code = START + (
        "from whet.training.callbacks.progress_line import ProgressLine\n"
        "line = ProgressLine('name')\n"
        "with StderrWatch('x'):\n"
        "    line('step', {'step': 1, 'samples': 1, 'epoch': 0, 'loss': 0.5})\n"
        "    os.write(2, b'native\\n')\n"
        "    line('end', {'state': 'done', 'step': 1})\n"
    )
    master, terminal = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stderr=terminal, cwd=tmp_path)
    os.close(terminal)
    reported = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:
            break
        if not part:
            break
        reported += part
    assert process.wait() == 0
    os.close(master)
    assert reported.startswith(b"\r\x1b[2Kname  1  epoch 1  loss 0.5  Ctrl-C saves and stops")
    assert b"native\r\n" in reported
