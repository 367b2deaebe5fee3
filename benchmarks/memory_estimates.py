"""Accuracy of memory estimates: the estimate, made without the device, and the peak that real steps allocate.

    python benchmarks/memory_estimates.py [--precisions fp32 bf16] [--only BERT] [--steps 3] [--out FILE]

Each model is estimated with fake tensors, then trained for a few real steps on the device by whet's Stepper with fused
AdamW and clipping, with and without activation checkpointing. The peak is that of the allocator
(`max_memory_allocated`), reset after the first step, which creates the optimizer state. cuBLAS workspaces are released
between models, so that rows are independent. Exit status 1 if one row is off by more than 10 %.
"""

import argparse
import gc
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from memory_models import CASES, Case, small

from whet.base.units import format_bytes
from whet.device.abstract import AbstractDevice
from whet.device.open import open_device
from whet.step.model_contexts import checkpoint_activations
from whet.step.optimizers import build_optimizer
from whet.step.step import Stepper
from whet.verify.memory.estimate import PARTS, MemoryEstimate, estimate_memory, estimate_trainable
from whet.verify.trainable import TrainableSpec

TOLERANCE = 0.10
LEAST_BYTES = 500 * 1024**2


@dataclass(frozen=True)
class Row:
    case: Case
    precision: str
    is_checkpointed: bool
    guess: MemoryEstimate | None = None
    seconds: float = 0.0
    measured: int = 0
    at_rest: int = 0
    """Bytes allocated between steps: weights, optimizer state, workspaces, without gradients."""
    error: str = ""

    @property
    def ratio(self) -> float | None:
        return self.guess.bytes_at(self.case.size) / self.measured if self.guess and self.measured else None

    @property
    def verdict(self) -> str:
        if self.error or self.ratio is None:
            return f"FAILED: {self.error or 'nothing was measured'}"
        return "ok" if abs(self.ratio - 1) <= TOLERANCE else "FALLS SHORT"

    def line(self) -> str:
        size, guess = self.case.size, self.guess
        start = f"| {self.case.name} | {size} | {self.precision} | {'on' if self.is_checkpointed else 'off'} |"
        if guess is None or not self.measured:
            return f"{start} | | | | | | {self.verdict} |"
        parts = guess.parts_at(size)
        shares = " + ".join(f"{parts[part] / 2**20:,.0f}" for part in PARTS)
        return (
            f"{start} {guess.bytes_at(size) / 2**20:,.0f} | {self.measured / 2**20:,.0f} | {self.ratio:.3f} "
            f"| {guess.phase_at(size)}: {shares} | {self.at_rest / 2**20:,.0f} | {self.seconds:.1f} | {self.verdict} |"
        )


HEAD = (
    "| model | samples | precision | recomputed | estimate, MB | measured, MB | ratio | estimated peak: phase, "
    f"{' + '.join(PARTS)} | measured at rest, MB | seconds to estimate | |\n|{' --- |' * 11}"
)


def rows(cases: list[Case], precisions: list[str], device: AbstractDevice, steps: int) -> Iterator[Row]:
    """Yield a row for each model and each training variant; a failure is a row too."""
    for case in cases:
        for precision in precisions:
            for is_checkpointed in (False, True) if case.has_blocks else (False,):
                try:
                    yield _row(case, precision, is_checkpointed, device, steps)
                except Exception as error:
                    traceback.print_exc(limit=-4)
                    reason = " ".join(str(error).split())[:80]
                    yield Row(case, precision, is_checkpointed, error=f"{type(error).__name__} {reason}")


def _row(case: Case, precision: str, is_checkpointed: bool, device: AbstractDevice, steps: int) -> Row:
    begin = time.monotonic()
    spec = TrainableSpec(name=case.name, make=case.trainable)
    guess = estimate_memory(spec, device=device.kind, activation_checkpointing=is_checkpointed, precision=precision)
    seconds = time.monotonic() - begin
    _forget(device)
    measured, at_rest = _measure(case, precision, is_checkpointed, device, steps)
    _forget(device)
    return Row(case, precision, is_checkpointed, guess, seconds, measured, at_rest)


