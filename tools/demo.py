"""The demo of `make demo`: train a small text classifier, kill it in the middle, and use the result.

`python tools/demo.py [--device cpu]` shows a plan, a kill and a resume, the result, and what to do next on one screen.
The training process is killed with SIGKILL, as the system does when memory runs out; `whet train` restarts it.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

RUN = Path("runs/demo")
KILL_AT = 700
"""The step after which the training is killed. The last checkpoint before it is that of step 600."""
SETTINGS = ("checkpoint_steps=300",)
QUESTIONS = ("Return the eigenvalues of a matrix.", "Open a file and return a stream.")


def main() -> int:
    """Train, kill, resume and predict; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    device = parser.parse_args().device
    training = start("train", "text", *SETTINGS, "--run", str(RUN), "--fresh", "--device", device)
    kill_once(training)
    if training.wait():
        return training.returncode
    return start("predict", str(RUN), *QUESTIONS).wait()


def start(*words: str) -> subprocess.Popen[bytes]:
    """Print a command and start it."""
    print(f"\n$ {shlex.join(('whet', *words))}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "whet", *words])


def kill_once(training: subprocess.Popen[bytes]) -> None:
    """Kill the process that trains, once it has made enough steps. Its parent, `whet train`, is not killed."""
    begun = time.time()
    while training.poll() is None:
        step, pid = last_step(begun), holder()
        if step >= KILL_AT and pid is not None:
            os.kill(pid, signal.SIGKILL)
            clear = "\r\x1b[2K" if sys.stdout.isatty() else ""
            print(f"{clear}$ kill -9 {pid}    # at step {step:,}, as the system does when memory runs out", flush=True)
            return
        time.sleep(0.1)


def last_step(begun: float) -> int:
    """Return the newest step in the log of this training; 0 if there is none."""
    try:
        with (RUN / "events.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 10_000))
            lines = file.read().splitlines()[:-1]
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        # An older demo may have left its run, which --fresh replaces.
        if event["kind"] == "step" and event["time"] > begun:
            return int(event["step"])
    return 0


def holder() -> int | None:
    """Return the process that holds the lock of the run."""
    try:
        return int(json.loads((RUN / "lock").read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None


if __name__ == "__main__":
    sys.exit(main())
