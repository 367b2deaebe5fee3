"""whet: the plan of its rules, or with a whole step captured, or compiled too. Nothing is measured before."""

import tempfile
from typing import Any

import whet
from side_by_side.pace import Pace
from side_by_side.spec import Spec
from side_by_side.work import Work
from whet.run.events import History
from whet.step.optimizers import OptimizerChoice

TOLD = (
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


def wishes_of(spec: Spec) -> dict[str, Any]:
    how: dict[str, Any] = {"precision": spec.precision}
    if spec.threads is not None:
        how["threads"] = spec.threads
    if spec.way == "whet-graph":
        how["graph"] = "on"
    if spec.is_compiled:
        how |= {"compile": "on", **({"graph": "on"} if spec.device == "cuda" else {})}
    return how


def run(work: Work, pace: Pace, spec: Spec) -> None:
    made = work.for_whet()
    pace.begin()
    # Like the others it writes nothing, but where its losses are asked for.
    with tempfile.TemporaryDirectory() as folder:
        session = whet.Session(
            made.model,
            OptimizerChoice(lr=work.lr, weight_decay=0.0),
            made.data,
            run=f"{folder}/run" if spec.takes_losses else None,
            device=spec.device,
            overrides={**(made.overrides or {}), **wishes_of(spec)},
            workload=made.workload,
            outputs=made.outputs,
            global_batch_size=work.batch,
            epochs=-(-spec.total_steps // work.steps_per_epoch),
            max_steps=spec.total_steps,
            schedule="linear",
            clip=work.clip,
            shuffle=False,
            on_event=lambda kind, fields: tell(pace, kind, fields),
        )
        with session:
            pace.notes["plan"] = {name: session.plan.value(name) for name in TOLD if has(session.plan, name)}
            for batch in session:
                session.step(made.loss, batch)
                pace.step()
        if spec.takes_losses:
            events = History(whet.open_run(f"{folder}/run")).events(kinds=("step",))
            pace.end([event.fields["loss"] for event in events])


def has(plan: Any, name: str) -> bool:
    return any(setting == name for setting in plan.settings)


def tell(pace: Pace, kind: str, fields: dict[str, Any]) -> None:
    """What was not as planned."""
    if kind in ("plan", "oom", "skip", "warning") and (reason := fields.get("message") or fields.get("reason")):
        pace.notes.setdefault("changes", []).append(str(reason)[:200])
