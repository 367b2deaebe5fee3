"""`whet train --nproc`, `whet export` and torchrun, with real launchers and signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tiny_bert import write_rows, write_tiny_bert
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch

WORDS = ("dropout=0", "global_batch_size=7", "epochs=3", "threads=1")
SMALL = ("arch.hidden_size=16", "arch.heads=2")
MODULE = ("-m", "whet")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "whet")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    words = ("fox", "fern", "flint")
    rows = ({"text": f"{'the ' * (n % 7)}{words[n % 3]} {n}", "label": words[n % 3]} for n in range(300))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def start(
    folder: Path, how: tuple[str, ...], table: Path, *words: str, keys: Sequence[str] = SMALL
) -> subprocess.Popen[str]:
    env = {**os.environ, "WHET_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    command = ["train", "text", f"data={table}", *keys, *WORDS, "--device", "cpu", "--no-measure", *words]
    return subprocess.Popen(
        [sys.executable, *how, *command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(run: Path) -> dict[int, float]:
    return {event.step: event.number("loss") for event in read_events(open_run(run), kinds=("step",))}


def wait_for_steps(run: Path, process: subprocess.Popen[str], *, number: int) -> None:
    deadline = time.monotonic() + 600
    while not (run / "run.json").exists() or len(losses(run)) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_launcher_under_nohup_survives_its_terminal() -> None:
    """torch's launcher would handle SIGHUP and end the training at logout."""
    program = (
        "import os, signal\nfrom whet.distributed import launcher\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "code = launcher.launch(['--version'], num_processes=1).code\n"
        "print(code, signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, signal.getsignal(signal.SIGTERM).__module__)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert ended.stdout.splitlines()[-1] == "0 True torch.distributed.elastic.multiprocessing.api", ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_launcher_saves_and_torchrun_resumes(tmp_path: Path, table: Path, number: signal.Signals) -> None:
    alone = start(tmp_path, MODULE, table, "--run", "alone", "--max-restarts", "0")
    first = start(tmp_path, MODULE, table, "--run", "two", "--nproc", "2")
    wait_for_steps(tmp_path / "two", first, number=4)
    first.send_signal(number)
    _, errors = first.communicate(timeout=600)
    assert first.returncode == 128 + number, errors
    assert errors.count("saved at step") == 1
    assert "--nproc 2" in errors
    again = start(tmp_path, TORCHRUN, table, "--run-dir", "two")
    out, errors = again.communicate(timeout=600)
    assert again.returncode == 0, errors
    assert errors.count("resumes from step") == 1
    assert "not bit-exact" not in errors
    assert out.count("all 3 epochs done") == 1
    alone.communicate(timeout=600)
    assert alone.returncode == 0
    one, two = losses(tmp_path / "alone"), losses(tmp_path / "two")
    assert len(one) == len(two) > 20
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_sharded_model_is_exported_to_one_file(tmp_path: Path, report_count: Callable[[str], None]) -> None:
    """An export of two sharded processes has the logits of an export of one process."""
    transformers = pytest.importorskip("transformers")
    model = write_tiny_bert(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", num_rows=90)
    keys = (f"model={model}", "lr=1e-3", "attention_dropout=0", "precision=fp32", "max_steps=20")
    logits = {}
    for name, more in (("one", ("--max-restarts", "0")), ("two", ("sharding=full", "--nproc", "2"))):
        process = start(tmp_path, MODULE, rows, *more, "--run", name, keys=keys)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        export = ("export", name, "--to", "transformers", "--checkpoint", "last", "--out", f"{name}-out")
        done = subprocess.run([sys.executable, *MODULE, *export], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert [file.name for file in (tmp_path / f"{name}-out").glob("*.safetensors")] == ["model.safetensors"]
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / f"{name}-out").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / f"{name}-out")
        batch = tokenizer(
            ["the fox of fox red", "some flint of the flint four", "a"], padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            logits[name] = theirs(**batch).logits
    shards = [*(tmp_path / "two" / "checkpoints").glob("*20/shard-*.safetensors")]
    assert len(shards) == 2, "each process has written a part"
    apart, size = float((logits["two"] - logits["one"]).abs().max()), float(logits["one"].abs().max())
    report_count(f"logits up to {size:.2f} differ by {apart:.1e} at most")
    assert apart < 1e-4 < 0.05 < size
