"""One trial of a search: prepare a candidate, time it against the best settings, check its cost and precision."""

import math
import random
from dataclasses import dataclass, field

from whet.autotune.candidates import PlanCandidate, apply_candidate, device_kind, memory_limit, plan_with
from whet.autotune.memory_model import MemoryModel
from whet.autotune.paired_timing import PairedTiming, compare
from whet.autotune.result import BreakEven, describe_gain, describe_timeout, describe_timing, show_setting
from whet.autotune.statistics import MIN_GAIN, is_stable
from whet.autotune.step_bench import (
    Budget,
    PreparedStep,
    ProbeFailedError,
    ProgressReporter,
    Settings,
    SettingsAgreement,
    StepBench,
)
from whet.base.units import format_bytes, format_seconds
from whet.plan.plan import Plan
from whet.plan.render import format_value
from whet.plan.setting import Scalar, TuneTrial, Verdict

# Maximum number of pairs in a trial. A gain that needs more pairs is not worth the time. The final comparison may use
# more.
_MAX_PAIRS = 24
# Precisions that need no comparison with fp32.
_EXACT = ("fp32",)
# The note mentions the break-even point only if the additional preparation takes more than this many seconds.
_MIN_NOTED_SECONDS = {"compile": 1.0, "graph": 0.05, "workers": 1.0}
# Expected duration of comparing compiled code with the model's own code, in steps, and at least in seconds. It took
# 7.6 s for a GPT-2 on an H200, whose gradients travel to the host, and a few steps elsewhere.
_CHECK_STEPS = 12
_MIN_CHECK_SECONDS = {"cpu": 0.5}
_MIN_CHECK_SECONDS_GPU = 4.0
# A graph is tried on the model's own code if launching kernels takes at least this share of a step. With smaller
# shares, graphs gained 0 to 2 % on an H200; with compiled code, whose kernels are short, up to 5 %.
_MIN_LAUNCH_SHARE = 0.5
# An upper bound for any CPU core in float32: two 512-bit FMA units at 3 GHz.
_MAX_FLOPS_PER_CORE = 2e11


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSettings:
    """Settings with the complete plan for them and their prepared step."""

    settings: Settings
    plan: Plan
    prepared: PreparedStep


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchContext:
    """State shared by all trials of one search."""

    rule_plan: Plan
    bench: StepBench
    budget: Budget
    random_order: random.Random
    progress: ProgressReporter
    memory: MemoryModel = field(default_factory=MemoryModel)
    agreements: dict[tuple[object, ...], SettingsAgreement] = field(default_factory=dict)
    plans: dict[frozenset[tuple[str, Scalar]], Plan] = field(default_factory=dict)

    def plan_with(self, settings: Settings) -> Plan:
        """Return the complete plan for these settings. Plans are cached."""
        key = frozenset(settings.items())
        if key not in self.plans:
            self.plans[key] = plan_with(self.rule_plan, settings)
        return self.plans[key]

    def prepare(self, settings: Settings, *, seconds: float, may_extend: bool = True) -> PreparedSettings:
        """Prepare settings, and record their peak memory. Raise ProbeFailedError on failure.

        Compilation extends the budget unless `may_extend` is False.
        """
        plan, started = self.plan_with(settings), self.bench.clock()
        try:
            prepared = self.bench.prepare(settings, seconds=seconds)
        finally:
            if plan.compile != "off" and may_extend:
                self.budget.extend_for_compiling(self.bench.clock() - started)
        ready = PreparedSettings(settings=settings, plan=plan, prepared=prepared)
        self.record_memory(ready)
        return ready

    def record_memory(self, ready: PreparedSettings) -> None:
        """Add the peak memory of prepared settings to the memory model."""
        self.memory.add(
            ready.settings,
            micro_batch=ready.plan.micro_batch,
            measured=ready.prepared.peak_bytes(),
            predicted=self.bench.predicted_bytes(ready.settings),
        )

    def agreement(self, ready: PreparedSettings, *, seconds: float) -> SettingsAgreement:
        """Compare settings with fp32. Results are cached by device, precision, attention kernel and norm kernel."""
        plan = ready.plan
        key = (plan.device, plan.precision, plan.attention, plan.norms)
        if key not in self.agreements:
            self.agreements[key] = self.bench.agreement(ready.settings, seconds=seconds)
        return self.agreements[key]


