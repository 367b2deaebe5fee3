"""The loop of one who knows the hardware: resident data, few shapes, fused updates; compiled if asked."""

import torch

from side_by_side.pace import Pace
from side_by_side.spec import Spec
from side_by_side.ways.plain import adamw, autocast, linear
from side_by_side.work import Work


def run(work: Work, pace: Pace, spec: Spec) -> None:
    pace.begin()
    model = work.model.to(spec.device).train()
    if work.is_image_like and spec.device != "cpu":
        model = model.to(memory_format=torch.channels_last)
    parameters = list(model.parameters())
    optimizer = adamw(model, work, fused=True)
    schedule = linear(optimizer, spec)
    batch_of = work.resident(spec.device)
    call = torch.compile(model, dynamic=False) if spec.is_compiled else model
    for step in range(spec.total_steps):
        with autocast(spec):
            loss = call(**batch_of(step))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, work.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        pace.step(loss)
    pace.end()
