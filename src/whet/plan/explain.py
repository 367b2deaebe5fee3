"""Plans in words: one setting explained, two plans compared."""

from whet.base.errors import UsageError, nearest
from whet.base.record import Record
from whet.base.units import show_bytes
from whet.plan.plan import Plan
from whet.plan.prediction import predict_parts
from whet.plan.rules import ALL
from whet.plan.setting import Setting

_ABOUT_MEMORY = ("memory_gb", "micro_batch", "activation_checkpointing")


class Difference(Record):
    """A setting that two plans decide differently, each with its reason."""

    name: str
    ours: Setting
    theirs: Setting


def diff(ours: Plan, theirs: Plan) -> tuple[Difference, ...]:
    """The settings whose values differ, in the order of decision."""
    return tuple(
        Difference(name=name, ours=setting, theirs=theirs.settings[name])
        for name, setting in ours.settings.items()
        if setting.value != theirs.settings[name].value
    )


def explain(plan: Plan, name: str) -> str:
    """Why a plan sets `name` as it does: the value, the evidence, and the rule's own page."""
    if name == "global_batch_size":
        return _explain_batch(plan)
    rule = next((rule for rule in ALL if rule.setting == name), None)
    if rule is None:
        meant = nearest(name, plan.settings)
        hint = f"did you mean {meant!r}?" if meant else "one of " + ", ".join(plan.settings)
        raise UsageError("a plan has no such setting", got=name, try_=hint)
    if name not in plan.settings:
        raise UsageError("this plan is older than that setting", got=name, try_="one of " + ", ".join(plan.settings))
    setting = plan.settings[name]
    facts = [f"  {key} = {_show(value)}" for key, value in setting.evidence.items() if key != "rule"]
    return "\n".join(
        [
            f"{name} = {_show(setting.value)}   (from: {setting.source})",
            f"  {setting.reason}",
            "",
            "evidence",
            *(facts or ["  none"]),
            "",
            *(_memory(plan) if name in _ABOUT_MEMORY else ()),
            f"rule {rule.id}: {rule.what}",
            *(f"{section}: {text}" for section, text in rule.sections.items()),
        ]
    )


def _memory(plan: Plan) -> list[str]:
    """What a step is expected to take, part by part."""
    workload, micro = plan.workload, plan.value("micro_batch")
    assert isinstance(micro, int)
    parts = predict_parts(
        workload,
        micro_batch=micro,
        device=str(plan.value("device")),
        precision=str(plan.value("precision")),
        is_checkpointed=plan.value("activation_checkpointing") == "on",
    )
    if parts is None:
        return ["memory of a step: what activations take is measured before the first one", ""]
    trained, frozen = workload.num_parameters, workload.num_frozen
    of_what = {
        "weights": f"{trained + frozen:,} numbers of 4 bytes",
        "gradients": "one for each weight" if not frozen else f"only of the {trained:,} weights that are trained",
        "optimizer": f"{workload.optimizer_bytes} bytes for each weight that is trained",
        "activations": f"kept for the backward pass of {micro} samples of the greatest length, about",
        "device": "kernels and workspaces before the first tensor, about",
    }
    rows = [f"  {name:<12} {show_bytes(size):>8}  {of_what[name]}" for name, size in parts.items() if size]
    whole = f"  {'together':<12} {show_bytes(sum(parts.values())):>8}"
    measured = "  what a run really holds: whet report RUN; on this machine: whet plan RECIPE --measure"
    return [f"memory of a step with micro batch {micro}, computed", *rows, whole, measured, ""]


def _explain_batch(plan: Plan) -> str:
    chosen = plan.workload.batch
    if chosen is None:
        return f"global_batch_size = {plan.workload.global_batch_size}   (from: you)\n  a plan never changes it"
    rows = [
        f"  {point.batch:>7,}: {point.samples_per_second:,.4g} samples/s in {point.steps} steps"
        if point.samples_per_second
        else f"  {point.batch:>7,}: {point.words}"
        for point in chosen.points
    ]
    return "\n".join(
        [
            f"global_batch_size = {chosen.batch}   (from: measured, since you said auto)",
            *(f"  {line}" for line in chosen.lines),
            "",
            "evidence",
            *rows,
        ]
    )


def _show(value: object) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
