"""A small training that tests run in a separate process.

`python training_job.py RUN [--slow] [--hot] [hold=STEP] [key=value...]`; --hot simulates heat. hold
creates RUN.holds in the middle of that step and waits until RUN.goes exists.
"""

import itertools
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import whet
from small_models import convnet, images
from whet.machine.facts import SystemState


def main(arguments: list[str]) -> int:
    path, *words = arguments
    options = {key: json.loads(value) for key, value in (w.split("=", 1) for w in words if "=" in w)}
    # Two losses are computed to verify the model first.
    hold, calls = options.pop("hold", 0) + 2, itertools.count(1)
    torch.manual_seed(5)
    model = convnet(dropout=0.3)
    x, y = images(160, seed=0)

    def loss(micro):
        if "--slow" in words:
            time.sleep(0.05)
        if next(calls) == hold > 2:
            Path(f"{path}.holds").touch()
            while not Path(f"{path}.goes").exists():
                time.sleep(0.01)
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    def evaluate(model, micro_batches):
        right = [(model(micro.x).argmax(1) == micro.y).float().mean() for micro in micro_batches]
        torch.rand(7)
        return {"accuracy": float(torch.stack(right).mean())}

    result = whet.train(
        model,
        (x, y),
        loss=loss,
        optimizer=whet.OptimizerChoice(lr=1e-3),
        evaluate=evaluate,
        val=images(40, seed=1),
        run=path,
        goal="accuracy",
        read_sensors=(lambda: SystemState(thermal="heavy")) if "--hot" in words else None,
        overrides={"threads": 1, **options.pop("overrides", {})},
        **{
            "global_batch_size": 16,
            "epochs": 4,
            "schedule": "cosine",
            "warmup_steps": 3,
            "clip": 1.0,
            "ema": True,
            "eval_every": 7,
            "seed": 11,
            **options,
        },
    )
    Path(path, "result.json").write_text(json.dumps({"state": result.state, "step": result.step}))
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
