"""Speed of a puzzle step compared with the official implementation: same sizes, same weights, interleaved.

    python benchmarks/trm_speed.py --device cuda --reference CHECKOUT [--seconds 60] [--plans ...]

CHECKOUT is one of SamsungSAILMontreal/TinyRecursiveModels; its model, loss head and update of puzzle embeddings run
compiled as it does, with our AdamATan2, so that no other package is needed. Without it only our plans are timed. A step
is one global batch: forward, loss, backward, update, the state of all slots. Our plans are those that `whet train
puzzle` can have; each is named by its settings. Rounds in random order; ratios are computed within each round.
`--small` is a smoke test without compilation; its times mean nothing.
"""

import argparse
import importlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch._inductor.config
from torch import Tensor

from whet.autotune.statistics import median_interval, ratio_interval
from whet.autotune.step_bench import ProbeFailedError
from whet.base.units import format_bytes
from whet.config.resolve import resolve_config
from whet.data.batch import MicroBatch
from whet.device.open import current_machine
from whet.plan.plan import make_plan
from whet.recipes.puzzle.config import PuzzleConfig, Sizes, describe
from whet.recipes.puzzle.model import PuzzleModel, official_name, puzzle_loss
from whet.recipes.puzzle.recipe import PuzzleRecipe, make_model
from whet.step.optimizers import AdamATan2
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config

PLANS = (
    "compile=on attention=torch",
    "compile=on attention=whet",
    "compile=on graph=on attention=torch",
    "compile=on graph=on attention=whet",
)
SUDOKU = Sizes(num_tokens=11, length=81, num_puzzles=1)
LARGE = ("global_batch_size=768", "arch.mlp_t=false")
SMALL = ("global_batch_size=8", "arch.mlp_t=false", "arch.hidden_size=32", "arch.num_heads=2", "arch.L_cycles=2")


# --- ours ------------------------------------------------------------------------------------------------------------


def made_up(config: PuzzleConfig) -> dict[str, Tensor]:
    """Draw random tokens for eight global batches."""
    draw = torch.Generator().manual_seed(0)
    shape = (8 * config.global_batch_size, SUDOKU.length)
    inputs, labels = (torch.randint(1, SUDOKU.num_tokens, shape, generator=draw).short() for _ in range(2))
    return {"inputs": inputs, "labels": labels, "puzzles": torch.zeros(len(inputs), dtype=torch.int32)}


def our_bench(
    config: PuzzleConfig, model: PuzzleModel, data: dict[str, Tensor], device: str, precision: str
) -> LocalStepBench:
    machine, system_state = current_machine()
    size = config.global_batch_size
    workload = describe(config, SUDOKU).model_copy(update={"num_samples": 8 * size, "num_steps": 8})
    plan = make_plan(
        machine,
        workload,
        overrides={"device": device, "precision": precision, "micro_batch": size, "verify": "off"},
        system_state=system_state,
    )
    training = parse_training_config({"global_batch_size": size})
    choice = PuzzleRecipe().optimizer(config)
    return LocalStepBench(model, choice, data, training, loss=partial(puzzle_loss, model), plan=plan, may_compile=True)


@torch.no_grad()
def first_loss(model: PuzzleModel, data: dict[str, Tensor], device: Any, *, size: int, precision: str) -> float:
    """Return the loss of the first batch, with new slots."""
    micro = MicroBatch({name: column[:size] for name, column in data.items()}, np.arange(size)).map_tensors(device.put)
    model.eval()
    with device.autocast(precision):
        loss = float(puzzle_loss(model, micro))
    model.train()
    return loss


def settings_of(plan: str) -> dict[str, Any]:
    pairs = (word.split("=", 1) for word in plan.split())
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


# --- official --------------------------------------------------------------------------------------------------------


class Reference:
    """The official model, loss head and update of puzzle embeddings, with our AdamATan2, on the same batches."""

    def __init__(
        self,
        checkout: Path,
        config: PuzzleConfig,
        weights: PuzzleModel,
        data: dict[str, Tensor],
        device: Any,
        *,
        dtype: str,
        is_compiled: bool,
    ) -> None:
        stand_in_for_einops()
        sys.path.insert(0, str(checkout))
        theirs = importlib.import_module("models.recursive_reasoning.trm")
        losses = importlib.import_module("models.losses")
        sparse = importlib.import_module("models.sparse_embedding")
        arch, size = config.arch, config.global_batch_size
        sizes = {
            "batch_size": size,
            "seq_len": SUDOKU.length,
            "vocab_size": SUDOKU.num_tokens,
            "num_puzzle_identifiers": SUDOKU.num_puzzles,
            "puzzle_emb_ndim": arch.puzzle_width,
            "H_layers": 0,
            "forward_dtype": dtype,
            "no_ACT_continue": True,
        }
        same = (
            "hidden_size num_heads expansion L_layers H_cycles L_cycles halt_max_steps halt_exploration_prob "
            "pos_encodings mlp_t puzzle_emb_len"
        )
        sizes |= {name: getattr(arch, name) for name in same.split()}
        with torch.device(device.torch_device):
            head = losses.ACTLossHead(theirs.TinyRecursiveReasoningModel_ACTV1(sizes), "stablemax_cross_entropy")
        take_weights(head, weights)
        self._size, self._device, self._head = size, device, head
        self._optimizers = [
            AdamATan2(head.parameters(), 0.0, weight_decay=config.weight_decay),
            sparse.CastedSparseEmbeddingSignSGD_Distributed(
                head.model.inner.puzzle_emb.buffers(), lr=0.0, weight_decay=config.weight_decay, world_size=1
            ),
        ]
        self._call = torch.compile(head, dynamic=False) if is_compiled else head
        names = {"inputs": "inputs", "labels": "labels", "puzzles": "puzzle_identifiers"}
        self._batches = [
            {names[name]: device.put(column[at : at + size].int()) for name, column in data.items()}
            for at in range(0, 8 * size, size)
        ]
        with torch.device(device.torch_device):
            self._carry = head.initial_carry(self._batches[0])

    def step(self, index: int) -> float:
        self._device.sync()
        start = time.perf_counter()
        self._loss = self._step(self._batches[index % len(self._batches)])
        self._device.sync()
        return time.perf_counter() - start

    @property
    def loss(self) -> float:
        """The loss of the last step, mean over the slots."""
        return float(self._loss) / self._size

    def _step(self, batch: dict[str, Tensor]) -> Tensor:
        self._carry, loss, *_ = self._call(carry=self._carry, batch=batch, return_keys=[])
        (loss / self._size).backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


