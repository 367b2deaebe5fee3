"""A recipe of your own. It trains as it is: `whet plan FILE`, `whet train FILE`, `whet train FILE lr=1e-2 epochs=5`.

whet calls the methods below; everything else (device, micro-batches, checkpoints, resuming, reports) is whet's.
"""

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import nn

from whet.config.options import CommonConfig
from whet.plan.workload import Workload


class Config(CommonConfig):
    """What can be set with key=value, beside the keys that every recipe has (docs/keys.md).

    whet sees to most of those; `data`, `data_paths` and `dropout` mean something only if your methods use them.
    """

    epochs: PositiveInt = Field(5, description="passes over the training data")
    lr: PositiveFloat = Field(1e-2, description="learning rate after the warm-up")
    hidden_size: PositiveInt = Field(32, description="width of the hidden layer")


class Data:
    """Three splits. Each is a dict of tensors (as here), a map-style dataset, or an iterable of samples."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        x = torch.rand(2_000, 2, generator=draw) * 2 - 1
        y = (x[:, 0] * x[:, 1] > 0).long()
        self.train = {"x": x[:1_600], "y": y[:1_600]}
        self.val = {"x": x[1_600:1_800], "y": y[1_600:1_800]}
        self.test = {"x": x[1_800:], "y": y[1_800:]}


class MyRecipe:
    name = "mine"
    Config = Config
    goal = "accuracy"  # the metric that decides the best checkpoint; higher is better

    def describe(self, config, data=None):
        """What a plan needs to know; no data is read here."""
        return Workload(
            recipe=self.name,
            num_parameters=config.hidden_size * 3 + (config.hidden_size + 1) * 2,
            global_batch_size=config.global_batch_size,
            num_samples=1_600,
            num_steps=min(config.epochs * -(-1_600 // config.global_batch_size), config.max_steps or 10**9),
            activation_bytes=4 * 4 * config.hidden_size,
            sample_bytes=16,
        )

    def data(self, config):
        return Data(config.seed)

    def model(self, config, data):
        return nn.Sequential(nn.Linear(2, config.hidden_size), nn.Tanh(), nn.Linear(config.hidden_size, 2))

    def loss(self, model, micro):
        """The mean over the samples of a micro-batch; or a pair (sum, weight), where tokens count."""
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    def evaluate(self, model, micro_batches):
        right = total = 0
        for micro in micro_batches:
            right += int((model(micro.x).argmax(1) == micro.y).sum())
            total += len(micro)
        return {"accuracy": right / total}

    # With a method predict(config, kept), `whet predict RUN ...` works too: see whet/recipes/text/recipe.py.

    def keep(self, config, data):
        """What using the model later needs besides its weights: class names, a vocabulary. Plain JSON."""
        return {}


def recipe():
    return MyRecipe()
