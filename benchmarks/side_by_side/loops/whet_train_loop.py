"""A user's script with whet.train: torch's AdamW, a DataLoader and a loss function; by default nothing is measured.

The default plan has the precision of the other loops, as a user asks for it. A measured plan chooses its own.
"""

import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import whet
from side_by_side.loops.whet_loop import SHOWN_SETTINGS, record_change
from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate
from side_by_side.workload import PeerWorkload


class GateCallback(whet.Callback):
    """Counts steps, and notes the plan."""

    def __init__(self, gate: StepGate) -> None:
        self._gate = gate
        self._plan: whet.Plan | None = None

    def on_start(self, run: Any) -> None:
        self._run = run

    def after_step(self, state: whet.State, outcome: whet.Outcome) -> whet.Action:  # noqa: ARG002
        if self._run.plan is not self._plan:
            self._plan = self._run.plan
            settings = self._plan.settings
            self._gate.notes["plan"] = {name: settings[name].value for name in SHOWN_SETTINGS if name in settings}
            self._gate.notes["trials"] = [
                trial.note
                if trial.verdict == "not tried"
                else f"{trial.setting}={trial.settings.get(trial.setting, '')}: {trial.verdict}, {trial.note} "
                f"({trial.spent_seconds:.1f} s, {trial.preparation_seconds or 0:.1f} s of it to prepare)"
                for trial in self._plan.trials
            ]
        self._gate.step(outcome.loss)
        return whet.Action.NONE


class EventNotes:
    """Notes changes of the plan, and when each part of measuring began."""

    def __init__(self, gate: StepGate) -> None:
        self._gate = gate
        self._measuring_since: float | None = None
        self._start, self._line = time.perf_counter(), ""

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        record_change(self._gate, kind, fields)
        now = time.perf_counter()
        # Shown if this process is ended before its first step.
        line = str(fields.get("doing") or fields.get("message"))
        if kind in ("measuring", "plan", "estimate") and line != self._line:
            self._line = line
            self._gate.notes.setdefault("timeline", []).append(f"{now - self._start:.1f} s: {line}")
            print(f"{now - self._start:.1f} s: {line}", file=sys.stderr, flush=True)
        if kind == "measuring":
            self._measuring_since = self._measuring_since or now
            self._gate.notes["measuring"] = now - self._measuring_since


def run(workload: PeerWorkload, gate: StepGate, spec: Spec) -> None:
    made = workload.for_whet()
    is_measured = spec.loop.endswith("-measured")
    overrides: dict[str, str | int] = {} if is_measured else {"precision": spec.precision}
    if spec.threads is not None:
        overrides["threads"] = spec.threads
    if spec.is_compiled:
        overrides["compile"] = "on"
    gate.begin()
    # From here on, what a user writes.
    model, loss = made.model, made.loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, weight_decay=0.0)
    loader = DataLoader(TensorDataset(*made.data.values()), batch_size=workload.batch)
    whet.train(
        model,
        loader,
        loss=loss,
        optimizer=optimizer,
        clip=workload.clip,
        schedule="linear",
        epochs=-(-spec.total_steps // workload.steps_per_epoch),
        max_steps=spec.total_steps,
        device=spec.device,
        measure=is_measured,
        overrides=overrides,
        callbacks=[GateCallback(gate)],
        on_event=EventNotes(gate),
    )
    gate.end()
