"""Duration of the checks before the first step: the model of the text recipe and small GPTs, on each available device.

    python benchmarks/verify_cost.py [--virtual-mac] [--repeats 3] [--threads 2]

The total is printed as a run reports it: the comparison with the CPU, the second pass, the causality check. With
--virtual-mac the device is simulated, and its computations take the CPU's time.
"""

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import whet
from whet.config.resolve import resolve_config
from whet.data.batch import MicroBatch
from whet.device import virtual_mac
from whet.device.open import UNAVAILABLE_REASONS
from whet.recipes.recipe import load_recipe
from whet.recipes.runner import train_recipe

VOCABULARY, LENGTH = 256, 128


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY)

    def outputs(self, micro: MicroBatch) -> Tensor:
        return self.head(self.blocks(self.embed(micro.tokens[:, :-1]) + self.place.weight))

    def loss(self, micro: MicroBatch) -> Tensor:
        return functional.cross_entropy(self.outputs(micro).flatten(0, 1), micro.tokens[:, 1:].flatten())


def verify_gpt(width: int, layers: int, *, device: str, threads: int) -> str:
    torch.manual_seed(0)
    model = Gpt(width, layers)
    data = {"tokens": torch.randint(0, VOCABULARY, (64, LENGTH + 1))}
    messages: list[str] = []
    whet.train(
        model,
        data,
        loss=model.loss,
        optimizer=whet.OptimizerChoice(lr=1e-3),
        global_batch_size=16,
        max_steps=1,
        device=device,
        outputs=model.outputs,
        overrides={"verify": "always", "threads": threads, "micro_batch": 16},
        on_event=lambda kind, fields: messages.append(str(fields.get("message"))) if kind == "plan" else None,
    )
    return next(line for line in messages if "verified" in line)


def verify_text(*, device: str, threads: int) -> str:
    recipe = load_recipe("text")
    messages: list[str] = []
    resolved = resolve_config(recipe.Config, ("max_steps=1", "verify=always", f"threads={threads}"))
    with tempfile.TemporaryDirectory() as folder:
        train_recipe(
            recipe,
            resolved,
            run=Path(folder, "run"),
            device=device,
            on_event=lambda kind, fields: messages.append(str(fields.get("message"))) if kind == "plan" else None,
        )
    return next((line for line in messages if "verified" in line), "nothing to verify here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--virtual-mac", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.virtual_mac:
        virtual_mac.install("m2-air-8gb")
    devices = ["cpu", *(kind for kind, reason in UNAVAILABLE_REASONS.items() if reason() is None)]
    print(f"torch {torch.__version__}, {args.threads} threads, {args.repeats} repeats")
    subjects = {
        "text recipe": lambda device: verify_text(device=device, threads=args.threads),
        "GPT 0.9 M": lambda device: verify_gpt(128, 4, device=device, threads=args.threads),
        "GPT 10.8 M": lambda device: verify_gpt(384, 6, device=device, threads=args.threads),
    }
    for name, verify in subjects.items():
        for device in devices:
            start = time.perf_counter()
            lines = [verify(device) for _ in range(args.repeats)]
            seconds = [float(match[1]) for line in lines if (match := re.search(r"\((\d+\.\d) s\)$", line))]
            cost = f"{statistics.median(seconds):.1f} s" if seconds else "-"
            what = "mps, simulated" if device == "mps" and args.virtual_mac else device
            print(
                f"{name:<12} {what:<15} {cost:>6}  (all {time.perf_counter() - start:.0f} s)  {lines[-1]}", flush=True
            )


if __name__ == "__main__":
    main()
