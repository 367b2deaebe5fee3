"""A hand-tuned loop: data on the device, few shapes, fused optimizer, optionally compiled."""

import torch

from side_by_side.loops.common import adamw, autocast, linear
from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate
from side_by_side.workload import PeerWorkload


def run(workload: PeerWorkload, gate: StepGate, spec: Spec) -> None:
    gate.begin()
    model = workload.model.to(spec.device).train()
    if workload.is_image_like and spec.device != "cpu":
        model = model.to(memory_format=torch.channels_last)
    parameters = list(model.parameters())
    optimizer = adamw(model, workload, fused=True)
    schedule = linear(optimizer, spec)
    batch_of = workload.resident(spec.device)
    mode = "reduce-overhead" if spec.loop.endswith("-overhead") else None
    call = torch.compile(model, dynamic=False, mode=mode) if spec.is_compiled else model
    for step in range(spec.total_steps):
        with autocast(spec):
            loss = call(**batch_of(step))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, workload.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        gate.step(loss)
    gate.end()
