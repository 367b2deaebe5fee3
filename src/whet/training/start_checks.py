"""Verify a model before its first step, and apply a fallback where the device computes wrongly."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from whet.base.errors import WhetError
from whet.base.version import VERSION
from whet.data.batch import GlobalBatch, MicroBatch
from whet.data.split import LengthMode
from whet.device.kernels.switches import use_torch_kernels
from whet.device.mps import make_contiguous
from whet.plan.plan import Plan, with_runtime_changes
from whet.plan.setting import MeasuredSetting
from whet.step.loss import LossFunction
from whet.step.model_contexts import CompiledCalls, compile_obstacle
from whet.step.step import Stepper
from whet.training.building import TrainingParts
from whet.training.callbacks.event_log import Recorder
from whet.training.model_check import ModelCheck, ModelCheckResult, run_check
from whet.verify.start import cache, compiled
from whet.verify.start.causality import use_explicit_masks
from whet.verify.trainable import OutputFunction

_KERNEL_SETTINGS = ("attention", "norms")
"""Settings that may take whet's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """Something that may help. It stays only where everything is right with it."""

    words: str
    applied: Callable[[], AbstractContextManager[object]]
    precision: str
    """The number format that the model is tried in."""
    learnt: Mapping[str, MeasuredSetting] = field(default_factory=dict)
    """What changes in the plan."""


def fallbacks(findings: ModelCheckResult, stepper: Stepper, plan: Plan) -> Iterator[Fallback]:
    """What may help against this, the least change first; never against your own word."""
    precision, problem = plan.precision, str(findings)
    evidence = {"problem": problem, "device": stepper.device.kind}

    def learnt(value: str, reason: str) -> MeasuredSetting:
        return MeasuredSetting(value=value, reason=reason, evidence=evidence)

    own = [name for name in _KERNEL_SETTINGS if _uses_own_kernels(plan, name) and name not in plan.overrides]
    if own:
        yield Fallback(
            words=f"{' and '.join(own)} by torch's kernels instead of whet's own",
            applied=lambda: use_torch_kernels(*own),
            precision=precision,
            learnt={name: learnt("torch", "whet's own kernels were wrong here before the first step") for name in own},
        )
    is_contiguous = all(parameter.is_contiguous() for parameter in stepper.model.parameters())
    if not is_contiguous and plan.overrides.get("layout") != "channels_last":
        yield Fallback(
            words="weights are contiguous now",
            applied=lambda: _make_weights_contiguous(stepper),
            precision=precision,
            learnt={}
            if plan.layout == "contiguous"
            else {"layout": learnt("contiguous", "with channels_last the device computed wrongly")},
        )
    if findings.leak is not None and plan.overrides.get("causal_mask") is None:
        yield Fallback(
            words="causal attention has an explicit mask now",
            applied=use_explicit_masks,
            precision=precision,
            learnt={"causal_mask": learnt("explicit", "with the flag is_causal the model was not causal here")},
        )
    if precision != "fp32" and "precision" not in plan.overrides:
        yield Fallback(
            words=f"fp32 instead of {precision}",
            applied=lambda: _in_fp32(stepper, plan),
            precision="fp32",
            learnt={
                "precision": learnt("fp32", f"{precision} was wrong here before the first step"),
                "loss_scaling": learnt("off", "fp32 does not need it"),
            },
        )


def requested_kernels(plan: Plan) -> list[str]:
    """The settings with which whet's own kernels were asked for."""
    return [name for name in _KERNEL_SETTINGS if _uses_own_kernels(plan, name) and name in plan.overrides]


def _uses_own_kernels(plan: Plan, name: str) -> bool:
    # A plan that an older whet saved may not know the setting.
    return name in plan.settings and plan.settings[name].value == "own"


def _make_weights_contiguous(stepper: Stepper) -> AbstractContextManager[object]:
    # Nothing to undo: the values are the same.
    make_contiguous(stepper.model, stepper.optimizer)
    return nullcontext()


@contextmanager
def _in_fp32(stepper: Stepper, plan: Plan) -> Iterator[None]:
    stepper.use_precision("fp32", loss_scaling="off")
    try:
        yield
    finally:
        stepper.use_precision(plan.precision, loss_scaling=plan.loss_scaling)


_NOT_COMPARED = "not compared with the model's own code"


