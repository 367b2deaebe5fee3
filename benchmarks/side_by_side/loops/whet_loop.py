"""whet with its default plan, with graph capture, or compiled; nothing is measured beforehand."""

import tempfile
from typing import Any

import whet
from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate
from side_by_side.workload import PeerWorkload
from whet.run.events import History
from whet.step.optimizers import OptimizerChoice

SHOWN_SETTINGS = (
    "precision",
    "micro_batch",
    "lengths",
    "compile",
    "graph",
    "layout",
    "threads",
    "attention",
    "optimizer_kernels",
    "freed_memory",
)


def overrides_of(spec: Spec) -> dict[str, Any]:
    overrides: dict[str, Any] = {"precision": spec.precision}
    if spec.threads is not None:
        overrides["threads"] = spec.threads
    if spec.loop == "whet-graph":
        overrides["graph"] = "on"
    if spec.is_compiled:
        overrides |= {"compile": "on", **({"graph": "on"} if spec.device == "cuda" else {})}
    return overrides


def run(workload: PeerWorkload, gate: StepGate, spec: Spec) -> None:
    made = workload.for_whet()
    gate.begin()
    # Like the other loops it writes nothing, unless its losses are recorded.
    with tempfile.TemporaryDirectory() as folder:
        session = whet.Session(
            made.model,
            OptimizerChoice(lr=workload.lr, weight_decay=0.0),
            made.data,
            run=f"{folder}/run" if spec.records_losses else None,
            device=spec.device,
            overrides={**(made.overrides or {}), **overrides_of(spec)},
            workload=made.workload,
            outputs=made.outputs,
            global_batch_size=workload.batch,
            epochs=-(-spec.total_steps // workload.steps_per_epoch),
            max_steps=spec.total_steps,
            schedule="linear",
            clip=workload.clip,
            shuffle=False,
            on_event=lambda kind, fields: record_change(gate, kind, fields),
        )
        with session:
            settings = session.plan.settings
            gate.notes["plan"] = {name: settings[name].value for name in SHOWN_SETTINGS if name in settings}
            for batch in session:
                session.step(made.loss, batch)
                gate.step()
        if spec.records_losses:
            events = History(whet.open_run(f"{folder}/run")).events(kinds=("step",))
            gate.end([event.fields["loss"] for event in events])


def record_change(gate: StepGate, kind: str, fields: dict[str, Any]) -> None:
    """Record changes of the plan."""
    if kind in ("plan", "oom", "skip", "warning") and (reason := fields.get("message") or fields.get("reason")):
        gate.notes.setdefault("changes", []).append(str(reason)[:200])
