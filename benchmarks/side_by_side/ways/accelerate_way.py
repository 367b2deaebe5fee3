"""The tutorial's loop with Accelerate."""

from accelerate import Accelerator

from side_by_side.pace import Pace
from side_by_side.spec import Spec
from side_by_side.ways.plain import adamw, linear, loader
from side_by_side.work import Work


def run(work: Work, pace: Pace, spec: Spec) -> None:
    pace.begin()
    accelerator = Accelerator(mixed_precision="bf16" if spec.is_half else "no", cpu=spec.device == "cpu")
    optimizer = adamw(work.model, work, fused=spec.device == "cuda")
    parts = (work.model.train(), optimizer, loader(work, spec), linear(optimizer, spec))
    model, optimizer, batches, schedule = accelerator.prepare(*parts)
    for batch in batches:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        pace.step(loss)
    pace.end()
