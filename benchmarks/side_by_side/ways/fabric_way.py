"""The tutorial's loop with Lightning Fabric."""

from lightning.fabric import Fabric

from side_by_side.pace import Pace
from side_by_side.spec import Spec
from side_by_side.ways.plain import adamw, linear, loader
from side_by_side.work import Work


def run(work: Work, pace: Pace, spec: Spec) -> None:
    pace.begin()
    fabric = Fabric(
        accelerator={"cuda": "gpu"}.get(spec.device, spec.device),
        devices=1,
        precision="bf16-mixed" if spec.is_half else "32-true",
    )
    optimizer = adamw(work.model, work, fused=spec.device == "cuda")
    schedule = linear(optimizer, spec)
    model, optimizer = fabric.setup(work.model.train(), optimizer)
    batches = fabric.setup_dataloaders(loader(work, spec))
    for batch in batches:
        loss = model(**batch)["loss"]
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=work.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        pace.step(loss)
    pace.end()
