"""The loop of a user who has not optimized anything: eager, torch's default optimizer kernels, data on the device."""

import torch

from side_by_side.loops.common import adamw, autocast, linear
from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate
from side_by_side.workload import PeerWorkload


def run(workload: PeerWorkload, gate: StepGate, spec: Spec) -> None:
    gate.begin()
    model = workload.model.to(spec.device).train()
    optimizer = adamw(model, workload)
    schedule = linear(optimizer, spec)
    batch_of = workload.resident(spec.device)
    for step in range(spec.total_steps):
        with autocast(spec):
            loss = model(**batch_of(step))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        gate.step(loss)
    gate.end()
