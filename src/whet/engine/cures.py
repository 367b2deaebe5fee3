"""What helps where a device computes wrongly: torch's kernels, contiguous weights, explicit masks, float32.

Each undoes itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from whet.device.contiguous import make_contiguous
from whet.device.own.wanted import by_torch
from whet.engine.examining import Findings
from whet.plan.plan import Plan
from whet.plan.setting import Measured
from whet.step.step import Stepper
from whet.verify.start.masks import explicit_masks

_KERNELS = ("attention", "norms")
"""Settings that may take whet's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """Something that may help. It stays only where everything is right with it."""

    words: str
    applied: Callable[[], AbstractContextManager[object]]
    precision: str
    """The number format that the model is tried in."""
    learnt: Mapping[str, Measured] = field(default_factory=dict)
    """What changes in the plan."""


def cures(findings: Findings, stepper: Stepper, plan: Plan) -> Iterator[Cure]:
    """What may help against this, the least change first; never against your own word."""
    precision, problem = str(plan.value("precision")), str(findings)
    evidence = {"problem": problem, "device": stepper.device.kind}

    def learnt(value: str, reason: str) -> Measured:
        return Measured(value=value, reason=reason, evidence=evidence)

    own = [name for name in _KERNELS if _is_own(plan, name) and name not in plan.wishes]
    if own:
        yield Cure(
            words=f"{' and '.join(own)} by torch's kernels instead of whet's own",
            applied=lambda: by_torch(*own),
            precision=precision,
            learnt={name: learnt("torch", "whet's own kernels were wrong here before the first step") for name in own},
        )
    is_contiguous = all(parameter.is_contiguous() for parameter in stepper.model.parameters())
    if not is_contiguous and plan.wishes.get("layout") != "channels_last":
        yield Cure(
            words="weights are contiguous now",
            applied=lambda: _contiguous(stepper),
            precision=precision,
            learnt={}
            if plan.value("layout") == "contiguous"
            else {"layout": learnt("contiguous", "with channels_last the device computed wrongly")},
        )
    if findings.leak is not None and plan.wishes.get("causal_mask") is None:
        yield Cure(
            words="causal attention has an explicit mask now",
            applied=explicit_masks,
            precision=precision,
            learnt={"causal_mask": learnt("explicit", "with the flag is_causal the model was not causal here")},
        )
    if precision != "fp32" and "precision" not in plan.wishes:
        yield Cure(
            words=f"fp32 instead of {precision}",
            applied=lambda: _in_fp32(stepper, plan),
            precision="fp32",
            learnt={
                "precision": learnt("fp32", f"{precision} was wrong here before the first step"),
                "loss_scaling": learnt("off", "fp32 does not need it"),
            },
        )


def asked_kernels(plan: Plan) -> list[str]:
    """The settings with which whet's own kernels were asked for."""
    return [name for name in _KERNELS if _is_own(plan, name) and name in plan.wishes]


def _is_own(plan: Plan, name: str) -> bool:
    # A plan that an older whet saved may not know the setting.
    return name in plan.settings and plan.value(name) == "own"


def _contiguous(stepper: Stepper) -> AbstractContextManager[object]:
    # Nothing to undo: the values are the same.
    make_contiguous(stepper.model, stepper.optimizer)
    return nullcontext()


@contextmanager
def _in_fp32(stepper: Stepper, plan: Plan) -> Iterator[None]:
    stepper.use_precision("fp32", loss_scaling="off")
    try:
        yield
    finally:
        stepper.use_precision(str(plan.value("precision")), loss_scaling=str(plan.value("loss_scaling")))
