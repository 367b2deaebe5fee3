"""A run folder with everything in it that a page can show; every number in it is made up."""

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whet.run.events import EventLog
from whet.run.folder import Run, create_run

GB = 1024**3
LABELS = ["stdlib", "torch", "transformers", "numpy", "sympy", "networkx"]


@pytest.fixture(autouse=True, scope="module")
def _waits_for_no_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def trial(setting: str, value: Any, verdict: str, speedup: float | None, **more: Any) -> dict[str, Any]:
    """One trial of a plan.json."""
    interval = None if speedup is None else [speedup * 0.93, speedup * 1.06]
    step = None if speedup is None else 0.04 / speedup
    words = f"{setting}={value}: {verdict}"
    known = {"repeats": 5, "preparation_seconds": 1.0, "peak_bytes": 3 * GB, "against": {}}
    return {
        "setting": setting,
        "settings": {setting: value},
        "verdict": verdict,
        "note": words,
        "median_seconds": step,
        "baseline_seconds": None if step is None else 0.04,
        "speedup": speedup,
        "interval": interval,
        **known,
        **more,
    }


def plan(**more: Any) -> dict[str, Any]:
    """A plan.json with evidence."""

    def setting(value: Any, reason: str, source: str = "rule", **evidence: Any) -> dict[str, Any]:
        return {"value": value, "reason": reason, "source": source, "evidence": evidence}

    return {
        "workload": {"global_batch_size": 32, "num_steps": 600},
        "settings": {
            "device": setting("mps", "6.1x the CPU", "measured"),
            "precision": setting("fp32", "bf16 was 4 % slower here (5 repeats, spread 1 %)", "measured"),
            "micro_batch": setting(16, "32 would leave 0.3 GB free", "measured", step_bytes=3 * GB),
            "workers": setting(0, "your override; the rule chooses 2", "you"),
            "compile": setting("off", "38 s to compile, would save 21 s of this run", "measured"),
            "checkpoint_minutes": setting(3, "a save costs 0.4 s", rule="C1"),
        },
        "trials": [
            trial("micro_batch", 16, "faster", 1.18),
            trial("micro_batch", 8, "no gain", 0.91),
            trial("precision", "bf16", "no gain", 0.96),
            trial("workers", 2, "faster", 1.31),
            trial("compile", "on", "not worth it", 1.4, preparation_seconds=38.0),
            trial("threads", 4, "unclear", 1.08, interval=[0.9, 1.3]),
            trial("optimizer_kernels", "fused", "failed", None, repeats=0, peak_bytes=None),
            trial("plan", 16, "faster", 1.16, settings={"micro_batch": 16}),
        ],
        "warnings": ["dropout draws differ from those of another micro-batch"],
        **more,
    }