def rule_out(context: SearchContext, best: PreparedSettings, candidate: PlanCandidate) -> TuneTrial | None:
    """Return the record of a candidate that does not fit into memory or cannot win, or None if it should be tried."""
    settings = apply_candidate(best.settings, candidate)
    plan = context.plan_with(settings)
    reason = _why_cpu_cannot_win(plan, best, candidate) or _why_graph_cannot_win(best, candidate)
    reason = reason or context.memory.excess(
        settings,
        micro_batch=plan.micro_batch,
        predicted=context.bench.predicted_bytes(settings),
        limit=memory_limit(plan),
    )
    if reason is None:
        return None
    note = f"{show_setting(candidate.setting, candidate.value)}: not tried, {reason}"
    return TuneTrial(
        setting=candidate.setting, settings=settings, against=best.settings, verdict="not tried", note=note
    )


def _why_cpu_cannot_win(plan: Plan, best: PreparedSettings, candidate: PlanCandidate) -> str | None:
    """Return the reason why the CPU cannot be faster than the best settings, or None if it might be.

    It cannot if its arithmetic alone takes longer than a step of the best settings. A slow step on the CPU can use more
    of the budget than all other trials, so this check comes before a trial.
    """
    cores = plan.machine.cpu.logical_cores
    if candidate.setting != "device" or device_kind(plan) != "cpu" or cores is None:
        return None
    workload = plan.workload
    rows = workload.global_batch_size * (workload.mean_length or 1.0)
    # A dense layer with N parameters takes 6 N FLOPs per row: 2 N in the forward and 4 N in the backward pass.
    seconds = 6 * workload.num_parameters * rows / (cores * _MAX_FLOPS_PER_CORE)
    if seconds <= best.prepared.step_seconds:
        return None
    return f"its arithmetic alone would take {format_seconds(seconds)} a step"


def _why_graph_cannot_win(best: PreparedSettings, candidate: PlanCandidate) -> str | None:
    """Return the reason why graph=on would not be faster, or None if it might be.

    The reason is known only if the best settings have graph=launch_bound: their first steps measure how much of the
    time goes into launching kernels.
    """
    launches = best.prepared.launches
    if [*candidate.changes.items()] != [("graph", "on")] or best.plan.graph != "launch_bound":
        return None
    is_long = launches.share is not None and (best.plan.compile != "off" or launches.share >= _MIN_LAUNCH_SHARE)
    return None if is_long else launches.obstacle


def check_seconds(best: PreparedSettings, candidate: PlanCandidate) -> float:
    """Return the time to reserve for comparing compiled code with the model's own code; 0 for other candidates."""
    return _check_seconds(best) if candidate.setting == "compile" else 0.0


def _check_seconds(best: PreparedSettings) -> float:
    least = _MIN_CHECK_SECONDS.get(device_kind(best.plan), _MIN_CHECK_SECONDS_GPU)
    return max(least, _CHECK_STEPS * best.prepared.step_seconds)