def _measure(case: Case, precision: str, is_checkpointed: bool, device: AbstractDevice, steps: int) -> tuple[int, int]:
    torch.manual_seed(0)
    device.use_precision(precision)
    trainable = case.trainable()
    if device.kind == "cpu":
        # The CPU has no allocator statistics, so real tensors are tracked instead.
        options = {"device": "cpu", "precision": precision, "activation_checkpointing": is_checkpointed}
        return estimate_trainable(trainable, name=case.name, **options).bytes_at(case.size), 0
    device.put_model(trainable.model)
    optimizer = build_optimizer(trainable.optimizer, trainable.model, device, kernels="fused")
    stepper = Stepper(trainable.model, optimizer, device, precision=precision, clip=1.0)
    micro = trainable.make_batch(case.size)
    with checkpoint_activations(trainable.model) if is_checkpointed else nullcontext():
        for step in range(1, steps + 1):
            outcome = stepper(trainable.loss, [micro], num_samples=len(micro), step=step)
            device.sync()
            if step == 1:
                _reset_peak(device)
    if not bool(outcome.loss.isfinite()):
        raise RuntimeError(f"the loss is {float(outcome.loss)}")
    peak = device.memory.usage().peak
    stepper.abort()
    return peak or 0, device.memory.usage().allocated or 0


def _reset_peak(device: AbstractDevice) -> None:
    if device.kind != "cpu":
        torch.get_device_module(device.torch_device).reset_peak_memory_stats()


def _forget(device: AbstractDevice) -> None:
    gc.collect()
    if device.kind == "cuda" and hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()
    device.memory.empty_cache()
    _reset_peak(device)


def facts(device: AbstractDevice) -> list[str]:
    """Measure what libraries allocate besides tensors, to compare with the assumptions of the estimates."""
    if device.kind != "cuda":
        return []
    return [line for look in (_workspaces, _reserve) for line in _looked(look, device)]


def _looked(look, device: AbstractDevice) -> list[str]:  # type: ignore[no-untyped-def]
    try:
        return look(device)
    except Exception as error:
        return [f"- {look.__name__}: {type(error).__name__} {' '.join(str(error).split())[:120]}"]
    finally:
        _forget(device)


def _workspaces(device: AbstractDevice) -> list[str]:
    weight = torch.zeros(256, 256, device=device.torch_device, requires_grad=True)
    x = torch.zeros(256, 256, device=device.torch_device)
    before = device.memory.usage().allocated or 0
    y = x @ weight
    forward = (device.memory.usage().allocated or 0) - before - y.nbytes
    y.sum().backward()
    backward = (device.memory.usage().allocated or 0) - before - y.nbytes - weight.nbytes - forward
    return [
        f"- cuBLAS keeps {format_bytes(forward)} after a product, {format_bytes(backward)} more after its backward pass"
    ]


def _reserve(device: AbstractDevice) -> list[str]:
    size, length, width, layers = 32, 128, 1536, 3
    model = torch.nn.LSTM(width, width, layers, batch_first=True).to(device.torch_device)
    x = torch.zeros(size, length, width, device=device.torch_device, requires_grad=True)
    model(x)[0].sum().backward()
    model.zero_grad(set_to_none=True)
    device.sync()
    before = device.memory.usage().allocated or 0
    _reset_peak(device)
    y = model(x)[0]
    kept = (device.memory.usage().allocated or 0) - before - y.nbytes
    peak = (device.memory.usage().peak or 0) - before - y.nbytes - kept
    unit = size * length * width * 4
    _reset_peak(device)
    loss, held = y.sum(), device.memory.usage().allocated or 0
    loss.backward()
    more = (device.memory.usage().peak or 0) - held
    weights = sum(p.nbytes for p in model.parameters())
    return [
        f"- an LSTM of {layers} layers keeps {kept / unit:.2f} vectors a token besides its output (the estimate "
        f"assumes {6 * layers - 1}); its forward pass takes {peak / weights:.2f} times the weights for a while (1), "
        f"its backward pass {(more - 2 * unit) / weights:.2f} times (2, with the weights' gradients)"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, to try the script itself")
    parser.add_argument("--out", type=Path, help="writes the table here too")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or case.name.startswith(tuple(options.only))]
    cases = [small(case) for case in cases] if options.small else cases
    device = open_device(options.device).device
    name = torch.get_device_module(device.torch_device).get_device_name() if device.kind == "cuda" else device.kind
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}\n\n{HEAD}", flush=True)
    done = []
    for row in rows(cases, options.precisions, device, options.steps):
        done.append(row)
        print(row.line(), flush=True)
    short = [row for row in done if row.verdict != "ok"]
    large = {row.case.name for row in done if row.measured > LEAST_BYTES and row not in short}
    count = f"{len(done) - len(short)} of {len(done)} within {TOLERANCE:.0%}"
    closing = [f"{count}; models over 500 MB with a good row: {len(large)}", *facts(device)]
    print("", *closing, sep="\n")
    if options.out:
        lines = (f"{name}, torch {torch.__version__}", "", HEAD, *(row.line() for row in done), "", *closing)
        options.out.write_text("\n".join(lines) + "\n")
    sys.exit(1 if short else 0)


if __name__ == "__main__":
    main()
