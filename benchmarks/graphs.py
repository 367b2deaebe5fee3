"""Whole steps as CUDA graphs: speed, cost, and equality of training.

    python benchmarks/graphs.py [--seconds 8] [--tasks text chat conv] [--precision bf16]

Three models of usual shape on random data: a BERT-like classifier at a global batch of 32 with four lengths, a causal
language model, a residual net. Eager and replayed steps alternate on the same batches in random order; ratios are
computed within each pair. "in a row" is the time of a step without synchronization in between, as in a training. Then
50 losses of both are compared in fp32 without dropout, and an interrupted and resumed run with an uninterrupted one,
with dropout. `--simulated` is a smoke test on the CPU; its times mean nothing.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from workloads import Task, chat, conv

import whet
from whet.autotune.statistics import median_interval, ratio_interval
from whet.autotune.step_bench import ProbeFailedError
from whet.base.units import format_bytes
from whet.data.batch import MicroBatch, Ragged
from whet.device.cpu import CpuDevice
from whet.run.events import History
from whet.training.step_bench import NUM_BATCHES, LocalPreparedStep


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1, self.norm2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.drop(self.out(seen.transpose(1, 2).reshape(rows, length, width))))
        return self.norm2(x + self.drop(self.mlp(x)))


class Classifier(nn.Module):
    """An encoder of BERT's shape with a pooler and six classes."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int, longest: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 6)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(values.shape[1], device=values.device)
        mask = (places < lengths[:, None])[:, None, None, :]
        x = self.drop(self.norm(self.tokens(values) + self.places(places)))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(torch.tanh(self.pool(x[:, 0])))


def text(*, is_large: bool, dropout: float = 0.1) -> Task:
    """Text lengths of scientific sentences: 46 of 128 tokens on average."""
    torch.manual_seed(0)
    longest, vocabulary = (128, 30_522) if is_large else (32, 300)
    shape = {"width": 768, "layers": 12, "heads": 12} if is_large else {"width": 64, "layers": 2, "heads": 4}
    model = Classifier(vocabulary=vocabulary, longest=longest, dropout=dropout, **shape)
    lengths = (longest * (0.08 + 0.92 * torch.distributions.Beta(2.0, 4.6).sample((1600,)))).long().clamp(2, longest)
    samples = Ragged.of([torch.randint(0, vocabulary, (int(length),)) for length in lengths])

    def loss(micro: MicroBatch) -> Tensor:
        return functional.cross_entropy(model(micro.tokens.values, micro.tokens.lengths), micro.label)

    data = {"tokens": samples, "label": torch.randint(0, 6, (1600,))}
    training = {"global_batch_size": 32, "epochs": 100, "clip": 1.0}
    return Task(model=model, data=data, loss=loss, training=training)


TASKS = {"text": text, "chat": chat, "conv": conv}


def lengths_of(name: str) -> dict[str, Any]:
    return {} if name == "conv" else {"lengths": "bucketed"}


# --- speed -----------------------------------------------------------------------------------------------------------


def in_a_row(prepared: LocalPreparedStep, bench: Any, steps: int) -> float:
    """Return the seconds of a step without synchronization in between."""
    parts = prepared._parts
    parts.device.sync()
    start = time.perf_counter()
    for index in range(steps):
        batch = bench.batch(index)
        parts.stepper(bench.loss, prepared._cut(batch), num_samples=len(batch), step=index + 1)
    parts.device.sync()
    return (time.perf_counter() - start) / steps


def compare(name: str, *, device: str, is_large: bool, precision: str, seconds: float) -> None:
    task, rng = TASKS[name](is_large=is_large), random.Random(0)
    with task.bench(device=device, name=name, precision=precision, **lengths_of(name)) as bench:
        variants = {"eager": bench.prepare({}, seconds=60)}
        try:
            variants["graph"] = bench.prepare({"graph": "on"}, seconds=60)
        except ProbeFailedError as error:
            print(f"{name:5} not captured: {error.reason}")
            return
        times: dict[str, list[float]] = {variant: [] for variant in variants}
        rows: dict[str, list[float]] = {variant: [] for variant in variants}
        ratios: list[float] = []
        end = time.perf_counter() + seconds
        index = 0
        while time.perf_counter() < end or index < NUM_BATCHES:
            order = list(variants) if rng.random() < 0.5 else list(variants)[::-1]
            for variant in order:
                times[variant].append(variants[variant].step(index))
            ratios.append(torch.tensor(times["graph"][-1] / times["eager"][-1]).log().item())
            index += 1
        for _ in range(3):
            for variant, prepared in variants.items():
                rows[variant].append(in_a_row(prepared, bench, 2 * NUM_BATCHES))
        stepper = variants["graph"]._parts.stepper
        gain = ratio_interval(ratios)
        print(
            f"{name:5} {stepper.num_captured} shapes captured in {stepper.capture_seconds:.2f} s; "
            f"ready after {variants['graph'].preparation_seconds:.1f} s "
            f"(eager {variants['eager'].preparation_seconds:.1f} s)"
        )
        for variant, prepared in variants.items():
            result = median_interval(times[variant])
            batch = task.training["global_batch_size"]
            pace = statistics.median(rows[variant])
            print(
                f"      {variant}: {1e3 * result.median:8.3f} ms per step "
                f"({1e3 * result.low:.3f} to {1e3 * result.high:.3f}), "
                f"in a row {1e3 * pace:8.3f} ms, {batch / pace:8.0f} samples/s, "
                f"peak {format_bytes(prepared.peak_bytes() or 0)}"
            )
        print(f"      {gain.median:.2f}x ({gain.low:.2f} to {gain.high:.2f}) in {gain.repeats} pairs")


