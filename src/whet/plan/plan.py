"""Plan: the settings of one run, decided by rules, measurements and the user's overrides."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from whet.base.errors import InsufficientMemoryError, UsageError, WhetError, closest_match
from whet.base.model import FrozenModel
from whet.machine.facts import Conditions, Machine
from whet.plan.rule import Rule, RuleContext
from whet.plan.rules import ALL_RULES
from whet.plan.setting import MeasuredSetting, Scalar, Setting, TuneTrial
from whet.plan.values import SettingValues
from whet.plan.warnings import known_hazards, plan_warnings
from whet.plan.workload import AutoBatch, Workload

FORMAT_VERSION = 1
_NULLABLE = ("threads", "bucket_mb", "memory_gb", "checkpoint_steps", "checkpoint_epochs")
"""What rules may leave open: None."""


class Plan(SettingValues, FrozenModel):
    """How one workload is executed on one machine."""

    format_version: int = FORMAT_VERSION
    machine: Machine
    conditions: Conditions
    workload: Workload
    overrides: Mapping[str, Scalar] = Field(default_factory=dict)
    measured: Mapping[str, MeasuredSetting] = Field(default_factory=dict)
    settings: Mapping[str, Setting]
    cautions: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()
    """Ids of the known wrong results that apply to this torch on this machine (docs/hazards.md)."""
    trials: tuple[TuneTrial, ...] = ()
    """What was measured for it, the losers too; none in plans of before."""

    def __str__(self) -> str:
        from whet.plan.render import plan_lines

        return "\n".join(plan_lines(self, width=120))

    def value(self, name: str) -> Scalar:
        """The value of one setting."""
        if name not in self.settings:
            raise WhetError("the plan lacks a setting", got=f"no {name}", try_="another run folder, or --fresh")
        return self.settings[name].value


def make_plan(
    machine: Machine,
    workload: Workload,
    *,
    overrides: Mapping[str, Scalar] | None = None,
    measured: Mapping[str, MeasuredSetting] | None = None,
    conditions: Conditions | None = None,
    trials: tuple[TuneTrial, ...] = (),
) -> Plan:
    """The plan for a workload on a machine; your wishes are kept, measurements go before rules.

    Needs no torch, and the machine need not be this one.
    """
    overrides = {name: value for name, value in (overrides or {}).items() if value is not None}
    measured, conditions = measured or {}, conditions or Conditions()
    _check_setting_names({*overrides, *measured})
    decided: dict[str, Setting] = {}
    facts = RuleContext(machine=machine, conditions=conditions, workload=workload, settings=decided)
    for rule in ALL_RULES:
        decided[rule.setting] = _decide(rule, facts, overrides, measured)
        if rule.setting == "on_device_failure":
            _resolve_missing_device(facts, decided)
    return Plan(
        machine=machine,
        conditions=conditions,
        workload=workload,
        overrides=overrides,
        measured=measured,
        settings=decided,
        cautions=tuple(plan_warnings(facts)),
        hazards=tuple(hazard.id for hazard in known_hazards(machine, facts.device)),
        trials=trials,
    )


def override(plan: Plan, overrides: Mapping[str, Scalar]) -> Plan:
    """The plan as it would be with these wishes too; what depends on them is decided again."""
    return make_plan(
        plan.machine,
        plan.workload,
        overrides={**plan.overrides, **overrides},
        measured=plan.measured,
        conditions=plan.conditions,
        trials=plan.trials,
    )


def with_auto_batch(plan: Plan, chosen: AutoBatch | None) -> Plan:
    """The plan with how its global batch came about."""
    return plan.model_copy(update={"workload": plan.workload.model_copy(update={"batch": chosen})})


def with_runtime_changes(plan: Plan, learnt: Mapping[str, MeasuredSetting]) -> Plan:
    """The plan after the run itself has shown that it must differ: that goes before your own word too, and is said."""
    settings = {
        **plan.settings,
        **{
            name: Setting(value=found.value, reason=found.reason, source="measured", evidence=found.evidence)
            for name, found in learnt.items()
        },
    }
    facts = RuleContext(machine=plan.machine, conditions=plan.conditions, workload=plan.workload, settings=settings)
    return plan.model_copy(update={"settings": settings, "cautions": tuple(plan_warnings(facts))})


def read_plan(data: object, *, where: str) -> Plan:
    """A plan back from its JSON."""
    version = data.get("format_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise WhetError(
            f"{where} was written by a newer whet",
            got=f"plan format {version}; this whet reads up to {FORMAT_VERSION}",
            try_="update whet",
        )
    plan = Plan.from_json(data, where=where)
    for rule in ALL_RULES:
        saved = plan.settings.get(rule.setting)
        is_open = saved is not None and saved.value is None and rule.setting in _NULLABLE
        if saved is not None and not is_open and not rule.law.holds(saved.value):
            raise WhetError(
                f"{where} has a setting that no plan decides",
                got=f"{rule.setting}={saved.value!r}"[:200],
                try_=f"{rule.law.text}; restore the file from a copy, or another run folder",
            )
    return plan


def setting_names() -> tuple[str, ...]:
    """The names of all settings, in the order of decision."""
    return tuple(rule.setting for rule in ALL_RULES)


def _decide(
    rule: Rule, facts: RuleContext, overrides: Mapping[str, Scalar], measured: Mapping[str, MeasuredSetting]
) -> Setting:
    by_rule = rule.decide(facts)
    evidence: dict[str, Any] = {"rule": rule.id, **by_rule.evidence}
    if rule.setting in overrides:
        value = overrides[rule.setting]
        if not rule.law.holds(value):
            raise UsageError(f"{rule.setting} must be {rule.law.text}", got=repr(value), try_=rule.sections["Override"])
        reason = "you said so" if value == by_rule.value else f"you said so; the rule says {by_rule.value}"
        return Setting(value=value, reason=reason, source="you", evidence={**evidence, "rule_value": by_rule.value})
    if rule.setting in measured:
        found = measured[rule.setting]
        return Setting(value=found.value, reason=found.reason, source="measured", evidence=found.evidence)
    return Setting(value=by_rule.value, reason=by_rule.reason, source="rule", evidence=evidence)


def _check_setting_names(names: set[str]) -> None:
    known = setting_names()
    for name in sorted(names - set(known)):
        meant = closest_match(name, known)
        hint = f"did you mean {meant!r}?" if meant else "one of " + ", ".join(known)
        raise UsageError("a plan has no such setting", got=name, try_=hint)


def _resolve_missing_device(facts: RuleContext, decided: dict[str, Setting]) -> None:
    """A device that was asked for and is not there is refused; or it becomes the CPU, if that was asked for too."""
    if facts.device == "cpu" or facts.accelerator is not None:
        return
    asked = facts.device_name
    if facts.on_device_failure == "cpu" and facts.device in ("mps", "cuda"):
        reason = f"{asked} is not there, and on_device_failure=cpu"
        decided["device"] = decided["device"].model_copy(update={"value": "cpu", "reason": reason})
        return
    available = [a.kind for a in facts.machine.accelerators]
    why = next((a for a in facts.machine.absent if a.device == facts.device), None)
    raise UsageError(
        f"{facts.machine.name} has no device {facts.device!r}",
        got=f"--device {asked}" + (f" ({why.reason})" if why else ""),
        try_=why.cure if why else "--device " + " or --device ".join([*available, "cpu"]),
    )


def with_smaller_micro_batch(plan: Plan, at_most: int, *, reason: str, problem: str) -> Plan:
    """The plan with the largest even cut of the global batch that is no larger than `at_most`."""
    whole = plan.workload.global_batch_size
    cuts = -(-whole // at_most)
    micro = -(-whole // cuts)
    evidence = {"problem": problem, "before": plan.micro_batch}
    return with_runtime_changes(
        plan,
        {
            "micro_batch": MeasuredSetting(value=micro, reason=reason, evidence=evidence),
            "accumulation": MeasuredSetting(value=cuts, reason=f"{cuts} times {micro} make {whole}", evidence=evidence),
            "eval_batch": MeasuredSetting(
                value=min(_as_int(plan.eval_batch), 2 * micro),
                reason="no backward pass, so twice the micro-batch",
                evidence=evidence,
            ),
        },
    )


def with_smaller_eval_batch(plan: Plan, *, step: int, problem: str) -> Plan:
    """The plan with half of what is evaluated at once; refuses where it is one sample already."""
    before = _as_int(plan.eval_batch)
    if before == 1:
        raise InsufficientMemoryError(
            "not even one sample can be evaluated", got=problem, try_="a smaller model or shorter samples"
        )
    reason = f"evaluating {before} at once ran out of memory at step {step:,}"
    return with_runtime_changes(
        plan, {"eval_batch": MeasuredSetting(value=before // 2, reason=reason, evidence={"problem": problem})}
    )


def _as_int(value: object) -> int:
    assert isinstance(value, int)
    return value
