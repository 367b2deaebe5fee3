"""A small recipe with all state that an exact resume restores, and faults that a proof must detect: mutant=NAME."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import nn

from whet.config.options import CommonConfig
from whet.plan.workload import Workload
from whet.recipes.recipe import Recipe

DRAWN = int.from_bytes(os.urandom(2), "little")
"""Return a different number in every process."""


class Config(CommonConfig):
    global_batch_size: PositiveInt = 8
    epochs: PositiveInt = 4
    lr: PositiveFloat = 1e-2
    ema: bool = True
    mutant: str = Field("", description="which fault is planted")


class Data:
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        x = torch.randn(96, 6, generator=draw)
        y = (x.sum(1) > 0).long()
        self.train, self.val, self.test = {"x": x, "y": y}, {"x": x[:32], "y": y[:32]}, {"x": x[32:64], "y": y[32:64]}


class ProvableRecipe(Recipe):
    name = "provable"
    Config = Config
    goal = "score"

    def __init__(self) -> None:
        self.mutant = ""
        self.calls = 0

    def describe(self, config: Config, data: Any = None) -> Workload:
        return Workload(recipe=self.name, num_parameters=1000, global_batch_size=8, num_samples=96, num_steps=48)

    def data(self, config: Config) -> Data:
        self.mutant = config.mutant
        plant(config.mutant)
        return Data()

    def model(self, config: Config, data: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 2))

    def loss(self, model: nn.Module, micro: Any) -> torch.Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(model(micro.x), micro.y)
        if self.mutant == "fails by itself" and self.calls > 2:
            raise ValueError("no such class")
        strange = {
            "hidden state": self.calls,
            "wall clock": time.time() % 7,
            "random while loaded": DRAWN,
            "order of a set": list({"north", "east", "south", "west", "up", "down"}).index("up"),
        }
        return loss * (1 + 1e-3 * strange.get(self.mutant, 0))

    def evaluate(self, model: nn.Module, micro_batches: Any) -> dict[str, float]:
        losses = [float(nn.functional.cross_entropy(model(micro.x), micro.y)) for micro in micro_batches]
        torch.rand(3)
        seconds = {"seconds": time.perf_counter()} if self.mutant == "unsteady metric" else {}
        return {"score": -sum(losses), **seconds}

    def metadata(self, config: Config, data: Any) -> dict[str, Any]:
        return {}


def recipe() -> Recipe:
    return ProvableRecipe()


def plant(mutant: str) -> None:
    """A fault in whet itself, in this process alone."""
    sys.path.insert(0, str(Path(__file__).parent))
    import mutants
    from whet.checkpoint import snapshot_restore

    if mutant == "average not restored":
        real = snapshot_restore._copy_into
        snapshot_restore._copy_into = lambda targets, taken, role: None if role == "ema" else real(targets, taken, role)
    elif mutant in mutants.PLANT:
        mutants.PLANT[mutant]()