def run_trial(
    context: SearchContext, best: PreparedSettings, candidate: PlanCandidate, *, until: float, prepare_seconds: float
) -> tuple[TuneTrial, PreparedSettings | None]:
    """Try a candidate and return its record, with the prepared settings if they are better.

    Settings that are not better are closed, and None is returned instead of them.
    """
    started, budget_end = context.bench.clock(), context.budget.end
    context.progress.begin(" and ".join(f"{name} {format_value(value)}" for name, value in candidate.changes.items()))
    settings, name = apply_candidate(best.settings, candidate), show_setting(candidate.setting, candidate.value)

    def record(
        verdict: Verdict, note: str, ready: PreparedSettings | None = None, timing: PairedTiming | None = None
    ) -> TuneTrial:
        spent = context.bench.clock() - started
        return record_trial(candidate.setting, settings, best, verdict, note, ready=ready, timing=timing, spent=spent)

    try:
        # Only the first compilation has its own time. Settings that compile again use what is left of the search.
        may_extend = candidate.setting == "compile" or context.rule_plan.compile != "off"
        ready = context.prepare(settings, seconds=prepare_seconds, may_extend=may_extend)
    except ProbeFailedError as error:
        if error.kind == "timeout":
            usual = best.prepared.preparation_seconds
            return record("cut off", describe_timeout(name, seconds=prepare_seconds, usual=usual)), None
        if error.kind == "unsupported":
            return record("not tried", f"{name}: not tried, {error.reason}"), None
        return record("failed", f"{name}: {error.kind}, {error.reason}"), None

    is_kept = False
    try:
        until += context.budget.end - budget_end
        verdict, note, timing = _judge(context, best, ready, candidate, until=until)
        trial = record(verdict, note, ready, timing)
        is_kept = verdict in ("faster", "likely")
        return trial, ready if is_kept else None
    finally:
        if not is_kept:
            ready.prepared.close()


def _judge(
    context: SearchContext, best: PreparedSettings, ready: PreparedSettings, candidate: PlanCandidate, *, until: float
) -> tuple[Verdict, str, PairedTiming | None]:
    """Time prepared settings and return the verdict, its explanation and the timing.

    Settings win if they fit into memory, are faster, recover their cost within this run, and agree with fp32.
    """
    name = show_setting(candidate.setting, candidate.value)
    excess = _memory_excess(ready)
    if excess is not None:
        return "failed", f"{name}: {excess}", None
    try:
        timing = compare(
            ready.prepared,
            best.prepared,
            clock=context.bench.clock,
            until=until - check_seconds(best, candidate),
            random_order=context.random_order,
            max_pairs=_MAX_PAIRS,
            tick=context.progress.tick,
        )
    except ProbeFailedError as error:
        return "failed", f"{name}: {error.kind}, {error.reason}", None
    # The peak may have increased during the timed steps.
    context.record_memory(ready)
    excess = _memory_excess(ready)
    if excess is not None:
        return "failed", f"{name}: {excess}", timing
    is_likely = _is_likely(timing)
    if timing.outcome != "faster" and not is_likely:
        return timing.outcome, describe_timing(name, timing), timing

    cost = break_even(ready, best, timing)
    if not cost.pays:
        return "not worth it", cost.describe(candidate.setting), timing
    # These comparisons are expensive, so make them only for winners.
    if (
        candidate.setting == "compile"
        and (problem := _compile_objection(context, ready, timing, until=until)) is not None
    ):
        return problem[0], f"{name}: {problem[1]}", timing
    objection = _precision_objection(context, ready, candidate, until=until)
    if objection is not None:
        verdict, note = objection
        return verdict, f"{name}{note}", timing
    result = timing.estimate
    assert result is not None
    note = describe_gain(result, show_setting(candidate.setting, best.plan.settings[candidate.setting].value))
    if cost.cost_seconds > _MIN_NOTED_SECONDS.get(candidate.setting, math.inf):
        note += f"; {cost.describe(candidate.setting)}"
    return "likely" if is_likely else "faster", note, timing


def _compile_objection(
    context: SearchContext, ready: PreparedSettings, timing: PairedTiming, *, until: float
) -> tuple[Verdict, str] | None:
    """Return the verdict on compiled code that is wrong or could not be checked, and why; None if it may be used.

    Like compiling, checking may take longer than the search itself: the run would make the same comparison.
    """
    clock, budget = context.bench.clock, context.budget
    started = clock()
    seconds = until - started - context.bench.recovery_seconds + budget.compile_seconds
    estimate = timing.estimate
    gain = f"{estimate.speedup:.2f}x as fast, but " if estimate else ""
    late = f"{gain}not checked in time, staying eager"
    # A comparison runs the model at least four times.
    if seconds < 4 * ready.prepared.step_seconds:
        return "not checked", late
    try:
        ready.prepared.check(seconds=seconds)
    except ProbeFailedError as error:
        return ("not checked", late) if error.kind == "timeout" else ("failed", f"{error.kind}, {error.reason}")
    finally:
        budget.extend_for_compiling(clock() - started)
    return None


