"""Coordinate search for the settings that finish a run soonest, within a time budget."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from whet.autotune.candidates import ORDER, PlanCandidate, apply_candidate, candidates, device_kind
from whet.autotune.paired_timing import PairedTiming, compare
from whet.autotune.result import NOT_QUIET, ConfirmedGain, TuningResult, describe_interval, measured_settings
from whet.autotune.step_bench import Budget, ProbeFailedError, ProgressCallback, ProgressReporter, Settings, StepBench
from whet.autotune.trial import (
    PreparedSettings,
    SearchContext,
    break_even,
    micro_batch,
    record_trial,
    rule_out,
    run_trial,
)
from whet.base.units import format_seconds
from whet.plan.plan import Plan
from whet.plan.render import format_value
from whet.plan.setting import Scalar, TuneTrial, Verdict

_PASSES = 3
_NEAR, _FAR = 0.85, 0.6
"""What was slower than this is not tried again when others have changed: at first, and once all else was tried."""
_HOPEFUL = 0.5
"""What was slower than this is not tried together with another change."""
_FLAT = 0.97
"""Beyond a micro-batch that is slower than this nothing better is expected."""
_FIRST_SHARE = 0.5
"""Of the budget, for preparing the rule-based plan: without time for a rival there is nothing to compare."""
_TRIAL_SHARE = 0.34
"""Of what is left, for preparing one candidate; what is known to take long to prepare may take all."""
_SLOW_TO_PREPARE = ("compile", "graph", "workers")
_LEAST_PATIENCE = 2.0
_LEAST_PATIENCE_ELSEWHERE = 10.0
"""On a GPU, where the first use of a kernel may load hundreds of megabytes of library from a cold disk."""
_PATIENT_STEPS = 50
"""How many times slower a first step may be and still be seen to its end: a measured factor says more than a stop."""
_TIMEOUT_FACTOR = 1.08
"""A search plans with its budget; what hangs is ended a little later, by the rig."""
_CONFIRM_PAIRS = 8
_CONFIRM_SHARE = 0.35


def search(
    plan: Plan, rig: StepBench, *, budget_seconds: float, seed: int = 0, watch: ProgressCallback | None = None
) -> TuningResult:
    """The best settings that could be found and confirmed; the rules' own where no gain is real."""
    budget = Budget(clock=rig.clock, start=rig.clock(), seconds=budget_seconds)
    watched = ProgressReporter(watch, budget)
    outer, rig.ends_at = rig.ends_at, budget.start + _TIMEOUT_FACTOR * budget_seconds
    rig.tick = None if watch is None else watched.again
    try:
        bench = SearchContext(rule_plan=plan, rig=rig, budget=budget, coin=random.Random(seed), watched=watched)
        return _search(bench)
    finally:
        rig.ends_at, rig.tick = outer, None


def _search(bench: SearchContext) -> TuningResult:
    plan, budget = bench.rule_plan, bench.budget
    bench.watched.begin("the rules' plan")
    try:
        base = bench.prepare({}, seconds=_FIRST_SHARE * budget.seconds)
    except ProbeFailedError as error:
        words = f"nothing was measured: the rule-based plan itself could not be tried ({error.kind}: {error.reason})"
        return TuningResult(spent_seconds=budget.spent, words=(words,))
    state = _SearchState(bench=bench, base=base, best=base, seen={_fingerprint(plan)})
    try:
        _climb(state)
        return _confirm(state)
    finally:
        state.best.prepared.close()


@dataclass(slots=True)
class _SearchState:
    """How far a search has come."""

    bench: SearchContext
    base: PreparedSettings
    """The rule-based plan; closed as soon as something else is best."""
    best: PreparedSettings
    seen: set[tuple[object, ...]]
    """All settings of every plan that was tried."""
    trials: list[TuneTrial] = field(default_factory=list)
    beaten: dict[frozenset[tuple[str, Scalar]], float] = field(default_factory=dict)
    """How the changes that lost compared with what won, at the last time."""
    out_of_time: list[PlanCandidate] = field(default_factory=list)
    near: float = _NEAR

    @property
    def reserve(self) -> float:
        """Seconds kept for the last duel."""
        base, best = self.base.prepared, self.best.prepared
        pairs = 1.5 * _CONFIRM_PAIRS * (base.step_seconds + best.step_seconds)
        return min(_CONFIRM_SHARE * self.bench.budget.seconds, 1.25 * base.preparation_seconds + pairs)

    @property
    def until(self) -> float:
        """When trials must end, on the clock."""
        return self.bench.budget.end - self.reserve


