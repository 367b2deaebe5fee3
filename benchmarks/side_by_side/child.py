"""The process of one way: makes the work, waits for orders, trains."""

import importlib
import json
import os
import sys

import torch

from side_by_side.pace import Pace
from side_by_side.spec import Spec

FILES = {"whet": "ours"}
"""Where the file of a way has another name, since it would hide the package."""


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    # What libraries print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pace = Pace(spec.device, takes_losses=spec.takes_losses, orders=sys.stdin, answers=answers)
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    family = spec.way.split("-")[0]
    if family == "ceiling":
        importlib.import_module("side_by_side.ceiling").run(pace, spec)
        return
    try:
        way = importlib.import_module(f"side_by_side.ways.{FILES.get(family, family)}_way")
    except ImportError as error:
        pace.answer(absent=str(error))
        return
    name = spec.work.rstrip("0123456789")
    make = importlib.import_module(f"side_by_side.works.{name}").make
    work = make(spec)
    touch(spec.device)
    pace.made = {"words": work.words, "batch": work.batch, "flops": work.flops, "epoch": work.steps_per_epoch}
    way.run(work, pace, spec)


def touch(device: str) -> None:
    """Loads what a device loads once: no way's doing."""
    square = torch.ones(64, 64, device=device)
    float((square @ square).sum())


if __name__ == "__main__":
    main()
