"""Verify a model before its first step, and apply a fallback if the device computes wrong results.

Fallbacks, from the smallest change to the largest: torch's kernels, contiguous weights, explicit masks, float32.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from whet.base.errors import UsageError, WhetError
from whet.base.version import VERSION
from whet.data.batch import GlobalBatch, MicroBatch, micro_batch_shapes
from whet.device.environment import compiler_settings
from whet.device.kernels.switches import use_torch_kernels
from whet.device.mps import make_contiguous
from whet.plan.plan import Plan, with_runtime_changes
from whet.plan.setting import MeasuredSetting
from whet.step.attention import use_explicit_masks
from whet.step.compilation import CompiledCalls, compile_obstacle
from whet.step.loss import BatchLoss, MicroLoss
from whet.step.step import Stepper
from whet.step.unpadding import Unpadding, unpadding_obstacle
from whet.training.model_check import ModelCheck, ModelCheckResult, run_check
from whet.verify.start import cache, compiled

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

_NOT_COMPARED = "not compared with the model's own code"


class ModelCheckError(WhetError):
    """Raised if the model computes wrong results on this device.

    The run folder is kept: its events have the details.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """A change that may fix a failed check. It is kept only if all checks pass with it."""

    description: str
    apply: Callable[[], AbstractContextManager[object]]
    """Returns a context manager in which the change is active."""
    precision: str
    """The precision in which the model is checked again."""
    changes: Mapping[str, MeasuredSetting] = field(default_factory=dict)
    """The settings of the plan that change."""


def fallbacks(result: ModelCheckResult, steppers: Sequence[Stepper], plan: Plan) -> Iterator[Fallback]:
    """Yield fallbacks for the problems found, smallest change first. Settings that the user overrides are kept."""
    precision = plan.precision
    evidence = {"problem": str(result), "device": steppers[0].device.kind}

    def changed(value: str, reason: str) -> MeasuredSetting:
        return MeasuredSetting(value=value, reason=reason, evidence=evidence)

    own = [name for name in _whet_kernels(plan) if name not in plan.overrides]
    if own:
        yield Fallback(
            description=f"{' and '.join(own)} by torch's kernels instead of whet's",
            apply=lambda: use_torch_kernels(*own),
            precision=precision,
            changes={name: changed("torch", "whet's kernels were wrong before the first step") for name in own},
        )
    is_contiguous = all(parameter.is_contiguous() for parameter in steppers[0].model.parameters())
    if not is_contiguous and plan.overrides.get("layout") != "channels_last":
        reason = "with channels_last the device computed wrongly"
        yield Fallback(
            description="weights are contiguous now",
            apply=lambda: _make_weights_contiguous(steppers),
            precision=precision,
            changes={} if plan.layout == "contiguous" else {"layout": changed("contiguous", reason)},
        )
    if result.leak is not None and plan.overrides.get("causal_mask") is None:
        yield Fallback(
            description="causal attention has an explicit mask now",
            apply=use_explicit_masks,
            precision=precision,
            changes={"causal_mask": changed("explicit", "with the flag is_causal the model was not causal here")},
        )
    if precision != "fp32" and "precision" not in plan.overrides:
        yield Fallback(
            description=f"fp32 instead of {precision}",
            apply=lambda: _in_fp32(steppers, plan),
            precision="fp32",
            changes={
                "precision": changed("fp32", f"{precision} was wrong here before the first step"),
                "loss_scaling": changed("off", "fp32 does not need it"),
            },
        )


def _make_weights_contiguous(steppers: Sequence[Stepper]) -> AbstractContextManager[object]:
    # This fallback is not undone, because it leaves the values of the weights unchanged.
    for stepper in steppers:
        make_contiguous(stepper.model, stepper.optimizer)
    return nullcontext()