def _climb(state: _SearchState) -> None:
    for state.near in (_NEAR, _FAR):
        for _ in range(_PASSES):
            before = state.best
            for about in ORDER:
                while (candidate := next(_open(state, about), None)) is not None:
                    _take_on(state, candidate)
            if state.best is before:
                break


def _open(state: _SearchState, about: str) -> Iterator[PlanCandidate]:
    """Candidates that have not been tried with the settings that are best now, and may win."""
    for candidate in candidates(state.best.plan, about):
        plan = state.bench.planned(apply_candidate(state.best.settings, candidate))
        if _fingerprint(plan) not in state.seen and _may_win(state, candidate):
            yield candidate


def _may_win(state: _SearchState, candidate: PlanCandidate) -> bool:
    """Not what lost by far, nor what lies beyond a micro-batch that lost."""
    alone = state.beaten.get(frozenset([(candidate.setting, candidate.value)]), 1.0)
    if len(candidate.changes) > 1:
        return alone >= _HOPEFUL and state.beaten.get(frozenset(candidate.changes.items()), 1.0) >= state.near
    if candidate.setting != "micro_batch":
        return alone >= state.near
    wanted, best = candidate.value, micro_batch(state.best.plan)
    assert isinstance(wanted, int)
    between = range(min(wanted, best) + 1, max(wanted, best))
    return all(state.beaten.get(frozenset([("micro_batch", size)]), 1.0) >= _FLAT for size in between)


def _take_on(state: _SearchState, candidate: PlanCandidate) -> None:
    bench, best = state.bench, state.best
    state.seen.add(_fingerprint(bench.planned(apply_candidate(best.settings, candidate))))
    refused = rule_out(bench, best, candidate)
    if refused is not None:
        state.trials.append(refused)
        return
    # Should it have to be stopped, what is best so far must be made ready again before the last duel.
    left = state.until - bench.rig.clock() - _recovery(state)
    base = state.base.prepared
    if left < base.preparation_seconds + 6 * best.prepared.step_seconds:
        state.out_of_time.append(candidate)
        return
    patience = left
    if candidate.setting not in _SLOW_TO_PREPARE:
        usual = 3 * base.preparation_seconds + _PATIENT_STEPS * best.prepared.step_seconds
        least = _LEAST_PATIENCE if device_kind(best.plan) == "cpu" else _LEAST_PATIENCE_ELSEWHERE
        patience = min(_TRIAL_SHARE * left, max(least, usual))
    trial, winner = run_trial(bench, best, candidate, until=state.until, prepare_seconds=patience)
    state.trials.append(trial)
    speedup = trial.speedup or 0.0
    if winner is None:
        is_out = trial.verdict in ("failed", "disagrees")
        state.beaten[frozenset(candidate.changes.items())] = 0.0 if is_out else speedup
        return
    state.beaten[frozenset((name, best.plan.settings[name].value) for name in candidate.changes)] = 1 / speedup
    best.prepared.close()
    state.best = winner


def _recovery(state: _SearchState) -> float:
    seconds = state.bench.rig.recovery_seconds
    return seconds + state.best.prepared.preparation_seconds if seconds else 0.0


def _confirm(state: _SearchState) -> TuningResult:
    """The winner against the rule-based plan, in fresh pairs: what was picked as the best of many looks too good."""
    bench, base, best = state.bench, state.base, state.best
    if best is base:
        return _found(state, base, reason="nothing was shown to be faster than the rules")
    started = bench.rig.clock()
    bench.watched.begin("the best against the rules")
    try:
        base = bench.prepare({}, seconds=bench.budget.left)
        try:
            duel = compare(
                best.prepared,
                base.prepared,
                clock=bench.rig.clock,
                until=bench.budget.end,
                coin=bench.coin,
                tick=bench.watched.again,
            )
        finally:
            base.prepared.close()
    except ProbeFailedError as error:
        return _by_its_trials(state, f"the last duel did not take place ({error.kind}: {error.reason})")
    verdict, words = _last_verdict(state, base, duel)
    spent = bench.rig.clock() - started
    state.trials.append(record_trial("plan", best.settings, base, verdict, words, ours=best, duel=duel, spent=spent))
    found = duel.estimate
    if verdict == "faster" and found is not None:
        gain = ConfirmedGain(speedup=found.speedup, low=found.low, high=found.high, repeats=found.pairs)
        return _found(state, best, reason=words, gain=gain, step_seconds=duel.our_seconds)
    if verdict == "unclear" and all(log_ratio < 0 for log_ratio in duel.log_ratios):
        return _by_its_trials(state, "there was no time for a whole last duel")
    return _found(state, base, reason=words, step_seconds=duel.their_seconds)


