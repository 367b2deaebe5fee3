"""Run a port and its original in processes, stop and kill it, and compare."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ports.port import Port
from ports.record import PortRecord
from whet.base import env

STOP_AT, SAVE_AT, KILL_AT = 37, 30, 61


@dataclass(frozen=True, kw_only=True, slots=True)
class PortResult:
    """One row of the table."""

    port: Port
    commit: str
    num_steps: int
    loss_difference: float
    weight_difference: float
    lines: tuple[int, int]
    after_stop: str
    after_kill: str

    def row(self) -> str:
        source = f"[{self.port.repository}](https://github.com/{self.port.repository}/tree/{self.commit})"
        cells = [
            self.port.name,
            f"{source} `{self.port.script}`" if self.port.driver is None else source,
            str(self.num_steps),
            f"{self.loss_difference:.1e}" if self.loss_difference else "0",
            f"{self.weight_difference:.1e}" if self.weight_difference else "0",
            f"-{self.lines[0]} +{self.lines[1]}",
            self.after_stop,
            self.after_kill,
        ]
        return "| " + " | ".join(cells) + " |"


HEADER = (
    "| loop | source | steps | loss difference | weight difference | lines | SIGINT, resume | SIGKILL, resume |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def compare(port: Port, code: Path, folder: Path) -> PortResult:
    """Run a port and its original, and compare them."""
    lines = (0, 0)
    for kind in ("ported", "original", "stopped", "killed"):
        changed = port.copy_code(code, folder / kind / "code", is_ported=kind != "original")
        lines = changed if kind == "ported" else lines
    run(port, "ported", folder / "ported", folder / "ported.record")
    whole = PortRecord.load(folder / "ported.record")
    run(port, "original", folder / "original", folder / "original.record", "--replay", str(folder / "ported.record"))
    original = PortRecord.load(folder / "original.record")
    num_steps = len(whole.losses)
    if len(original.losses) != num_steps:
        sys.exit(f"{port.name}: {num_steps} steps ported, {len(original.losses)} in the original")
    return PortResult(
        port=port,
        commit=commit_of(code / port.repository.partition("/")[2]),
        num_steps=num_steps,
        loss_difference=max(
            abs(ours - theirs) / max(1.0, abs(theirs))
            for ours, theirs in zip(whole.losses, original.losses, strict=True)
        ),
        weight_difference=weight_difference(whole, original),
        lines=lines,
        after_stop=resume(port, folder / "stopped", whole, "--stop", f"{STOP_AT}:{int(signal.SIGINT)}"),
        after_kill=resume(
            port, folder / "killed", whole, "--save-at", str(SAVE_AT), "--stop", f"{KILL_AT}:{int(signal.SIGKILL)}"
        ),
    )


def resume(port: Port, folder: Path, whole: PortRecord, *options: str) -> str:
    """Stop a run, run it again, and compare its end with that of a whole run."""
    path = folder.with_suffix(".record")
    run(port, "ported", folder, path, *options, may_fail=True)
    run(port, "ported", folder, path)
    resumed = PortRecord.load(path)
    first = resumed.first_step
    if first == 0:
        return "did not resume"
    names = whole.tensors.keys() ^ resumed.tensors.keys()
    different = [name for name in whole.tensors.keys() - names if not bits_equal(whole, resumed, name)]
    if names or different:
        return f"from step {first}: {len(names) + len(different)} of {len(whole.tensors)} tensors differ"
    is_same = whole.losses[first:] == resumed.losses
    return f"bit-equal (from step {first})" if is_same else f"weights bit-equal, losses not (from step {first})"


def bits_equal(ours: PortRecord, theirs: PortRecord, name: str) -> bool:
    a, b = ours.tensors[name], theirs.tensors[name]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def weight_difference(ported: PortRecord, original: PortRecord) -> float:
    """Return the largest difference of the final parameters of the original from those of the port."""
    ours = {name: tensor for name, tensor in ported.tensors.items() if name.startswith("parameters/")}
    return max(float((ours[name] - tensor).abs().max()) for name, tensor in original.tensors.items())


def run(port: Port, kind: str, folder: Path, record: Path, *options: str, may_fail: bool = False) -> None:
    """Run one loop in a process, with its output in a file."""
    here = str(Path(__file__).parent.parent)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    path = os.pathsep.join(part for part in (here, env.read("PYTHONPATH")) if part)
    command = [sys.executable, "-m", "ports.child", port.name, kind, str(folder), str(record), *options]
    with folder.with_suffix(".log").open("a", encoding="utf-8") as log:
        done = subprocess.run(
            command,
            cwd=folder,
            env=env.child_environment(**threads, **offline, PYTHONPATH=path),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode and not may_fail:
        tail = folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-3000:]
        sys.exit(f"{port.name}: {' '.join(command)} failed:\n{tail}")


def commit_of(repository: Path) -> str:
    """Return the commit of a clone; "HEAD" for a folder without git."""
    asked = subprocess.run(["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "HEAD"