@torch.no_grad()
def take_weights(head: Any, ours: PuzzleModel) -> None:
    state = head.state_dict()
    for name, tensor in ours.state_dict().items():
        if not name.startswith("slots."):
            state[f"model.inner.{official_name(name)}"].copy_(tensor)


def stand_in_for_einops() -> None:
    """Replace einops: the official code only permutes four dimensions with it."""
    try:
        importlib.import_module("einops")
    except ImportError:
        module = ModuleType("einops")
        module.rearrange = lambda tensor, words: tensor.permute(  # type: ignore[attr-defined]
            *(words.split("->")[0].split().index(name) for name in words.split("->")[1].split())
        )
        sys.modules["einops"] = module


# --- comparison-------------------------------------------------------------------------------------------------------


def compare(arms: dict[str, Callable[[int], float]], *, seconds: float, batch: int, base: str) -> None:
    times: dict[str, list[float]] = {name: [] for name in arms}
    rng, end, index = random.Random(0), time.perf_counter() + seconds, 0
    while time.perf_counter() < end or index < 5:
        for name in rng.sample(list(arms), len(arms)):
            times[name].append(arms[name](index))
        index += 1
    for name, taken in times.items():
        result = median_interval(taken)
        ratios = [math.log(ours / theirs) for ours, theirs in zip(taken, times[base], strict=True)]
        gain = ratio_interval(ratios) if name != base else None
        beside = "" if gain is None else f"  {gain.median:.3f}x ({gain.low:.3f} to {gain.high:.3f}) of {base}"
        print(
            f"{name:55} {1e3 * result.median:8.2f} ms ({1e3 * result.low:.2f} to {1e3 * result.high:.2f}) "
            f"{batch / statistics.median(taken):8.0f} samples/s{beside}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--keys", nargs="*", default=[], help="more options, such as arch.mlp_t=true")
    parser.add_argument("--inductor", default="", help="options of the compiler for our plans, such as max_autotune=1")
    parser.add_argument("--profile", action="store_true", help="then print which kernels take the time")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    config = resolve_config(PuzzleConfig, ["size=9", *(SMALL if given.small else LARGE), *given.keys]).config
    options = settings_of(given.inductor)
    torch.manual_seed(0)
    model = make_model(config, SUDOKU, num_slots=config.global_batch_size)
    data = made_up(config)
    print(f"torch {torch.__version__}, {describe(config, SUDOKU).num_parameters:,} parameters, {config.arch}")
    with our_bench(config, model, data, given.device, given.precision) as bench:
        device = bench._build(bench.plan).device
        arms: dict[str, Callable[[int], float]] = {}
        if given.reference is not None:
            dtype = {"bf16": "bfloat16", "fp32": "float32", "tf32": "float32"}[given.precision]
            reference = Reference(
                given.reference, config, model, data, device, dtype=dtype, is_compiled=not given.small
            )
            start = time.perf_counter()
            reference.step(0)
            ours = first_loss(model, data, device, size=config.global_batch_size, precision=given.precision)
            print(f"reference: ready after {time.perf_counter() - start:.1f} s")
            print(f"the first loss: {reference.loss:.6f} there, {ours:.6f} here")
            for index in range(1, 6):
                reference.step(index)
            arms["reference"] = reference.step
        for plan in given.plans:
            try:
                with torch._inductor.config.patch({name: bool(value) for name, value in options.items()}):
                    prepared = bench.prepare(settings_of(plan), seconds=300)
            except ProbeFailedError as error:
                print(f"{plan}: {error.reason}")
                continue
            peak = format_bytes(prepared.peak_bytes() or 0)
            print(f"{plan}: ready after {prepared.preparation_seconds:.1f} s, peak {peak}")
            arms[f"whet {plan}"] = prepared.step
        base = "reference" if given.reference is not None else next(iter(arms))
        compare(arms, seconds=given.seconds, batch=config.global_batch_size, base=base)
        for name, step in arms.items() if given.profile else ():
            print_kernels(name, step)


def print_kernels(name: str, step: Callable[[int], float]) -> None:
    """Print the kernels that take the time of two steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for index in range(2):
            step(index)
    result = sorted(profiler.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    whole = sum(kernel.self_device_time_total for kernel in result)
    print(f"{name}: {whole / 2e3:.2f} ms a step in kernels")
    for kernel in result[:24]:
        print(f"  {kernel.self_device_time_total / 2e3:8.3f} ms  {kernel.count / 2:6g} x  {kernel.key[:150]}")


if __name__ == "__main__":
    main()