def _last_verdict(state: _SearchState, base: PreparedSettings, duel: PairedTiming) -> tuple[Verdict, str]:
    found, shown = duel.estimate, _shown(state.best)
    if found is None:
        return duel.answer, "there was no time for a last duel"
    if duel.answer != "faster":
        return duel.answer, f"the gain was not confirmed ({describe_interval(found)}): {shown}"
    if not break_even(state.best, base, duel).pays:
        return (
            "not worth it",
            f"steps are faster ({describe_interval(found)}), but this run is too short for it: {shown}",
        )
    return "faster", f"{describe_interval(found)} against the rules: {shown}"


def _by_its_trials(state: _SearchState, why: str) -> TuningResult:
    """The winner stands by the duels that it won one after the other, where nothing speaks against it."""
    won = [trial for trial in state.trials if trial.verdict == "faster" and trial.interval is not None]
    if not won:
        return _found(state, state.base, reason=f"what was likely was not confirmed, {why}: {_shown(state.best)}")
    gain = ConfirmedGain(
        speedup=math.prod(trial.speedup or 1.0 for trial in won),
        low=math.prod(trial.interval[0] for trial in won if trial.interval),
        high=math.prod(trial.interval[1] for trial in won if trial.interval),
        repeats=min((trial.repeats for trial in won), default=0),
    )
    words = f"about {gain.speedup:.3g}x the rules by its trials alone, {why}: {_shown(state.best)}"
    return _found(state, state.best, reason=words, gain=gain)


def _shown(contender: PreparedSettings) -> str:
    return ", ".join(_pairs(contender.settings))


def _pairs(settings: Settings) -> Iterator[str]:
    return (f"{name}={format_value(value)}" for name, value in settings.items())


def _found(
    state: _SearchState,
    kept: PreparedSettings,
    *,
    reason: str,
    gain: ConfirmedGain | None = None,
    step_seconds: float | None = None,
) -> TuningResult:
    reverted = None if gain or state.best is state.base else f"the rules are kept: {reason}"
    return TuningResult(
        settings=dict(kept.settings),
        measured=measured_settings(kept.plan, state.trials, reverted=reverted),
        trials=tuple(state.trials),
        spent_seconds=state.bench.budget.spent,
        gain=gain,
        step_seconds=step_seconds if step_seconds is not None else _last_known_step(state, kept),
        preparation_seconds=kept.prepared.preparation_seconds,
        words=tuple(_summary(state, reason)),
    )


def _summary(state: _SearchState, reason: str) -> Iterator[str]:
    tried = sum(trial.verdict != "not tried" for trial in state.trials)
    spent = format_seconds(state.bench.budget.spent)
    if not tried:
        yield f"nothing was compared in {spent}: the rules' plan stays, and no setting of it was measured"
    else:
        yield f"{tried} trial{'' if tried == 1 else 's'} in {spent}: {reason}"
    late = dict.fromkeys(" with ".join(_pairs(candidate.changes)) for candidate in state.out_of_time)
    if late:
        yield f"no time was left for {', '.join(late)}"
    recovery = _recovery(state)
    if late and not tried and recovery > state.bench.budget.spent:
        yield (
            f"starting took {format_seconds(recovery)} here, and as much is kept for a trial that has to be stopped: "
            "a larger --budget, or a quieter machine, leaves time for trials"
        )
    if any("not quiet" in trial.words for trial in state.trials):
        yield NOT_QUIET


def _last_known_step(state: _SearchState, kept: PreparedSettings) -> float:
    """Its median in the last duel that it fought."""
    own = ((t.median_seconds if t.settings == kept.settings else t.rival_seconds, t) for t in reversed(state.trials))
    known = (seconds for seconds, t in own if kept.settings in (t.settings, t.against))
    return next((seconds for seconds in known if seconds is not None), kept.prepared.step_seconds)


def _fingerprint(plan: Plan) -> tuple[object, ...]:
    return tuple((name, setting.value) for name, setting in plan.settings.items())
