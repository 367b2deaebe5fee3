"""The tutorial loop with Accelerate."""

from accelerate import Accelerator

from side_by_side.loops.common import adamw, linear, loader
from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate
from side_by_side.workload import PeerWorkload


def run(workload: PeerWorkload, gate: StepGate, spec: Spec) -> None:
    gate.begin()
    accelerator = Accelerator(mixed_precision="bf16" if spec.is_half else "no", cpu=spec.device == "cpu")
    optimizer = adamw(workload.model, workload, fused=spec.device == "cuda")
    parts = (workload.model.train(), optimizer, loader(workload, spec), linear(optimizer, spec))
    model, optimizer, batches, schedule = accelerator.prepare(*parts)
    for batch in batches:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        gate.step(loss)
    gate.end()
