"""The tutorial loop with Lightning Fabric."""

from lightning.fabric import Fabric

from side_by_side.loops.common import adamw, linear, loader
from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate
from side_by_side.workload import PeerWorkload


def run(workload: PeerWorkload, gate: StepGate, spec: Spec) -> None:
    gate.begin()
    fabric = Fabric(
        accelerator={"cuda": "gpu"}.get(spec.device, spec.device),
        devices=1,
        precision="bf16-mixed" if spec.is_half else "32-true",
    )
    optimizer = adamw(workload.model, workload, fused=spec.device == "cuda")
    schedule = linear(optimizer, spec)
    model, optimizer = fabric.setup(workload.model.train(), optimizer)
    batches = fabric.setup_dataloaders(loader(workload, spec))
    for batch in batches:
        loss = model(**batch)["loss"]
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=workload.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        gate.step(loss)
    gate.end()