@dataclass(frozen=True, kw_only=True, slots=True)
class StartChecks:
    """Verifies once in a sitting; the CPU only for models that are compiled or whose outputs are given."""

    parts: TrainingParts
    recorder: Recorder
    outputs: OutputFunction | None
    closing: ExitStack
    """Ends what must hold while the run trains."""
    note_inexact: Callable[[int, str], None]

    def run(
        self,
        loss: LossFunction,
        batch: GlobalBatch,
        plan: Plan,
        *,
        length_mode: LengthMode,
        step: int,
        moved_from: str | None,
    ) -> Plan:
        """The plan that the run goes on with, after `step` steps; raises where nothing helps."""
        here = self.parts.device.kind
        opening = "" if moved_from is None else f"moved from {moved_from} to {here}; "
        if here == "cpu" and self.outputs is None:
            return plan
        why_not = skip_reason(plan)
        if why_not is not None:
            self.recorder.event("plan", step=step, message=f"{opening}not verified: {why_not}")
            return plan
        start = time.perf_counter()
        examination = ModelCheck.of(self.parts, plan, loss, self.outputs, batch, length_mode)
        key = self._key(examination, plan)
        before = cache.load_verified(key) if key and _verify_mode(plan) == "on" and moved_from is None else None
        if before is not None:
            self.recorder.event("plan", step=step, message=f"verified before: {before}")
            return plan
        findings = examination.findings(plan.precision)
        said = f"{opening}verified: {findings}" if findings.is_complete else f"{opening}{findings}"
        if findings.is_good:
            if key and findings.is_complete:
                cache.store_verified(key, str(findings))
            self._tell(said, start=start, step=step, error=findings.error)
            return plan
        return self._cured(examination, findings, plan, opening=opening, start=start, step=step, moved_from=moved_from)

    def use_compiled(self, loss: LossFunction, micro: MicroBatch, plan: Plan, *, step: int, until: ExitStack) -> Plan:
        """Compiles the model and compares it with its own code; the plan that the run goes on with, after `step` steps.

        `until` ends it: a run may have to go on as its model is written.
        A stepper that captures steps was told that the model is compiled: if it is not, that only makes it careful.
        """
        start, model, device = time.perf_counter(), self.parts.stepper.model, self.parts.device
        cannot = compile_obstacle(model, plan)
        if cannot is not None:
            self._tell(f"not compiled: {cannot}", start=start, step=step, error=None, **self._as_written_since(step))
            return uncompiled_plan(plan, reason=cannot, step=step)
        with ExitStack() as undo:
            undo.enter_context(CompiledCalls(model, plan).in_use())
            why_not = skip_reason(plan)
            if why_not is not None:
                until.push(undo.pop_all())
                self.recorder.event("plan", step=step, message=f"compiled: {_NOT_COMPARED}: {why_not}")
                return plan
            precision = plan.precision
            agreement, problem = run_check(
                lambda: compiled.compare_compiled_with_eager(model, device, loss, micro, precision=precision),
                device,
                unanswered=_NOT_COMPARED,
            )
            # Steps hold less than the comparison did.
            device.memory.empty_cache()
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
        examination: ModelCheck,
        findings: ModelCheckResult,
        plan: Plan,
        *,
        opening: str,
        start: float,
        step: int,
        moved_from: str | None,
    ) -> Plan:
        tried: list[str] = []
        for cure in fallbacks(findings, self.parts.stepper, plan):
            with ExitStack() as undo:
                undo.enter_context(cure.applied())
                again = examination.findings(cure.precision)
                if again.is_good and again.is_complete >= findings.is_complete:
                    self.closing.push(undo.pop_all())
                    said = f"{opening}{findings}; {cure.words}: {again}"
                    changes = self._changed_since(step, cure.words)
                    self._tell(said, start=start, step=step, error=again.error, **changes)
                    return with_runtime_changes(plan, cure.learnt) if cure.learnt else plan
            tried.append(cure.words)
        self._tell(f"{opening}{findings}", start=start, step=step, error=findings.error)
        raise self._refusal(findings, plan, opening=opening, tried=tried, moved_from=moved_from)

    def _refusal(
        self, findings: ModelCheckResult, plan: Plan, *, opening: str, tried: list[str], moved_from: str | None
    ) -> WhetError:
        here, precision = self.parts.device.kind, plan.precision
        in_vain = f"; tried without success: {', '.join(tried)}" if tried else ""
        ways = []
        if precision != "fp32" and "precision" in plan.overrides:
            ways.append(f"precision=fp32 instead of the precision={precision} that you asked for")
        ways += [f"{name}=torch instead of the {name}=own that you asked for" for name in requested_kernels(plan)]
        if findings.leak is not None:
            what = f"the model is not causal on {here} in {precision}"
            if plan.overrides.get("causal_mask") == "flag":
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
        self.recorder.event("plan", step=step, message=f"{said}  ({seconds:.1f} s)", seconds=seconds, **fields)

    def _key(self, examination: ModelCheck, plan: Plan) -> str | None:
        machine, stepper = plan.machine, self.parts.stepper
        facts = {
            "machine": [machine.name, machine.chip, machine.os.as_json(), [a.as_json() for a in machine.accelerators]],
            "torch": str(torch.__version__),
            "whet": VERSION,
            "device": str(stepper.device.torch_device),
            "precision": plan.precision,
            "kernels": [_setting_value(plan, name) for name in ("attention", "norms", "layout")],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "causal_mask": _setting_value(plan, "causal_mask"),
            "is_causal": self.outputs is not None,
            "shapes": examination.shapes,
        }
        return cache.cache_key(facts, stepper.model, (examination.loss, self.outputs))


def uncompiled_plan(plan: Plan, *, reason: str, step: int) -> Plan:
    """The plan of a run whose model runs as it is written from `step` on."""
    evidence = {"asked": plan.compile, "step": step}
    return with_runtime_changes(plan, {"compile": MeasuredSetting(value="off", reason=reason, evidence=evidence)})


def skip_reason(plan: Plan) -> str | None:
    """Why nothing is verified, if so."""
    if _verify_mode(plan) == "off":
        return "verify=off"
    is_in_parts = _setting_value(plan, "sharding") == "full" and plan.workload.world_size > 1
    return "the model lies in parts" if is_in_parts else None


def _verify_mode(plan: Plan) -> str:
    return _setting_value(plan, "verify") or "on"


def _setting_value(plan: Plan, name: str) -> str | None:
    """A setting that a plan saved by an older whet may not know."""
    setting = plan.settings.get(name)
    return None if setting is None else str(setting.value)
