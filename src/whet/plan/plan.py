"""The plan of a run: settings decided by rules, measurements and the user's overrides."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from whet.base.errors import InsufficientMemoryError, UsageError, WhetError, nearest_names
from whet.base.model import FrozenModel
from whet.machine.facts import Machine, SystemState
from whet.plan.environment import forced_value, no_effect_reason
from whet.plan.rule import Rule, RuleContext
from whet.plan.rules import ALL_RULES
from whet.plan.setting import MeasuredSetting, Scalar, Setting, TuneTrial
from whet.plan.values import DECLARED, SETTING_NAMES, SettingValues, names_of
from whet.plan.warnings import known_hazards, plan_warnings
from whet.plan.workload import AutoBatch, Workload

FORMAT_VERSION = 1

# Names in other tools for values that follow from other settings, and what to set instead.
_MICRO_BATCH = "micro_batch=N: the accumulation is global_batch_size / micro_batch"
_COPIES = "copies=overlapped or copies=blocking: pinned memory is used for overlapped copies"
_DERIVED = {
    "accumulation": _MICRO_BATCH,
    "accumulation_steps": _MICRO_BATCH,
    "accumulate_grad_batches": _MICRO_BATCH,
    "gradient_accumulation_steps": _MICRO_BATCH,
    "pin_memory": _COPIES,
    "persistent_workers": "workers=N: workers live as long as the run",
    "prefetch_factor": "prefetch=N",
    "watermarks": "high_watermark and low_watermark",
}


class Plan(FrozenModel, SettingValues):
    """The settings for running one workload on one machine.

    The value of a setting is an attribute (`plan.precision`). `plan.settings["precision"]` also has its reason, source
    and evidence.
    """

    format_version: int = FORMAT_VERSION
    machine: Machine
    system_state: SystemState
    workload: Workload
    overrides: Mapping[str, Scalar] = Field(default_factory=dict)
    """Settings that the user has chosen."""
    measured: Mapping[str, MeasuredSetting] = Field(default_factory=dict)
    settings: Mapping[str, Setting]
    warnings: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()
    """Ids of the known bugs that apply to this machine and this version of torch (docs/hazards.md)."""
    trials: tuple[TuneTrial, ...] = ()
    """All candidates that were measured for this plan."""

    def __str__(self) -> str:
        from whet.plan.render import plan_lines

        return "\n".join(plan_lines(self, width=120))

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step in each process. Not a setting, because it follows from the micro-batch."""
        return -(-self.workload.samples_per_rank // self.micro_batch)


def make_plan(
    machine: Machine,
    workload: Workload,
    *,
    overrides: Mapping[str, Scalar] | None = None,
    measured: Mapping[str, MeasuredSetting] | None = None,
    system_state: SystemState | None = None,
    trials: tuple[TuneTrial, ...] = (),
) -> Plan:
    """Return the plan for a workload on a machine.

    Overrides take precedence over the environment, the environment over measurements, and measurements over rules.
    torch is not needed, so the plan may be for another machine. `system_state.environment` holds what the environment
    fixes.
    """
    # None means that the user has not given the setting.
    overrides = {name: value for name, value in (overrides or {}).items() if value is not None}
    measured, system_state = measured or {}, system_state or SystemState()
    _check_setting_names({*overrides, *measured})
    # The rules fill this mapping one by one, so that each rule sees the settings decided before it.
    settings: dict[str, Setting] = {}
    context = RuleContext(machine=machine, system_state=system_state, workload=workload, settings=settings)
    for rule in ALL_RULES:
        settings[rule.setting] = _decide(rule, context, overrides, measured)
        # Check the device now that both settings are decided, because all later rules depend on the device.
        if rule.setting == "on_device_failure":
            _resolve_missing_device(context, settings)
    return Plan(
        machine=machine,
        system_state=system_state,
        workload=workload,
        overrides=overrides,
        measured=measured,
        settings=settings,
        warnings=tuple(plan_warnings(context)),
        hazards=tuple(hazard.id for hazard in known_hazards(machine, context.device_type)),
        trials=trials,
    )


def make_plan_again(
    plan: Plan,
    *,
    workload: Workload | None = None,
    overrides: Mapping[str, Scalar] | None = None,
    measured: Mapping[str, MeasuredSetting] | None = None,
    trials: tuple[TuneTrial, ...] | None = None,
) -> Plan:
    """Make a plan from the inputs of another one, except for those that are given."""
    return make_plan(
        plan.machine,
        plan.workload if workload is None else workload,
        overrides=plan.overrides if overrides is None else overrides,
        measured=plan.measured if measured is None else measured,
        system_state=plan.system_state,
        trials=plan.trials if trials is None else trials,
    )


def override(plan: Plan, overrides: Mapping[str, Scalar]) -> Plan:
    """Return the plan with more overrides. Settings that depend on them are decided again."""
    return make_plan_again(plan, overrides={**plan.overrides, **overrides})


def with_more_facts(plan: Plan, facts: Mapping[str, Any], *, is_started: bool) -> Plan:
    """Return the plan with more facts about its workload. Settings that are in force keep their values.

    Before the first step, the settings that depend on the memory of a sample are decided again. Later, only the
    micro-batch can change, to the whole batch.
    """
    workload, measured = plan.workload.model_copy(update=facts), dict(plan.measured)
    if workload.whole_batch_reason is not None:
        # It was measured with another loss, or before it was known that the batch must not be split.
        measured.pop("micro_batch", None)
    decided = make_plan_again(plan, workload=workload, measured=measured)
    names = ("micro_batch",) if is_started else names_of(lambda setting: setting.depends_on_samples)
    settings = {**plan.settings, **{name: decided.settings[name] for name in names}}
    return keep_runtime_changes(decided.model_copy(update={"settings": settings}), earlier=plan)


def keep_runtime_changes(plan: Plan, *, earlier: Plan) -> Plan:
    """Return a plan that replaces `earlier` during a run, with the changes that were forced at run time.

    A reduced micro-batch or evaluation batch stays reduced. If the batch must no longer be split, the micro-batch is
    not kept.
    """
    changes: dict[str, MeasuredSetting] = {}
    for name, setting in earlier.settings.items():
        measured = earlier.measured.get(name)
        if setting.source != "measured" or (measured is not None and measured.value == setting.value):
            continue
        if name == "micro_batch" and plan.workload.whole_batch_reason is not None:
            continue
        if name in ("micro_batch", "eval_batch") and plan.settings[name].value <= setting.value:  # type: ignore[operator]
            continue
        changes[name] = MeasuredSetting(value=setting.value, reason=setting.reason, evidence=setting.evidence)
    return with_runtime_changes(plan, changes)


def with_auto_batch(plan: Plan, chosen: AutoBatch | None) -> Plan:
    """Return the plan with the measurement of its global batch size, or without one if None."""
    return plan.model_copy(update={"workload": plan.workload.model_copy(update={"batch": chosen})})


def with_runtime_changes(plan: Plan, changes: Mapping[str, MeasuredSetting]) -> Plan:
    """Return the plan with changes that were forced at run time, for example by running out of memory.

    The changes take precedence over the user's overrides. The run reports them.
    """
    settings = {
        **plan.settings,
        **{
            name: Setting(value=change.value, reason=change.reason, source="measured", evidence=change.evidence)
            for name, change in changes.items()
        },
    }
    context = RuleContext(
        machine=plan.machine, system_state=plan.system_state, workload=plan.workload, settings=settings
    )
    return plan.model_copy(update={"settings": settings, "warnings": tuple(plan_warnings(context))})


def with_smaller_micro_batch(plan: Plan, at_most: int, *, reason: str, problem: str) -> Plan:
    """Return the plan with the largest micro-batch of at most `at_most` samples that splits a rank's share evenly.

    `reason` is the reason of the new setting, and `problem` is recorded as its evidence.
    """
    share = plan.workload.samples_per_rank
    # Split evenly: for 100 samples and at most 40, three parts of 34 use less memory than 40 + 40 + 20.
    num_parts = -(-share // at_most)
    micro = -(-share // num_parts)
    evidence = {"problem": problem, "before": plan.micro_batch}
    return with_runtime_changes(
        plan,
        {
            "micro_batch": MeasuredSetting(value=micro, reason=reason, evidence=evidence),
            "eval_batch": MeasuredSetting(
                value=min(plan.eval_batch, 2 * micro),
                reason="at most twice the micro-batch, which ran out of memory",
                evidence=evidence,
            ),
        },
    )


def with_smaller_eval_batch(plan: Plan, *, step: int, problem: str) -> Plan:
    """Return the plan with half the evaluation batch. Raise InsufficientMemoryError if it is a single sample."""
    before = plan.eval_batch
    if before == 1:
        raise InsufficientMemoryError(
            "a single sample does not fit for evaluation", got=problem, try_="a smaller model or shorter samples"
        )
    reason = f"evaluating {before} at once ran out of memory at step {step:,}"
    change = MeasuredSetting(value=before // 2, reason=reason, evidence={"problem": problem})
    return with_runtime_changes(plan, {"eval_batch": change})


def read_plan(data: object, *, where: str) -> Plan:
    """Read a plan from its JSON. `where` names the source in errors."""
    # Check the format version first, because validation would only report the first unknown key.
    version = data.get("format_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise WhetError(
            f"{where} was written by a newer whet",
            got=f"plan format {version}; this whet reads up to {FORMAT_VERSION}",
            try_="pip install --upgrade whet",
        )
    plan = Plan.from_json(data, where=where)
    for name, declared in DECLARED.items():
        saved = plan.settings.get(name)
        if saved is not None and not declared.allows(saved.value):
            raise WhetError(
                f"{where} has an invalid setting",
                got=f"{name}={saved.value!r}"[:200],
                try_=f"{declared.constraint.text}; restore the file from a copy, or use another run folder",
            )
    return plan


def _decide(
    rule: Rule, context: RuleContext, overrides: Mapping[str, Scalar], measured: Mapping[str, MeasuredSetting]
) -> Setting:
    # Run the rule even if its value is overridden, so that the plan can show the value it would have chosen.
    by_rule = rule.decide(context)
    evidence: dict[str, Any] = {"rule": rule.id, **by_rule.evidence}
    forced = forced_value(rule.setting, context)
    if rule.setting in overrides:
        value = overrides[rule.setting]
        if not rule.constraint.holds(value):
            raise UsageError(
                f"{rule.setting} must be {rule.constraint.text}", got=repr(value), try_=rule.sections["Override"]
            )
        no_effect = no_effect_reason(rule.setting, value, context)
        if no_effect is not None:
            # The plan shows what is executed. A warning names the override (plan/warnings.py).
            reason = f"your {value} has no effect: {no_effect}"
            return Setting(value=by_rule.value, reason=reason, source="rule", evidence={**evidence, "no_effect": value})
        if forced is not None and forced.is_final and forced.value != value:
            raise UsageError(
                f"{rule.setting} is fixed by the environment",
                got=f"{rule.setting}={value}, and {forced.origin}",
                try_=f"{rule.setting}={forced.value}, or unset {forced.origin.partition('=')[0]}",
            )
        reason = "using your optimizer's own kernels" if value == "yours" else "set by you"
        if value != by_rule.value:
            reason += f"; the rule would choose {by_rule.value}"
        return Setting(value=value, reason=reason, source="you", evidence={**evidence, "rule_value": by_rule.value})
    if forced is not None:
        would = "" if forced.value == by_rule.value else f"; the rule would choose {by_rule.value}"
        return Setting(
            value=forced.value,
            reason=f"{forced.origin} is in force{would}",
            source="environment",
            evidence={**evidence, "origin": forced.origin, "rule_value": by_rule.value},
        )
    if rule.setting in measured:
        # The decision is based on the measurement, so its evidence replaces that of the rule.
        best = measured[rule.setting]
        return Setting(value=best.value, reason=best.reason, source="measured", evidence=best.evidence)
    return Setting(value=by_rule.value, reason=by_rule.reason, source="rule", evidence=evidence)


def _check_setting_names(names: set[str]) -> None:
    for name in sorted(names - set(SETTING_NAMES)):
        if name in _DERIVED:
            raise UsageError(f"{name} is not a setting of the plan", got=name, try_=_DERIVED[name])
        hint = " or ".join(nearest_names(name, SETTING_NAMES))
        raise UsageError("a plan has no such setting", got=name, try_=hint)


def _resolve_missing_device(context: RuleContext, settings: dict[str, Setting]) -> None:
    """If the machine lacks the device, use the CPU if on_device_failure=cpu, otherwise raise UsageError."""
    if context.device_type == "cpu" or context.accelerator is not None:
        return
    if context.on_device_failure == "cpu" and context.device_type in ("mps", "cuda"):
        reason = f"{context.device} is not available, and on_device_failure=cpu"
        settings["device"] = settings["device"].model_copy(update={"value": "cpu", "reason": reason})
        return
    available = [a.kind for a in context.machine.accelerators]
    missing = next((d for d in context.machine.absent if d.device == context.device_type), None)
    raise UsageError(
        f"{context.machine.name} has no device {context.device_type!r}",
        got=f"device {context.device}" + (f" ({missing.reason})" if missing else ""),
        try_=missing.fix if missing else "--device " + " or --device ".join([*available, "cpu"]),
    )
