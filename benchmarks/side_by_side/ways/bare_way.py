"""The loop of the tutorials: a DataLoader, autocast, backward, clip, step."""

import torch

from side_by_side.pace import Pace
from side_by_side.spec import Spec
from side_by_side.ways.plain import adamw, autocast, linear, loader, moved
from side_by_side.work import Work


def run(work: Work, pace: Pace, spec: Spec) -> None:
    pace.begin()
    model = work.model.to(spec.device).train()
    optimizer = adamw(model, work)
    schedule = linear(optimizer, spec)
    for batch in moved(loader(work, spec), spec.device):
        with autocast(spec):
            loss = model(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        pace.step(loss)
    pace.end()
