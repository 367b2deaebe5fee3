"""Coordinate search, within a time budget, for the settings that finish a run soonest."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from whet.autotune.candidates import PlanCandidate, apply_candidate, candidates, device_kind, search_order
from whet.autotune.paired_timing import PairedTiming, compare
from whet.autotune.result import NOT_QUIET, ConfirmedGain, TuningResult, describe_interval, measured_settings
from whet.autotune.step_bench import (
    TIMEOUT_FACTOR,
    Budget,
    ProbeFailedError,
    ProgressCallback,
    ProgressReporter,
    Settings,
    StepBench,
)
from whet.autotune.trial import (
    PreparedSettings,
    SearchContext,
    break_even,
    check_seconds,
    record_trial,
    rule_out,
    run_trial,
)
from whet.base.units import format_seconds
from whet.plan.plan import Plan
from whet.plan.render import format_value
from whet.plan.setting import MeasuredSetting, Scalar, TuneTrial, Verdict

# Passes over all settings for each retry threshold. A pass without a winner ends the loop early.
_PASSES = 3
# Minimum last speedup for trying a rejected change again with new best settings: in the first passes, and in the late
# passes, when no better candidates are left.
_RETRY_ABOVE, _LATE_RETRY_ABOVE = 0.85, 0.6
# A change is combined with another one only if its own speedup was at least this.
_COMBINE_ABOVE = 0.5
# If a micro-batch has a lower speedup than this, sizes farther from the best one are not tried.
_FLAT = 0.97
# Maximum fraction of the budget for preparing the rule-based plan. The rest is for trying candidates.
_FIRST_SHARE = 0.5
# Maximum fraction of the remaining time for preparing one candidate. Settings known to prepare slowly may use all of
# it.
_TRIAL_SHARE = 0.34
_SLOW_TO_PREPARE = ("compile", "graph", "workers")
# Maximum fraction of that time for the first of two ways to compile, so that there is time for the second. On a GPU
# with less time than this, the first one gets all of it: half would be too short for either.
_FIRST_COMPILE_SHARE = 0.5
_MIN_SHARED_SECONDS_GPU = 30.0
# GPU precisions to skip once the other one has been tried. On tensor cores, bf16 is as fast as fp16 and needs no loss
# scaling; tf32 is faster than fp32.
_AS_FAST = {"fp16": "bf16", "fp32": "tf32"}
# Settings that the traced code or its guards depend on: another value compiles the model again. `lengths` and
# `micro_batch` change shapes, `layout` strides, and the number of threads is part of the code for CPUs.
_COMPILED_INTO_CODE = (
    "device", "threads", "precision", "micro_batch", "lengths", "activation_checkpointing", "layout", "attention",
    "norms",
)  # fmt: skip
_MIN_PREPARE_SECONDS = 2.0
# The first use of a kernel may load hundreds of megabytes of libraries from a cold disk.
_MIN_PREPARE_SECONDS_GPU = 10.0
# Wait for a first step that is up to this many times slower, because a measured factor is better evidence than a
# timeout.
_PATIENT_STEPS = 50
# Number of pairs to reserve time for in the final comparison, and the maximum fraction of the budget to reserve.
_CONFIRM_PAIRS = 8
_CONFIRM_SHARE = 0.35
# A timeout with less than this fraction of the budget left was caused by the budget.
_SPENT_SHARE = 0.02


def search(
    plan: Plan,
    bench: StepBench,
    *,
    budget_seconds: float,
    compile_seconds: float = 0.0,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
) -> TuningResult:
    """Search for faster settings within the budget and return the confirmed result.

    Compilation may take up to `compile_seconds` beyond the budget, because the run reuses the compiled code from the
    cache. The result keeps the rule-based plan if no gain is confirmed.
    """
    budget = Budget(clock=bench.clock, start=bench.clock(), seconds=budget_seconds, compile_seconds=compile_seconds)
    progress = ProgressReporter(on_progress, budget)
    # The search itself stops at the budget. The bench kills a hanging probe slightly later.
    outer, bench.ends_at = bench.ends_at, budget.start + TIMEOUT_FACTOR * (budget_seconds + compile_seconds)
    bench.tick = None if on_progress is None else progress.tick
    try:
        context = SearchContext(
            rule_plan=plan, bench=bench, budget=budget, random_order=random.Random(seed), progress=progress
        )
        return _search(context)
    finally:
        bench.ends_at, bench.tick = outer, None


def _search(context: SearchContext) -> TuningResult:
    context.progress.begin("the rules' plan")
    try:
        base = context.prepare({}, seconds=_FIRST_SHARE * context.budget.seconds)
    except ProbeFailedError as error:
        note = f"nothing was measured: the rule-based plan itself could not be tried ({error.kind}: {error.reason})"
        return TuningResult(spent_seconds=context.budget.spent, summary=(note,))
    state = _SearchState(context=context, base=base, best=base, seen=_fingerprints(context, base))
    try:
        _climb(state)
        return _confirm(state)
    finally:
        state.best.prepared.close()


@dataclass(slots=True)
class _SearchState:
    """The mutable state of a search: best settings, trials and time."""

    context: SearchContext
    base: PreparedSettings
    """The rule-based plan. Its step is closed once a candidate has replaced it as the best."""
    best: PreparedSettings
    seen: set[tuple[object, ...]]
    """Fingerprints of all plans that were tried."""
    trials: list[TuneTrial] = field(default_factory=list)
    speedups: dict[frozenset[tuple[str, Scalar]], float] = field(default_factory=dict)
    """Latest speedup of each change that lost."""
    unsupported: set[frozenset[tuple[str, Scalar]]] = field(default_factory=set)
    """Changes that the bench could not run with the best settings."""
    skipped: list[PlanCandidate] = field(default_factory=list)
    """Candidates that were skipped for lack of time."""
    retry_above: float = _RETRY_ABOVE
    may_recompile: bool = False
    """Whether to try settings that compile the model again, if the best settings found so far are compiled."""

    @property
    def is_compiled_by_search(self) -> bool:
        """Whether the best settings compile the model and the rule-based plan does not.

        If the user compiles the model, every candidate is compiled.
        """
        return self.best.plan.compile != self.base.plan.compile

    @property
    def until(self) -> float:
        """Time on the clock by which trials must end. The rest is reserved for the final comparison."""
        base, best = self.base.prepared, self.best.prepared
        pairs = 1.5 * _CONFIRM_PAIRS * (base.step_seconds + best.step_seconds)
        budget = self.context.budget
        return budget.end - min(_CONFIRM_SHARE * budget.seconds, 1.25 * base.preparation_seconds + pairs)

    @property
    def recovery_seconds(self) -> float:
        """Seconds to restart the bench and prepare the best settings again after an aborted trial."""
        seconds = self.context.bench.recovery_seconds
        return seconds + self.best.prepared.preparation_seconds if seconds else 0.0


def _climb(state: _SearchState) -> None:
    """Try candidates for one setting after another until a pass finds no winner or time runs out.

    Settings that compile the model again come last: with compiled code, each of them takes about as long as all others.
    """
    for state.may_recompile in (False, True):
        for state.retry_above in (_RETRY_ABOVE, _LATE_RETRY_ABOVE):
            for _ in range(_PASSES):
                before = state.best
                for about in _pass_order(state):
                    # Generate the candidates again after each trial, because a winner changes which ones are useful.
                    while (candidate := next(_open_candidates(state, about), None)) is not None:
                        _try(state, candidate)
                if state.best is before:
                    break
        if not state.is_compiled_by_search:
            break


def _pass_order(state: _SearchState) -> tuple[str, ...]:
    """Return the order of a pass. To recompile, begin with the settings that were not tried before compiling."""
    order = search_order(state.context.rule_plan)
    first = order.index("compile") if state.may_recompile else 0
    return (*order[first:], *order[:first])


def _open_candidates(state: _SearchState, about: str) -> Iterator[PlanCandidate]:
    """Yield candidates that may win and have not been tried with the best settings."""
    for candidate in candidates(state.best.plan, about):
        plan = state.context.plan_with(apply_candidate(state.best.settings, candidate))
        if _fingerprint(plan) not in state.seen and _may_win(state, candidate):
            yield candidate


def _may_win(state: _SearchState, candidate: PlanCandidate) -> bool:
    """Return False for a change that lost clearly, and for a micro-batch beyond one that lost."""
    if state.is_compiled_by_search and _recompiles(candidate) and not _may_recompile(state, candidate):
        return False
    # Compiling the whole model fuses more kernels. Compiling its blocks is for models that take too long to compile.
    has_whole = state.best.plan.compile == "on" or state.speedups.get(frozenset([("compile", "on")]))
    if candidate.changes == {"compile": "blocks"} and has_whole:
        return False
    other = _AS_FAST.get(str(candidate.changes.get("precision")))
    if other is not None and device_kind(state.best.plan) == "cuda" and _has_tried(state, other):
        return False
    alone = state.speedups.get(frozenset([(candidate.setting, candidate.value)]), 1.0)
    if len(candidate.changes) > 1:
        together = state.speedups.get(frozenset(candidate.changes.items()), 1.0)
        return alone >= _COMBINE_ABOVE and together >= state.retry_above
    if candidate.setting != "micro_batch":
        return alone >= state.retry_above
    wanted, best = candidate.value, state.best.plan.micro_batch
    assert isinstance(wanted, int)
    # Assume that throughput has a single peak over the micro-batch: sizes beyond a slower one are slower still.
    between = range(min(wanted, best) + 1, max(wanted, best))
    return all(state.speedups.get(frozenset([("micro_batch", size)]), 1.0) >= _FLAT for size in between)


def _has_tried(state: _SearchState, precision: str) -> bool:
    unusable = ("failed", "disagrees")
    tried = (trial.settings.get("precision") for trial in state.trials if trial.verdict not in unusable)
    return precision in (state.base.plan.precision, *tried)


def _may_recompile(state: _SearchState, candidate: PlanCandidate) -> bool:
    """Return whether a candidate may justify compiling again.

    Compiled code needs less memory, so a larger micro-batch may fit. A smaller one brings nothing. After a compilation
    that took too long, no other is started: the code of the best settings may come from the cache, that of others not.
    A value that was slower with eager code, such as tf32 instead of bf16, is not tried either: one compilation takes as
    long as all other trials.
    """
    alone = state.speedups.get(frozenset([(candidate.setting, candidate.value)]), 1.0)
    if candidate.setting != "micro_batch" and alone < _RETRY_ABOVE:
        return False
    if any(trial.verdict == "cut off" and trial.against.get("compile", "off") != "off" for trial in state.trials):
        return False
    is_smaller = candidate.setting == "micro_batch" and candidate.value < state.best.plan.micro_batch  # type: ignore[operator]
    return state.may_recompile and len(candidate.changes) == 1 and not is_smaller


def _recompiles(candidate: PlanCandidate) -> bool:
    """Return whether a candidate compiles the model again if the best settings are compiled.

    A graph counts as one that does not, because it may gain more than anything else, even where it rounds lengths.
    """
    return candidate.setting != "graph" and not candidate.changes.keys().isdisjoint(_COMPILED_INTO_CODE)


def _try(state: _SearchState, candidate: PlanCandidate) -> None:
    """Try a candidate and update the state. Skip it if it is ruled out or too little time is left."""
    context, best = state.context, state.best
    state.seen.add(_fingerprint(context.plan_with(apply_candidate(best.settings, candidate))))
    ruled_out = rule_out(context, best, candidate)
    if ruled_out is not None:
        # The best settings change during the search, and the same candidate may be ruled out again. Record it once.
        if ruled_out.note not in {trial.note for trial in state.trials}:
            state.trials.append(ruled_out)
        return
    # Reserve time to restart: after an aborted trial, the best settings must be prepared again.
    left = state.until - context.bench.clock() - state.recovery_seconds
    base = state.base.prepared
    expected = base.preparation_seconds
    if best.plan.compile != "off" and _recompiles(candidate):
        # Another compilation takes about as long as that of the best settings.
        expected = max(expected, best.prepared.preparation_seconds)
    if candidate.setting == "compile":
        left += context.budget.compile_seconds
    checking = check_seconds(best, candidate)
    if left < expected + checking + 6 * best.prepared.step_seconds:
        state.skipped.append(candidate)
        return
    prepare_seconds = left - checking
    is_first = candidate.setting == "compile" and not any(trial.setting == "compile" for trial in state.trials)
    if is_first and (device_kind(best.plan) == "cpu" or left >= _MIN_SHARED_SECONDS_GPU):
        prepare_seconds = min(prepare_seconds, _FIRST_COMPILE_SHARE * left)
    if candidate.setting not in _SLOW_TO_PREPARE:
        usual = 3 * base.preparation_seconds + _PATIENT_STEPS * best.prepared.step_seconds
        least = _MIN_PREPARE_SECONDS if device_kind(best.plan) == "cpu" else _MIN_PREPARE_SECONDS_GPU
        prepare_seconds = min(left, max(expected, min(_TRIAL_SHARE * left, max(least, usual))))
    trial, winner = run_trial(context, best, candidate, until=state.until, prepare_seconds=prepare_seconds)
    state.trials.append(trial)
    speedup = trial.speedup or 0.0
    if winner is None:
        is_unusable = trial.verdict in ("failed", "disagrees")
        state.speedups[frozenset(candidate.changes.items())] = 0.0 if is_unusable else speedup
        if trial.verdict == "not tried":
            state.unsupported.add(frozenset(candidate.changes.items()))
        return
    # The previous value is now an alternative, which lost by the inverse of the winner's speedup.
    state.speedups[frozenset((name, best.plan.settings[name].value) for name in candidate.changes)] = 1 / speedup
    best.prepared.close()
    state.best = winner
    state.seen |= _fingerprints(context, winner)
    if candidate.setting == "compile":
        # Compiled code may be captured even if the model's own code waits for the device.
        for changes in state.unsupported:
            if "graph" in dict(changes):
                state.speedups.pop(changes, None)


def _confirm(state: _SearchState) -> TuningResult:
    """Time the winner against the rule-based plan in new pairs.

    The best of many noisy trials looks better than it is, so the trials that selected it cannot confirm it.
    """
    context, base, best = state.context, state.base, state.best
    # Without a winner, there is nothing to confirm.
    if best is base:
        return _result(state, base, reason="no setting was shown to be faster than the rule-based plan")
    started = context.bench.clock()
    context.progress.begin("the best settings against the rule-based plan")
    try:
        base = context.prepare({}, seconds=context.budget.left)
        try:
            timing = compare(
                best.prepared,
                base.prepared,
                clock=context.bench.clock,
                until=context.budget.end,
                random_order=context.random_order,
                tick=context.progress.tick,
            )
        finally:
            base.prepared.close()
    except ProbeFailedError as error:
        if error.kind == "timeout" and context.budget.left < _SPENT_SHARE * context.budget.seconds:
            return _unconfirmed(state, _spent_reason(state))
        return _unconfirmed(state, f"the final comparison failed ({error.kind}: {error.reason})")
    verdict, note = _final_verdict(state, base, timing)
    spent = context.bench.clock() - started
    state.trials.append(
        record_trial("plan", best.settings, base, verdict, note, ready=best, timing=timing, spent=spent)
    )
    estimate = timing.estimate
    if verdict == "faster" and estimate is not None:
        gain = ConfirmedGain(speedup=estimate.speedup, low=estimate.low, high=estimate.high, repeats=estimate.pairs)
        return _result(state, best, reason=note, gain=gain, step_seconds=timing.candidate_seconds)
    # All pairs were faster, but there are too few of them to be sure. The trials that the winner won still count.
    if verdict == "unclear" and all(log_ratio < 0 for log_ratio in timing.log_ratios):
        return _unconfirmed(state, _spent_reason(state, " full"))
    return _result(state, base, reason=note, step_seconds=timing.baseline_seconds)


def _final_verdict(state: _SearchState, base: PreparedSettings, timing: PairedTiming) -> tuple[Verdict, str]:
    """Return the verdict of the final comparison and its explanation."""
    estimate, shown = timing.estimate, _show(state.best.settings)
    if estimate is None:
        return timing.outcome, _spent_reason(state)
    interval = describe_interval(estimate)
    if timing.outcome != "faster":
        return timing.outcome, f"the gain was not confirmed ({interval}): {shown}"
    if not break_even(state.best, base, timing).pays:
        return "not worth it", f"steps are faster ({interval}), but this run is too short for it: {shown}"
    return "faster", f"{interval} against the rule-based plan: {shown}"


def _spent_reason(state: _SearchState, how: str = "") -> str:
    """Return the reason for a missing final comparison, with a budget that leaves time for it."""
    base, best = state.base.prepared, state.best.prepared
    pairs = 1.5 * _CONFIRM_PAIRS * (base.step_seconds + best.step_seconds)
    # Unlike what `until` reserves, count the restart of the bench after an aborted trial.
    needed = (1.25 * base.preparation_seconds + state.recovery_seconds + pairs) / _CONFIRM_SHARE
    spent = state.context.budget.seconds
    larger = math.ceil(max(2 * spent, needed) / 10) * 10
    return (
        f"the budget of {format_seconds(spent)} was spent before a{how} final comparison, which {larger} s would allow"
    )


def _unconfirmed(state: _SearchState, reason: str) -> TuningResult:
    """Return a result without a final comparison, based on the trials that the winner won.

    The rule-based plan is kept if no trial was won at full confidence.
    """
    won = [trial for trial in state.trials if trial.verdict == "faster" and trial.interval is not None]
    if not won:
        note = f"likely gains were not confirmed, {reason}: {_show(state.best.settings)}"
        return _result(state, state.base, reason=note)
    gain = ConfirmedGain(
        speedup=math.prod(trial.speedup or 1.0 for trial in won),
        low=math.prod(trial.interval[0] for trial in won if trial.interval),
        high=math.prod(trial.interval[1] for trial in won if trial.interval),
        repeats=min((trial.repeats for trial in won), default=0),
    )
    note = f"about {gain.speedup:.3g}x the rule-based plan by the trials alone, {reason}: {_show(state.best.settings)}"
    return _result(state, state.best, reason=note, gain=gain)


def _result(
    state: _SearchState,
    kept: PreparedSettings,
    *,
    reason: str,
    gain: ConfirmedGain | None = None,
    step_seconds: float | None = None,
) -> TuningResult:
    reverted = None if gain or state.best is state.base else f"the rule-based plan is kept: {reason}"
    measured = measured_settings(kept.plan, state.trials, reverted=reverted)
    if (graph := _graph_as_measured(kept)) is not None:
        measured["graph"] = graph
    return TuningResult(
        settings=dict(kept.settings),
        measured=measured,
        trials=tuple(state.trials),
        spent_seconds=state.context.budget.spent,
        is_complete=not _lacked_time_to_compile(state),
        gain=gain,
        step_seconds=step_seconds if step_seconds is not None else _last_step_seconds(state, kept),
        preparation_seconds=kept.prepared.preparation_seconds,
        summary=tuple(_summary(state, reason)),
    )


def _graph_as_measured(kept: PreparedSettings) -> MeasuredSetting | None:
    """Return the graph setting that the kept steps ran with, if the plan let the first steps decide.

    The first steps of the run could decide otherwise, for example if another program delays the host.
    """
    launches = kept.prepared.launches
    if kept.plan.graph != "launch_bound" or launches.is_captured is None:
        return None
    reason = launches.obstacle or "the device waits for the host to launch kernels"
    evidence = {} if launches.share is None else {"launch_share": launches.share}
    return MeasuredSetting(value="on" if launches.is_captured else "off", reason=reason, evidence=evidence)


def _lacked_time_to_compile(state: _SearchState) -> bool:
    """Return whether a later search could finish the compilation, because the compiled code is cached."""
    late = ("cut off", "not checked")
    is_cut_off = any(trial.setting == "compile" and trial.verdict in late for trial in state.trials)
    return is_cut_off or any(candidate.setting == "compile" for candidate in state.skipped)


def _summary(state: _SearchState, reason: str) -> Iterator[str]:
    tried = sum(trial.verdict != "not tried" for trial in state.trials)
    spent = state.context.budget.spent
    if not tried:
        yield f"nothing was compared in {format_seconds(spent)}: the rule-based plan is kept"
    else:
        yield f"{tried} trial{'' if tried == 1 else 's'} in {format_seconds(spent)}: {reason}"
    late = dict.fromkeys(_show(candidate.changes, " with ") for candidate in state.skipped)
    if late:
        yield f"no time was left for {', '.join(late)}"
    recovery = state.recovery_seconds
    if late and not tried and recovery > spent:
        yield (
            f"starting took {format_seconds(recovery)} here, and as much is reserved for a trial that must be stopped: "
            "a larger --budget, or a quieter machine, leaves time for trials"
        )
    if any("not quiet" in trial.note for trial in state.trials):
        yield NOT_QUIET


def _show(settings: Settings, separator: str = ", ") -> str:
    return separator.join(f"{name}={format_value(value)}" for name, value in settings.items())


def _last_step_seconds(state: _SearchState, kept: PreparedSettings) -> float:
    """Return the median step time of these settings in their last comparison, or else in their preparation."""
    for trial in reversed(state.trials):
        if kept.settings in (trial.settings, trial.against):
            seconds = trial.median_seconds if trial.settings == kept.settings else trial.baseline_seconds
            if seconds is not None:
                return seconds
    return kept.prepared.step_seconds


def _fingerprints(context: SearchContext, ready: PreparedSettings) -> set[tuple[object, ...]]:
    """Return the fingerprints of prepared settings, and of those that run the same steps.

    With graph=launch_bound, the first steps have decided whether steps are captured. The same value as a setting would
    be measured again.
    """
    found, is_captured = {_fingerprint(ready.plan)}, ready.prepared.launches.is_captured
    if ready.plan.graph == "launch_bound" and is_captured is not None:
        found.add(_fingerprint(context.plan_with({**ready.settings, "graph": "on" if is_captured else "off"})))
    return found


def _fingerprint(plan: Plan) -> tuple[object, ...]:
    return tuple((name, setting.value) for name, setting in plan.settings.items())
