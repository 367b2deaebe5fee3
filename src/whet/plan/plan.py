"""A plan: the frozen set of settings of one run, made by rules, measurements and your own word, in that order."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from whet.base.errors import UsageError, WhetError, nearest
from whet.base.record import Record
from whet.machine.facts import Conditions, Machine
from whet.plan.cautions import cautions
from whet.plan.chosen_batch import ChosenBatch
from whet.plan.hazards import hazards
from whet.plan.rule import Facts, Rule
from whet.plan.rules import ALL
from whet.plan.setting import Measured, Scalar, Setting
from whet.plan.trial import Trial
from whet.plan.workload import Workload

FORMAT_VERSION = 1
_MAY_BE_UNSET = ("threads", "bucket_mb", "memory_gb", "checkpoint_steps", "checkpoint_epochs")
"""What rules may leave open: None."""


class Plan(Record):
    """How one workload is executed on one machine."""

    format_version: int = FORMAT_VERSION
    machine: Machine
    conditions: Conditions
    workload: Workload
    wishes: Mapping[str, Scalar] = Field(default_factory=dict)
    measured: Mapping[str, Measured] = Field(default_factory=dict)
    settings: Mapping[str, Setting]
    cautions: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()
    """Ids of the known wrong results that apply to this torch on this machine (docs/hazards.md)."""
    trials: tuple[Trial, ...] = ()
    """What was measured for it, the losers too; none in plans of before."""

    def __str__(self) -> str:
        from whet.plan.words import plan_lines

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
    wishes: Mapping[str, Scalar] | None = None,
    measured: Mapping[str, Measured] | None = None,
    conditions: Conditions | None = None,
    trials: tuple[Trial, ...] = (),
) -> Plan:
    """The plan for a workload on a machine; your wishes are kept, measurements go before rules.

    Needs no torch, and the machine need not be this one.
    """
    wishes = {name: value for name, value in (wishes or {}).items() if value is not None}
    measured, conditions = measured or {}, conditions or Conditions()
    _refuse_unknown({*wishes, *measured})
    decided: dict[str, Setting] = {}
    facts = Facts(machine=machine, conditions=conditions, workload=workload, decided=decided)
    for rule in ALL:
        decided[rule.setting] = _decide(rule, facts, wishes, measured)
        if rule.setting == "on_device_failure":
            _settle_missing_device(facts, decided)
    return Plan(
        machine=machine,
        conditions=conditions,
        workload=workload,
        wishes=wishes,
        measured=measured,
        settings=decided,
        cautions=tuple(cautions(facts)),
        hazards=tuple(hazard.id for hazard in hazards(machine, facts.device)),
        trials=trials,
    )


def override(plan: Plan, wishes: Mapping[str, Scalar]) -> Plan:
    """The plan as it would be with these wishes too; what depends on them is decided again."""
    return make_plan(
        plan.machine,
        plan.workload,
        wishes={**plan.wishes, **wishes},
        measured=plan.measured,
        conditions=plan.conditions,
        trials=plan.trials,
    )


def with_batch(plan: Plan, chosen: ChosenBatch | None) -> Plan:
    """The plan with how its global batch came about."""
    return plan.model_copy(update={"workload": plan.workload.model_copy(update={"batch": chosen})})


def with_learnt(plan: Plan, learnt: Mapping[str, Measured]) -> Plan:
    """The plan after the run itself has shown that it must differ: that goes before your own word too, and is said."""
    settings = {
        **plan.settings,
        **{
            name: Setting(value=found.value, reason=found.reason, source="measured", evidence=found.evidence)
            for name, found in learnt.items()
        },
    }
    facts = Facts(machine=plan.machine, conditions=plan.conditions, workload=plan.workload, decided=settings)
    return plan.model_copy(update={"settings": settings, "cautions": tuple(cautions(facts))})


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
    for rule in ALL:
        saved = plan.settings.get(rule.setting)
        is_open = saved is not None and saved.value is None and rule.setting in _MAY_BE_UNSET
        if saved is not None and not is_open and not rule.law.holds(saved.value):
            raise WhetError(
                f"{where} has a setting that no plan decides",
                got=f"{rule.setting}={saved.value!r}"[:200],
                try_=f"{rule.law.text}; restore the file from a copy, or another run folder",
            )
    return plan


def setting_names() -> tuple[str, ...]:
    """The names of all settings, in the order of decision."""
    return tuple(rule.setting for rule in ALL)


def _decide(rule: Rule, facts: Facts, wishes: Mapping[str, Scalar], measured: Mapping[str, Measured]) -> Setting:
    by_rule = rule.decide(facts)
    evidence: dict[str, Any] = {"rule": rule.id, **by_rule.evidence}
    if rule.setting in wishes:
        value = wishes[rule.setting]
        if not rule.law.holds(value):
            raise UsageError(f"{rule.setting} must be {rule.law.text}", got=repr(value), try_=rule.sections["Override"])
        reason = "you said so" if value == by_rule.value else f"you said so; the rule says {by_rule.value}"
        return Setting(value=value, reason=reason, source="you", evidence={**evidence, "rule_value": by_rule.value})
    if rule.setting in measured:
        found = measured[rule.setting]
        return Setting(value=found.value, reason=found.reason, source="measured", evidence=found.evidence)
    return Setting(value=by_rule.value, reason=by_rule.reason, source="rule", evidence=evidence)


def _refuse_unknown(names: set[str]) -> None:
    known = setting_names()
    for name in sorted(names - set(known)):
        meant = nearest(name, known)
        hint = f"did you mean {meant!r}?" if meant else "one of " + ", ".join(known)
        raise UsageError("a plan has no such setting", got=name, try_=hint)


def _settle_missing_device(facts: Facts, decided: dict[str, Setting]) -> None:
    """A device that was asked for and is not there is refused; or it becomes the CPU, if that was asked for too."""
    if facts.device == "cpu" or facts.accelerator is not None:
        return
    asked = facts.value("device")
    if facts.value("on_device_failure") == "cpu" and facts.device in ("mps", "cuda"):
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