@contextmanager
def _in_fp32(steppers: Sequence[Stepper], plan: Plan) -> Iterator[None]:
    for stepper in steppers:
        stepper.use_precision("fp32", loss_scaling="off")
    try:
        yield
    finally:
        for stepper in steppers:
            stepper.use_precision(plan.precision, loss_scaling=plan.loss_scaling)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartChecks:
    """Verifies a model once per session. On the CPU, only compiled code and causality are verified."""

    run: "RunContext"
    exit_stack: ExitStack
    """Undoes the accepted fallbacks when the run ends."""

    def run_checks(self, loss: MicroLoss, batch: GlobalBatch, *, step: int, moved_from: str | None) -> Plan:
        """Verify the model before step `step + 1` and return the plan to continue with. Raise if no fallback helps."""
        run, plan, kind = self.run, self.run.plan, self.run.device.kind
        prefix = "" if moved_from is None else f"moved from {moved_from} to {kind}; "
        if run.device.is_cpu and run.config.outputs is None:
            return plan
        why_not = skip_reason(plan)
        if why_not is not None:
            run.log.event("plan", step=step, message=f"{prefix}not verified: {why_not}")
            return plan
        start = time.perf_counter()
        check = ModelCheck(run, loss, batch)
        key = self._cache_key(loss, shapes=check.shapes)
        # A run that was moved to another device is verified even if a result is cached.
        before = cache.load_verified(key) if key and plan.verify == "on" and moved_from is None else None
        if before is not None:
            run.log.event("plan", step=step, message=f"verified before: {before}")
            return plan
        result = check.run_checks(plan.precision)
        message = f"{prefix}verified: {result}" if result.is_complete else f"{prefix}{result}"
        if not result.is_good:
            return self._fall_back(check, result, prefix=prefix, start=start, step=step, moved_from=moved_from)
        if key and result.is_complete:
            cache.store_verified(key, str(result))
        self._log(message, start=start, step=step, error=result.error)
        return plan

    def use_compiled(self, loss: MicroLoss, micro: MicroBatch, *, step: int, compiled_stack: ExitStack) -> Plan:
        """Compile the model, compare it with eager execution and return the plan to continue with.

        Closing `compiled_stack` ends the use of compiled code. A stepper that captures steps was built for a compiled
        model. If the model remains eager, the stepper is only more cautious than necessary.
        """
        run, plan = self.run, self.run.plan
        start, model, device = time.perf_counter(), run.model, run.device
        may_slice = plan.workload.whole_batch_reason is None
        obstacle = compile_obstacle(model, plan)
        if obstacle is not None:
            self._log(f"not compiled: {obstacle}", start=start, step=step, error=None, **self._eager_since(step))
            return uncompiled_plan(plan, reason=obstacle, step=step)
        key = self._cache_key(
            loss,
            shapes=micro_batch_shapes(micro),
            compile=plan.compile,
            threads=plan.threads,
            compiler=compiler_settings(),
        )
        before = cache.load_verified(key) if key and plan.verify == "on" else None
        decision = None if before is None else cache.load_verified(f"{key}-loss")
        why_not = skip_reason(plan)
        with ExitStack() as undo:
            calls = CompiledCalls(model, plan)
            if decision is not None:
                calls.use_loss_decision(decision)
            elif why_not is None:
                calls.settle_loss(loss, micro, device, precision=plan.precision)
            undo.enter_context(calls.in_use())
            if why_not is not None:
                compiled_stack.push(undo.pop_all())
                run.log.event("plan", step=step, message=f"compiled: {_NOT_COMPARED}: {why_not}")
                return plan
            if not any(run.group.all_reduce_max([float(decision is None)])):
                compiled_stack.push(undo.pop_all())
                run.log.event("plan", step=step, message=f"compiled, verified before: {before}")
                return plan
            parity, problem = run_check(
                lambda: compiled.compare_compiled_with_eager(
                    model, device, loss, micro, precision=plan.precision, may_slice=may_slice
                ),
                device,
                failed=_NOT_COMPARED,
            )
            # The comparison needs more memory than a step, so return cached blocks to the device first.
            device.memory.empty_cache()
            # All ranks must agree: a compiled rank and an eager rank would round differently.
            is_unusable = parity is not None and not parity.is_usable
            if not any(run.group.all_reduce_max([float(is_unusable)])):
                compiled_stack.push(undo.pop_all())
                error = None if parity is None else parity.largest
                if key and parity is not None:
                    cache.store_verified(key, str(parity))
                    cache.store_verified(f"{key}-loss", calls.loss_decision)
                obstacle = None if calls.loss is None else calls.loss.obstacle
                how = "" if obstacle is None else f" without your loss function ({obstacle})"
                self._log(f"compiled{how}: {problem or parity}", start=start, step=step, error=error)
                return plan
        reason = str(parity) if is_unusable else "its results differ on another rank, or it is not compiled there"
        error = parity.error if parity is not None and math.isfinite(parity.error) else None
        self._log(f"not compiled: {reason}", start=start, step=step, error=error, **self._eager_since(step))
        return uncompiled_plan(plan, reason=reason, step=step)

    def use_unpadded(self, loss: MicroLoss, micro: MicroBatch, *, step: int) -> Plan:
        """Make the blocks of the model skip padding if loss and gradients do not change, and return the plan.

        Only a padded batch can be compared. A run that has skipped padding before also skips it after a resume.
        """
        run, plan, start = self.run, self.run.plan, time.perf_counter()
        obstacle = unpadding_obstacle(run.model)
        if obstacle is not None:
            raise UsageError(
                "this model cannot skip padding", got=f"lengths=unpadded, and {obstacle}", try_="leave out lengths"
            )
        unpadding = Unpadding(run.model)
        with ExitStack() as undo:
            undo.enter_context(unpadding.in_use())
            parity, problem = run_check(
                lambda: compiled.compare_with_reference(
                    run.model, run.device, loss, micro, precision=plan.precision, reference=unpadding.suspended
                ),
                run.device,
                failed="not compared with the padded batch",
            )
            reason = None
            if parity is None:
                reason = problem
            elif not parity.agrees:
                what = parity.worst if parity.worst == "the loss" else f"the gradient of {parity.worst}"
                reason = f"{what} differs from that of the padded batch by {parity.error:.1e}: the loss reads padding"
            elif not unpadding.num_unpadded and step == 0:
                reason = "the first batch has hardly any padding on the right"
            if not any(run.group.all_reduce_max([float(reason is not None)])):
                self.exit_stack.push(undo.pop_all())
                agreed = (
                    f"loss and gradients agree with those of the padded batch ({parity.largest:.0e})" if parity else ""
                )
                self._log(f"unpadded: {agreed}", start=start, step=step, error=None)
                return plan
        reason = reason or "its results differ on another rank"
        self._log(f"padding is computed: {reason}", start=start, step=step, error=None)
        evidence = {"requested": plan.lengths, "step": step}
        return with_runtime_changes(plan, {"lengths": MeasuredSetting(value="fixed", reason=reason, evidence=evidence)})

    def _fall_back(
        self,
        check: ModelCheck,
        result: ModelCheckResult,
        *,
        prefix: str,
        start: float,
        step: int,
        moved_from: str | None,
    ) -> Plan:
        plan, tried = self.run.plan, []
        for fallback in fallbacks(result, tuple(self.run.steppers.values()), plan):
            with ExitStack() as undo:
                undo.enter_context(fallback.apply())
                again = check.run_checks(fallback.precision)
                # A fallback does not count as a success if a check can no longer run with it.
                if again.is_good and again.is_complete >= result.is_complete:
                    self.exit_stack.push(undo.pop_all())
                    message = f"{prefix}{result}; {fallback.description}: {again}"
                    changes = self._changed_since(step, fallback.description)
                    self._log(message, start=start, step=step, error=again.error, **changes)
                    return with_runtime_changes(plan, fallback.changes) if fallback.changes else plan
            tried.append(fallback.description)
        self._log(f"{prefix}{result}", start=start, step=step, error=result.error)
        raise self._error(result, prefix=prefix, tried=tried, moved_from=moved_from)

    def _error(self, result: ModelCheckResult, *, prefix: str, tried: list[str], moved_from: str | None) -> WhetError:
        plan, kind, precision = self.run.plan, self.run.device.kind, self.run.plan.precision
        failed = f"; tried without success: {', '.join(tried)}" if tried else ""
        hints = []
        if precision != "fp32" and "precision" in plan.overrides:
            hints.append(f"precision=fp32 instead of the precision={precision} that you asked for")
        requested = [name for name in _whet_kernels(plan) if name in plan.overrides]
        hints += [f"{name}=torch instead of the {name}=whet that you asked for" for name in requested]
        if result.leak is not None:
            what = f"the model is not causal on {kind} in {precision}"
            if plan.overrides.get("causal_mask") == "flag":
                hints.append("causal_mask=explicit instead of the causal_mask=flag that you asked for")
            hints.append("a causal mask in every layer that mixes positions")
        else:
            what = "the model computes different results on this device"
            hints.append("whet compare finds the operator")
        if moved_from is not None:
            hints.append(f"--device {moved_from} to resume there")
        if not self.run.device.is_cpu:
            hints.append("--device cpu")
        return ModelCheckError(what, got=f"{prefix}{result}{failed}", try_="; ".join([*hints, "or verify=off"]))

    def _eager_since(self, step: int) -> dict[str, Any]:
        return self._changed_since(step, "runs eagerly")

    def _changed_since(self, step: int, change: str) -> dict[str, Any]:
        """Return event fields that mark a resumed run as not bit-exact since `step`; empty for a new run."""
        if not step:
            return {}
        self.run.note_inexact(step, change)
        return {"exact": False, "reason": change}

    def _log(self, message: str, *, start: float, step: int, error: float | None, **fields: Any) -> None:
        seconds = time.perf_counter() - start
        self.run.log.add_seconds("verify", seconds)
        if error is not None:
            fields["difference"] = error
        self.run.log.event("plan", step=step, message=f"{message}  ({seconds:.1f} s)", seconds=seconds, **fields)

    def _cache_key(self, loss: MicroLoss, **facts: Any) -> str | None:
        """Return the cache key for the result of a check; None if the code of the model cannot be read."""
        plan, machine, outputs = self.run.plan, self.run.plan.machine, self.run.config.outputs
        facts |= {
            "machine": [machine.name, machine.chip, machine.os.as_json(), [a.as_json() for a in machine.accelerators]],
            "torch": str(torch.__version__),
            "whet": VERSION,
            "device": str(self.run.device.torch_device),
            "precision": plan.precision,
            "kernels": [plan.attention, plan.norms, plan.layout],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "causal_mask": plan.causal_mask,
            "is_causal": outputs is not None,
        }
        function = loss.function if isinstance(loss, BatchLoss) else loss
        return cache.cache_key(facts, self.run.model, (function, outputs))


def uncompiled_plan(plan: Plan, *, reason: str, step: int) -> Plan:
    """Return the plan with compilation turned off from `step` on."""
    evidence = {"requested": plan.compile, "step": step}
    return with_runtime_changes(plan, {"compile": MeasuredSetting(value="off", reason=reason, evidence=evidence)})


def _whet_kernels(plan: Plan) -> list[str]:
    """Return the names of the settings that select whet's own kernels."""
    return [name for name, setting in plan.settings.items() if setting.value == "whet"]


def skip_reason(plan: Plan) -> str | None:
    """Return the reason why verification is skipped; None if the model is verified."""
    if plan.verify == "off":
        return "verify=off"
    return "the model is sharded" if plan.sharding == "full" and plan.workload.world_size > 1 else None
