"""The loop of PyTorch tutorials: DataLoader, autocast, backward, clip, step."""

import torch

from side_by_side.loops.common import adamw, autocast, linear, loader, to_device
from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate
from side_by_side.workload import PeerWorkload


def run(workload: PeerWorkload, gate: StepGate, spec: Spec) -> None:
    gate.begin()
    model = workload.model.to(spec.device).train()
    optimizer = adamw(model, workload)
    schedule = linear(optimizer, spec)
    for batch in to_device(loader(workload, spec), spec.device):
        with autocast(spec):
            loss = model(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        gate.step(loss)
    gate.end()