# --- equality of training --------------------------------------------------------------------------------------------


def run(name: str, folder: Path, *, device: str, graph: str, is_large: bool, max_steps: int, **how: Any) -> nn.Module:
    overrides = {"graph": graph, "precision": "fp32", "verify": "off", "micro_batch": 64, **lengths_of(name)}
    overrides |= how.pop("overrides", {})
    task = TASKS[name](is_large=is_large, **how)
    whet.train(
        task.model,
        task.data,
        loss=task.loss,
        optimizer=task.optimizer,
        run=folder,
        device=device,
        measure=False,
        on_event=None,
        overrides=overrides,
        max_steps=max_steps,
        seed=1,
        ema=True,
        **task.training,
    )
    return task.model


def losses(folder: Path) -> list[float]:
    return [event.fields["loss"] for event in History(whet.open_run(folder)).events(kinds=("step",))]


def replayed(folder: Path) -> int:
    return sum("graph" in e.fields["seconds"] for e in History(whet.open_run(folder)).events(kinds=("step",)))


def print_changes(folder: Path) -> None:
    """Print deviations from the plan."""
    for event in History(whet.open_run(folder)).events(kinds=("plan", "oom", "skip", "resume")):
        details = {key: event.fields[key] for key in ("message", "reason", "rollback_reason") if event.fields.get(key)}
        if details:
            print(f"      {folder.name}, step {event.step}: {details}")


def equality(name: str, folder: Path, *, device: str, is_large: bool) -> None:
    how: dict[str, Any] = {"device": device, "is_large": is_large, "max_steps": 50}
    how |= {"dropout": 0.0} if name == "text" else {}
    for kind in ("off", "again", "on"):
        run(name, folder / kind, graph="on" if kind == "on" else "off", **how)
    eager = losses(folder / "off")
    # Kernels with a nondeterministic order of summation differ from themselves.
    again, ours = (largest_difference(losses(folder / kind), eager) for kind in ("again", "on"))
    print(
        f"{name:5} 50 losses, {replayed(folder / 'on')} replayed: largest relative difference {ours:.2e} "
        f"(eager twice: {again:.2e})"
    )
    print_changes(folder / "on")


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))


def resumption(name: str, folder: Path, *, device: str) -> None:
    how: dict[str, Any] = {"device": device, "graph": "on", "is_large": False, "overrides": {"deterministic": "on"}}
    whole = run(name, folder / "whole", max_steps=40, **how)
    run(name, folder / "cut", max_steps=17, **how)
    cut = run(name, folder / "cut", max_steps=40, **how)
    is_same = losses(folder / "whole") == losses(folder / "cut")
    others = [n for n, t in whole.state_dict().items() if not torch.equal(t, cut.state_dict()[n])]
    print(
        f"{name:5} resumed after 17 of 40 steps, {replayed(folder / 'cut')} replayed: losses "
        f"{'the same bits' if is_same else 'differ'}, {len(others)} of {len(whole.state_dict())} tensors differ"
    )
    if not is_same:
        pairs = zip(losses(folder / "whole"), losses(folder / "cut"), strict=False)
        first = next((step for step, (one, other) in enumerate(pairs, start=1) if one != other), None)
        print(f"      the first loss that differs is that of step {first}")
    print_changes(folder / "whole")
    print_changes(folder / "cut")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--seconds", type=float, default=8.0, help="for the pairs of each task")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--simulated", action="store_true")
    given = parser.parse_args()
    device = "cpu" if given.simulated else "cuda"
    if given.simulated:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
        from fake_device import SimulatedGraphs

        CpuDevice.graphs = lambda _: SimulatedGraphs()  # type: ignore[method-assign]
        print("simulated on the CPU: times mean nothing")
    precision = "fp32" if given.simulated else given.precision
    is_large = not given.simulated
    print(f"torch {torch.__version__}, {device}, {precision}")
    for name in given.tasks:
        compare(name, device=device, is_large=is_large, precision=precision, seconds=given.seconds)
    with tempfile.TemporaryDirectory() as folder:
        for name in given.tasks:
            equality(name, Path(folder) / f"{name}-50", device=device, is_large=is_large)
            resumption(name, Path(folder) / f"{name}-resumed", device=device)


if __name__ == "__main__":
    main()
