"""A tiny recipe for tests of the search, with slow steps, so that there is time to kill it.

The optimum is known: the score is -(log10(lr) + 2)^2 from the first evaluation on, and one less if it is worse.
torch is imported where it is needed, because workers, which are killed repeatedly, do not need it.
"""

import math
import time

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from whet.config.options import CommonConfig
from whet.plan.workload import Workload
from whet.recipes.recipe import Recipe

ROWS = 40


class Config(CommonConfig):
    epochs: PositiveInt = Field(1, description="passes over the training data")
    global_batch_size: PositiveInt = Field(4, description="samples of one optimizer step")
    lr: PositiveFloat = Field(1e-2, description="learning rate")
    hidden_size: PositiveInt = Field(4, description="width")
    takes: NonNegativeInt = Field(0, description="bytes that a step takes, or the model if it is worse")
    is_worse: bool = Field(False, description="one less in score")
    pause: NonNegativeFloat = Field(0.0, description="seconds that a step takes at least")


class Data:
    def __init__(self, seed: int) -> None:
        import torch

        draw = torch.Generator().manual_seed(seed)
        x = torch.rand(ROWS + 8, 2, generator=draw)
        self.train = {"x": x[:ROWS], "y": x[:ROWS].sum(1)}
        self.val = {"x": x[ROWS:], "y": x[ROWS:].sum(1)}
        self.test = self.val


class Searched(Recipe):
    name = "searched"
    Config = Config
    goal = "score"
    _pause = 0.0
    _takes = 0

    def describe(self, config, data=None):
        return Workload(
            recipe=self.name,
            num_parameters=100,
            global_batch_size=config.global_batch_size,
            num_samples=ROWS,
            num_steps=config.epochs * -(-ROWS // config.global_batch_size),
            activation_bytes=100,
            sample_bytes=16,
        )

    def data(self, config):
        return Data(config.seed)

    def model(self, config, data):
        import torch
        from torch import nn

        self._pause, self._takes = config.pause, config.takes
        if config.takes and config.is_worse:
            torch.empty(config.takes, dtype=torch.uint8)
        model = nn.Sequential(nn.Linear(2, config.hidden_size), nn.Tanh(), nn.Linear(config.hidden_size, 1))
        score = -((math.log10(config.lr) + 2) ** 2) - config.is_worse
        model.register_buffer("score", torch.tensor(score, dtype=torch.float64), persistent=False)
        return model

    def loss(self, model, micro):
        import torch
        from torch import nn

        time.sleep(self._pause)
        if self._takes:
            torch.empty(self._takes, dtype=torch.uint8)
        return nn.functional.mse_loss(model(micro.x).squeeze(1), micro.y)

    def evaluate(self, model, micro_batches):
        assert sum(len(micro.sample_ids) for micro in micro_batches) == 8, "the dev part is whole"
        return {"score": float(model.score)}

    def metadata(self, config, data):
        return {}


def recipe():
    return Searched()
