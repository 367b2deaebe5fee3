"""Before the first step of a sitting: is what this model computes here right? If not, a cure, or the run stops."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from whet.base.errors import WhetError
from whet.base.version import VERSION
from whet.data.batch import GlobalBatch, Micro
from whet.data.cut import Lengths
from whet.engine.building import Parts
from whet.engine.cures import asked_kernels, cures
from whet.engine.examining import Examination, Findings, ask
from whet.engine.recorder import Recorder
from whet.engine.while_training import Compiled, cannot_compile
from whet.plan.plan import Plan, with_learnt
from whet.plan.setting import Measured
from whet.step.loss import LossFunction
from whet.verify.start import compiled, remembered
from whet.verify.subject import Outputs

_NOT_COMPARED = "not compared with the model's own code"


@dataclass(frozen=True, kw_only=True, slots=True)
class StartChecks:
    """Verifies once in a sitting; the CPU only for models that are compiled or whose outputs are given."""

    parts: Parts
    recorder: Recorder
    outputs: Outputs | None
    closing: ExitStack
    """Ends what must hold while the run trains."""
    note_inexact: Callable[[int, str], None]

    def run(
        self, loss: LossFunction, batch: GlobalBatch, plan: Plan, *, how: Lengths, step: int, moved_from: str | None
    ) -> Plan:
        """The plan that the run goes on with, after `step` steps; raises where nothing helps."""
        here = self.parts.device.kind
        opening = "" if moved_from is None else f"moved from {moved_from} to {here}; "
        if here == "cpu" and self.outputs is None:
            return plan
        why_not = left_out(plan)
        if why_not is not None:
            self.recorder.event("plan", step=step, changed=f"{opening}not verified: {why_not}")
            return plan
        start = time.perf_counter()
        examination = Examination.of(self.parts, plan, loss, self.outputs, batch, how)
        key = self._key(examination, plan)
        before = remembered.recall(key) if key and _wanted(plan) == "on" and moved_from is None else None
        if before is not None:
            self.recorder.event("plan", step=step, changed=f"verified before: {before}")
            return plan
        findings = examination.findings(str(plan.value("precision")))
        said = f"{opening}verified: {findings}" if findings.is_complete else f"{opening}{findings}"
        if findings.is_good:
            if key and findings.is_complete:
                remembered.remember(key, str(findings))
            self._tell(said, start=start, step=step, error=findings.error)
            return plan
        return self._cured(examination, findings, plan, opening=opening, start=start, step=step, moved_from=moved_from)

    def use_compiled(self, loss: LossFunction, micro: Micro, plan: Plan, *, step: int, until: ExitStack) -> Plan:
        """Compiles the model and compares it with its own code; the plan that the run goes on with, after `step` steps.

        `until` ends it: a run may have to go on as its model is written.
        A stepper that captures steps was told that the model is compiled: if it is not, that only makes it careful.
        """
        start, model, device = time.perf_counter(), self.parts.stepper.model, self.parts.device
        cannot = cannot_compile(model, plan)
        if cannot is not None:
            self._tell(f"not compiled: {cannot}", start=start, step=step, error=None, **self._as_written_since(step))
            return uncompiled_plan(plan, reason=cannot, step=step)
        with ExitStack() as undo:
            undo.enter_context(Compiled(model, plan).in_use())
            why_not = left_out(plan)
            if why_not is not None:
                until.push(undo.pop_all())
                self.recorder.event("plan", step=step, changed=f"compiled: {_NOT_COMPARED}: {why_not}")
                return plan
            precision = str(plan.value("precision"))
            agreement, problem = ask(
                lambda: compiled.compare(model, device, loss, micro, precision=precision),
                device,
                unanswered=_NOT_COMPARED,
            )
            # Steps hold less than the comparison did.
            device.empty_cache()
            is_useless = agreement is not None and not agreement.is_usable
            if not any(self.parts.group.most([float(is_useless)])):
                until.push(undo.pop_all())
                error = None if agreement is None else agreement.largest
                self._tell(f"compiled: {problem or agreement}", start=start, step=step, error=error)
                return plan
        reason = str(agreement) if is_useless else "in another process it computes something else, or is not compiled"
        error = agreement.error if agreement is not None and math.isfinite(agreement.error) else None
        self._tell(f"not compiled: {reason}", start=start, step=step, error=error, **self._as_written_since(step))
        return uncompiled_plan(plan, reason=reason, step=step)

    def _cured(
        self,
        examination: Examination,
        findings: Findings,
        plan: Plan,
        *,
        opening: str,
        start: float,
        step: int,
        moved_from: str | None,
    ) -> Plan:
        tried: list[str] = []
        for cure in cures(findings, self.parts.stepper, plan):
            with ExitStack() as undo:
                undo.enter_context(cure.applied())
                again = examination.findings(cure.precision)
                if again.is_good and again.is_complete >= findings.is_complete:
                    self.closing.push(undo.pop_all())
                    said = f"{opening}{findings}; {cure.words}: {again}"
                    changes = self._changed_since(step, cure.words)
                    self._tell(said, start=start, step=step, error=again.error, **changes)
                    return with_learnt(plan, cure.learnt) if cure.learnt else plan
            tried.append(cure.words)
        self._tell(f"{opening}{findings}", start=start, step=step, error=findings.error)
        raise self._refusal(findings, plan, opening=opening, tried=tried, moved_from=moved_from)

    def _refusal(
        self, findings: Findings, plan: Plan, *, opening: str, tried: list[str], moved_from: str | None
    ) -> WhetError:
        here, precision = self.parts.device.kind, str(plan.value("precision"))
        in_vain = f"; tried without success: {', '.join(tried)}" if tried else ""
        ways = []
        if precision != "fp32" and "precision" in plan.wishes:
            ways.append(f"precision=fp32 instead of the precision={precision} that you asked for")
        ways += [f"{name}=torch instead of the {name}=own that you asked for" for name in asked_kernels(plan)]
        if findings.leak is not None:
            what = f"the model is not causal on {here} in {precision}"
            if plan.wishes.get("causal_mask") == "flag":
                ways.append("causal_mask=explicit instead of the causal_mask=flag that you asked for")
            ways.append("a causal mask in every layer that mixes places")
        else:
            what = "the model computes something else on this device"
            ways.append("whet compare finds the operator")
        if moved_from is not None:
            ways.append(f"--device {moved_from} to go on there")
        if here != "cpu":
            ways.append("--device cpu")
        return WhetError(what, got=f"{opening}{findings}{in_vain}", try_="; ".join([*ways, "or verify=off"]))

    def _as_written_since(self, step: int) -> dict[str, Any]:
        return self._changed_since(step, "runs as it is written")

    def _changed_since(self, step: int, words: str) -> dict[str, Any]:
        """What an event says besides where a run that has made steps goes on otherwise; a new one has only begun."""
        if not step:
            return {}
        self.note_inexact(step, words)
        return {"exact": False, "reason": words}

    def _tell(self, said: str, *, start: float, step: int, error: float | None, **fields: Any) -> None:
        seconds = time.perf_counter() - start
        self.recorder.spent("verify", seconds)
        if error is not None:
            fields["difference"] = error
        self.recorder.event("plan", step=step, changed=f"{said}  ({seconds:.1f} s)", seconds=seconds, **fields)

    def _key(self, examination: Examination, plan: Plan) -> str | None:
        machine, stepper = plan.machine, self.parts.stepper
        facts = {
            "machine": [machine.name, machine.chip, machine.os.as_json(), [a.as_json() for a in machine.accelerators]],
            "torch": str(torch.__version__),
            "whet": VERSION,
            "device": str(stepper.device.place),
            "precision": plan.value("precision"),
            "kernels": [_value(plan, name) for name in ("attention", "norms", "layout")],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "causal_mask": _value(plan, "causal_mask"),
            "is_causal": self.outputs is not None,
            "shapes": examination.shapes,
        }
        return remembered.key_of(facts, stepper.model, (examination.loss, self.outputs))


def uncompiled_plan(plan: Plan, *, reason: str, step: int) -> Plan:
    """The plan of a run whose model runs as it is written from `step` on."""
    evidence = {"asked": plan.value("compile"), "step": step}
    return with_learnt(plan, {"compile": Measured(value="off", reason=reason, evidence=evidence)})


def left_out(plan: Plan) -> str | None:
    """Why nothing is verified, if so."""
    if _wanted(plan) == "off":
        return "verify=off"
    is_in_parts = _value(plan, "sharding") == "full" and plan.workload.world_size > 1
    return "the model lies in parts" if is_in_parts else None


def _wanted(plan: Plan) -> str:
    return _value(plan, "verify") or "on"


def _value(plan: Plan, name: str) -> str | None:
    """A setting that a plan saved by an older whet may not know."""
    setting = plan.settings.get(name)
    return None if setting is None else str(setting.value)
