"""A recipe to adapt. It runs without changes: `whet plan FILE`, `whet train FILE`, `whet train FILE lr=1e-2 epochs=5`.

whet calls the methods below. It handles devices, micro-batches, checkpoints, resuming and reports.
"""

import torch
from pydantic import Field, PositiveInt
from torch import nn

from whet.config.options import CommonConfig
from whet.recipes.recipe import Recipe


class Config(CommonConfig):
    """Options of this recipe, in addition to those that every recipe has (docs/keys.md).

    whet handles most of those, but `data`, `data_paths` and `dropout` have an effect only if your methods use them.
    """

    defaults = {"epochs": 5, "lr": 1e-2}
    hidden_size: PositiveInt = Field(32, description="width of the hidden layer")


class Data:
    """Three splits. Each is a dict of tensors (as here), a map-style dataset, or an iterable of samples."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(2_000, 2, generator=generator) * 2 - 1
        y = (x[:, 0] * x[:, 1] > 0).long()
        self.train = {"x": x[:1_600], "y": y[:1_600]}
        self.val = {"x": x[1_600:1_800], "y": y[1_600:1_800]}
        self.test = {"x": x[1_800:], "y": y[1_800:]}


class MyRecipe(Recipe):
    name = "mine"
    Config = Config
    goal = "accuracy"  # The metric that selects the best checkpoint. Higher is better.

    def data(self, config):
        return Data(config.seed)

    def model(self, config, data):
        return nn.Sequential(nn.Linear(2, config.hidden_size), nn.Tanh(), nn.Linear(config.hidden_size, 2))

    def loss(self, model, micro):
        """Return the mean over the samples of a micro-batch, or a pair (sum, weight) for a mean over tokens."""
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    def evaluate(self, model, micro_batches):
        correct = total = 0
        for micro in micro_batches:
            correct += int((model(micro.x).argmax(1) == micro.y).sum())
            total += len(micro.sample_ids)
        return {"accuracy": correct / total}

    # Optional methods, such as predict() for `whet predict` and describe() for plans without torch, are documented in
    # whet/recipes/recipe.py.


def recipe():
    return MyRecipe()
