"""whet train --nproc and torchrun as a user says them: real launchers, real signals, one run folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whet.run.events import read_events
from whet.run.folder import open_run

WORDS = ("arch.hidden_size=16", "arch.heads=2", "dropout=0", "global_batch_size=7", "epochs=3", "threads=1")
MODULE = ("-m", "whet")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "whet")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    words = ("fox", "fern", "flint")
    rows = ({"text": f"{'the ' * (n % 7)}{words[n % 3]} {n}", "label": words[n % 3]} for n in range(300))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def start(folder: Path, how: tuple[str, ...], table: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "WHET_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    said = ["train", "text", f"data={table}", *WORDS, "--device", "cpu", "--no-measure", *words]
    return subprocess.Popen(
        [sys.executable, *how, *said], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def losses(run: Path) -> dict[int, float]:
    return {event.step: event.number("loss") for event in read_events(open_run(run), kinds=("step",))}


def wait_for_steps(run: Path, process: subprocess.Popen[str], *, number: int) -> None:
    deadline = time.monotonic() + 120
    while not (run / "run.json").exists() or len(losses(run)) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_under_nohup_the_launcher_outlives_its_terminal() -> None:
    """torch's launcher would listen to SIGHUP all the same, and end the training when you log out."""
    program = (
        "import os, signal\nfrom whet.world import launching\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "code = launching.launch(['--version'], num_processes=1).code\n"
        "print(code, signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, signal.getsignal(signal.SIGTERM).__module__)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "0 True torch.distributed.elastic.multiprocessing.api", ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_saves_and_torchrun_goes_on(
    tmp_path: Path, table: Path, number: signal.Signals
) -> None:
    alone = start(tmp_path, MODULE, table, "--run", "alone", "--max-restarts", "0")
    first = start(tmp_path, MODULE, table, "--run", "two", "--nproc", "2")
    wait_for_steps(tmp_path / "two", first, number=4)
    first.send_signal(number)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 128 + number, errors
    assert errors.count("saved at step") == 1
    assert "--nproc 2" in errors
    again = start(tmp_path, TORCHRUN, table, "--run-dir", "two")
    out, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert errors.count("goes on from step") == 1
    assert "not bit-exact" not in errors
    assert out.count("done at step") == 1
    alone.communicate(timeout=120)
    assert alone.returncode == 0
    one, two = losses(tmp_path / "alone"), losses(tmp_path / "two")
    assert len(one) == len(two) > 20
    assert two == pytest.approx(one, rel=1e-4)