def simulated_run(path: Path, *, steps: int = 600, seed: int = 0, name: str = "text", **config: Any) -> Run:
    """Makes the run folder: two sessions, heat, memory pressure, one step out of memory, a NaN."""
    machine = {"name": "simulated", "chip": "Apple M2 (simulated)", "os": {"name": "macOS", "version": "15.1"}}
    run = create_run(
        path,
        recipe=name,
        config={"seed": seed, "lr": 1e-3, "epochs": 3, "arch": {"layers": 2}, **config},
        plan=plan(),
        machine=machine,
        versions={"whet": "0.1.0", "torch": "2.13.0", "numpy": None},
        command=["whet", "train", name, "--run", str(path.name)],
    )
    chance = random.Random(seed)
    now = [1_790_000_000.0]

    def clock() -> float:
        now[0] += 0.15
        return now[0]

    with EventLog(run, clock=clock) as log:
        log.append("start", step=0, total_steps=steps, goal="accuracy", mode="max")
        for step in range(1, steps // 2 + 20):
            _step(log, step, steps=steps, chance=chance)
        log.append("oom", step=steps // 2 + 19, reason="the step asked for 6.1 GB", action="micro_batch 16 to 8")
    now[0] += 8 * 3600
    with EventLog(run, clock=clock) as log:
        log.append("resume", step=steps // 2, exactness="bit-exact", lost_steps=19)
        for step in range(steps // 2 + 1, steps + 1):
            _step(log, step, steps=steps, chance=chance)
        log.append("eval", step=steps, test_accuracy=0.806, test_cross_entropy=0.61)
        log.append("checkpoint", step=steps, name=f"step-{steps:09d}", bytes=9_000_000, seconds=0.1, stall_seconds=0.01)
        log.append("end", step=steps, state="done", seconds={"save": 0.01})
    return run


def _step(log: EventLog, step: int, *, steps: int, chance: random.Random) -> None:
    share = step / steps
    slow = 1.4 if 0.3 < share < 0.45 else 1.0
    loss = math.nan if step == steps // 5 else 2.2 * math.exp(-4 * share) + 0.08 * chance.random() + 0.02
    seconds = {"data": 0.009, "transfer": 0.001, "forward": 0.012, "backward": 0.02, "optimizer": 0.003}
    seconds = {phase: slow * spent * (0.9 + 0.2 * chance.random()) for phase, spent in seconds.items()}
    norm = 1.5 + chance.random() + (6 if step % 97 == 0 else 0)
    log.append(
        "step", step=step, epoch=int(3 * share), samples=32 * step, lr=1e-3 * (1 - share), loss=loss, grad_norm=norm,
        seconds=seconds,
    )  # fmt: skip
    if step % 10 == 0:
        memory = {
            "allocated": int(2.4 * GB + 0.4 * GB * share), "reserved": int(3.1 * GB), "peak": int(3.4 * GB),
            "limit": int(5.3 * GB), "process": int(1.9 * GB), "used": int(6.5 * GB), "swap": int(0.2 * GB * share),
        }  # fmt: skip
        utilization = {"cpu": 30 + 10 * chance.random(), "process": 95.0, "gpu": 80 + 15 * chance.random()}
        log.append(
            "health",
            step=step,
            samples=32 * step,
            memory=memory,
            utilization=utilization,
            samples_per_second=32 / 0.045,
        )
    if step == int(0.3 * steps):
        reason = "steps take 1.4x as long; the sensor says hot"
        log.append("throttle", step=step, cause="heat", state="hot", reason=reason, factor=1.4)
    if step == int(0.45 * steps):
        log.append("throttle", step=step, cause="heat", state="cool", reason="steps are as fast as before")
    if step == int(0.8 * steps):
        log.append("pressure", step=step, level="warn", reason="the machine is short of memory")
    if step == int(0.88 * steps):
        log.append("pressure", step=step, level="normal", reason="there is enough memory again")
    if step % (steps // 6) == 0:
        right = int(90 + 60 * share)
        counts = [[right if a == b else chance.randrange(12) for b in range(6)] for a in range(6)]
        samples = [
            {"input": "Return the <b>eigenvalues</b> of a matrix.", "expected": "numpy", "predicted": "sympy"},
            {"input": "Open a file and return a stream.", "expected": "stdlib", "predicted": "torch"},
        ]
        scores = {"f1": [0.6 + 0.05 * n for n in range(6)], "support": [150 - n for n in range(6)]}
        log.append(
            "eval", step=step, accuracy=0.6 + 0.25 * share, cross_entropy=0.9 - 0.5 * share + 0.7 * share**3,
            confusion={"labels": LABELS, "counts": counts}, samples=samples,
            classes={"labels": LABELS, **scores},
        )  # fmt: skip
    if step % (steps // 3) == 0:
        log.append("epoch", step=step, epoch=int(3 * share), epoch_seconds=9 * slow, memory={"allocated": 3 * GB})
        log.append("checkpoint", step=step, name=f"step-{step:09d}", bytes=9_000_000, seconds=0.1, stall_seconds=0.01)
