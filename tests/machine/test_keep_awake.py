"""Keeping a Mac awake, with a simulated caffeinate: a shell program that waits for -w's process like the real one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAKE = """#!/bin/sh
echo "$$ $*" >> "$(dirname "$0")/started"
[ "$1 $2" = "-i -w" ] || exit 64
while kill -0 "$3" 2>/dev/null; do sleep 0.05; done
"""
KEEP = "import os, sys, time\nfrom whet.training.callbacks.basic import prevent_sleep\n"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "caffeinate").write_text(FAKE)
    (folder / "caffeinate").chmod(0o755)
    return folder


def start(code: str, tools: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    return subprocess.Popen([sys.executable, "-c", KEEP + code], env=env, stdout=subprocess.PIPE, text=True)


def eventually(is_true) -> bool:
    deadline = time.monotonic() + 600
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_true()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_caffeinate_runs_while_the_context_is_entered(tools: Path) -> None:
    process = start(
        "with prevent_sleep() as is_awake:\n"
        f"    while not os.path.exists({str(tools / 'started')!r}): time.sleep(0.01)\n"
        "    print(is_awake, os.getpid())\n"
        f"pid = int(open({str(tools / 'started')!r}).read().split()[0])\n"
        "try: os.kill(pid, 0); print('still there')\n"
        "except ProcessLookupError: print('gone')\n",
        tools,
    )
    reported, _ = process.communicate(timeout=600)
    _, *words = (tools / "started").read_text().split()
    assert words == ["-i", "-w", str(process.pid)]
    assert reported == f"True {process.pid}\ngone\n", "it ends with the run, not with the process"


def test_caffeinate_ends_when_the_run_is_killed(tools: Path) -> None:
    process = start("with prevent_sleep(): time.sleep(60)\n", tools)
    assert eventually((tools / "started").exists)
    assert eventually(lambda: bool((tools / "started").read_text()))
    caffeinate = int((tools / "started").read_text().split()[0])
    assert is_alive(caffeinate)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=600)
    assert eventually(lambda: not is_alive(caffeinate))


def test_caffeinate_is_optional(tools: Path) -> None:
    process = start(
        "with prevent_sleep(False) as is_awake: print(is_awake)\n"
        f"os.remove({str(tools / 'caffeinate')!r})\n"
        "with prevent_sleep() as is_awake: print(is_awake)\n",
        tools,
    )
    reported, _ = process.communicate(timeout=600)
    assert reported == "False\nFalse\n"
    assert not (tools / "started").exists()