def _precision_objection(
    context: SearchContext, ready: PreparedSettings, candidate: PlanCandidate, *, until: float
) -> tuple[Verdict, str] | None:
    """Compare settings with fp32. Return a verdict and its reason if their results differ too much, otherwise None.

    Only changes of precision, attention kernels and norm kernels are compared with fp32.
    """
    if not {"precision", "attention", "norms"} & {*candidate.changes} or ready.plan.precision in _EXACT:
        return None
    try:
        agreement = context.agreement(ready, seconds=max(0.0, until - context.bench.clock()))
    except ProbeFailedError as error:
        return "unclear", f": its agreement with fp32 could not be checked ({error.reason})"
    if agreement.agrees:
        return None
    worst = max(agreement.loss_error, agreement.gradient_error)
    return "disagrees", f" computes different results: error {worst:.2g}, bound {agreement.bound:.2g}"


def _is_likely(timing: PairedTiming) -> bool:
    """Return whether the interval after all pairs lies above the minimum gain although the test is inconclusive.

    Such a candidate is more likely faster than not. Keeping it makes no claim, because the final comparison decides.
    """
    result = timing.estimate
    if timing.outcome != "unclear" or result is None or result.pairs < _MAX_PAIRS:
        return False
    return result.low >= 1 + MIN_GAIN and is_stable(timing.log_ratios)


def break_even(ready: PreparedSettings, against: PreparedSettings, timing: PairedTiming) -> BreakEven:
    """Return the additional preparation time of settings and the time that they save in each step.

    On a GPU, the comparison of compiled code with the model's own code counts too: the run makes it again.
    """
    result = timing.estimate
    # Use the ratios within pairs: on a busy machine, the medians of both sides may stem from different moments.
    saved = timing.baseline_seconds * (1 - 1 / result.speedup) if result else 0.0
    cost = ready.prepared.preparation_seconds - against.prepared.preparation_seconds
    if ready.plan.compile != "off" and against.plan.compile == "off" and device_kind(ready.plan) != "cpu":
        cost += _check_seconds(against)
    return BreakEven(
        cost_seconds=max(0.0, cost),
        saved_seconds=saved,
        num_steps=ready.plan.workload.num_steps,
    )


def record_trial(
    setting: str,
    settings: Settings,
    against: PreparedSettings,
    verdict: Verdict,
    note: str,
    *,
    ready: PreparedSettings | None = None,
    timing: PairedTiming | None = None,
    spent: float = 0.0,
) -> TuneTrial:
    """Return the record of one trial, as stored in the plan."""
    result = timing.estimate if timing else None
    return TuneTrial(
        setting=setting,
        settings=dict(settings),
        against=dict(against.settings),
        verdict=verdict,
        note=note,
        repeats=result.pairs if result else 0,
        median_seconds=timing.candidate_seconds if timing else None,
        baseline_seconds=timing.baseline_seconds if timing else None,
        speedup=result.speedup if result else None,
        interval=(result.low, result.high) if result else None,
        preparation_seconds=ready.prepared.preparation_seconds if ready else None,
        peak_bytes=ready.prepared.peak_bytes() if ready else None,
        spent_seconds=max(0.0, spent),
    )


def _memory_excess(ready: PreparedSettings) -> str | None:
    peak, limit = ready.prepared.peak_bytes(), memory_limit(ready.plan)
    if peak is None or limit is None or peak <= limit:
        return None
    return f"took {format_bytes(peak)}, more than the {format_bytes(limit)} planned for"
