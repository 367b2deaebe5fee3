"""The process of one loop: build the workload, wait for commands, train."""

import importlib
import json
import os
import sys

import torch

from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    # Libraries print to stdout, which carries the answers: redirect theirs to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gate = StepGate(
        spec.device,
        records_losses=spec.records_losses,
        first_losses=spec.first_losses,
        orders=sys.stdin,
        answers=answers,
    )
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    family = spec.loop.split("-")[0]
    if family == "ceiling":
        importlib.import_module("side_by_side.ceiling").run(gate, spec)
        return
    try:
        loop = importlib.import_module(f"side_by_side.loops.{family}_loop")
        name = spec.workload.partition("-")[0].rstrip("0123456789")
        workload = importlib.import_module(f"side_by_side.workloads.{name}").make(spec)
    except ImportError as error:
        gate.answer(absent=str(error))
        return
    touch(spec.device)
    gate.made = {
        "description": workload.description,
        "batch": workload.batch,
        "flops": workload.flops,
        "epoch": workload.steps_per_epoch,
    }
    loop.run(workload, gate, spec)


def touch(device: str) -> None:
    """Initialize the device, which should not count as set-up of a loop."""
    square = torch.ones(64, 64, device=device)
    float((square @ square).sum())


if __name__ == "__main__":
    main()
