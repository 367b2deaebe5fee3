"""One trial of a search: prepare a candidate, time it against the best settings, check precision and cost."""

import math
import random
from dataclasses import dataclass, field

from whet.autotune.candidates import PlanCandidate, apply_candidate, device_kind, memory_limit, plan_with
from whet.autotune.memory_model import MemoryModel
from whet.autotune.paired_timing import PairedTiming, compare
from whet.autotune.result import (
    BreakEven,
    describe_break_even,
    describe_gain,
    describe_timeout,
    describe_timing,
    show_setting,
)
from whet.autotune.statistics import WORTH_HAVING, is_steady
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

_MOST_PAIRS = 24
"""A candidate that needs more to be told apart is not worth the time; the last duel may take more."""
_EXACT = ("fp32",)
_WORTH_TELLING = {"compile": 1.0, "graph": 0.05, "workers": 1.0}
"""Seconds of preparing from which on it is said when they are earned back."""
_MOST_FLOPS_OF_A_CORE = 2e11
"""More than any core of today computes in float32: two 512-bit units at 3 GHz."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSettings:
    """Settings that are ready to make steps."""

    settings: Settings
    plan: Plan
    prepared: PreparedStep


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchContext:
    """What all trials of one search share."""

    rule_plan: Plan
    rig: StepBench
    budget: Budget
    coin: random.Random
    watched: ProgressReporter
    fitting: MemoryModel = field(default_factory=MemoryModel)
    agreements: dict[tuple[object, ...], SettingsAgreement] = field(default_factory=dict)
    plans: dict[frozenset[tuple[str, Scalar]], Plan] = field(default_factory=dict)

    def planned(self, settings: Settings) -> Plan:
        """The whole plan behind settings; the rules are asked once."""
        key = frozenset(settings.items())
        if key not in self.plans:
            self.plans[key] = plan_with(self.rule_plan, settings)
        return self.plans[key]

    def prepare(self, settings: Settings, *, seconds: float) -> PreparedSettings:
        """Makes settings ready, and learns what memory they take. Raises ProbeFailedError."""
        prepared = self.rig.prepare(settings, seconds=seconds)
        contender = PreparedSettings(settings=settings, plan=self.planned(settings), prepared=prepared)
        self.learn_memory(contender)
        return contender

    def learn_memory(self, contender: PreparedSettings) -> None:
        """Takes note of the contender's peak."""
        settings = contender.settings
        self.fitting.learn(
            settings,
            micro_batch=micro_batch(contender.plan),
            measured=contender.prepared.peak_bytes(),
            predicted=self.rig.predicted_bytes(settings),
        )

    def agreement(self, contender: PreparedSettings, *, seconds: float) -> SettingsAgreement:
        """Asked once for each precision on each device, for each attention kernel, and for whose norms."""
        key = tuple(contender.plan.settings[name].value for name in ("device", "precision", "attention", "norms"))
        if key not in self.agreements:
            self.agreements[key] = self.rig.agreement(contender.settings, seconds=seconds)
        return self.agreements[key]


def micro_batch(plan: Plan) -> int:
    """How many samples go through at once."""
    value = plan.micro_batch
    assert isinstance(value, int)
    return value


def rule_out(bench: SearchContext, best: PreparedSettings, candidate: PlanCandidate) -> TuneTrial | None:
    """The record of a candidate that would not fit into memory, or cannot win; None where it may be tried."""
    settings = apply_candidate(best.settings, candidate)
    plan = bench.planned(settings)
    why = _hopeless(plan, best, candidate) or bench.fitting.refusal(
        settings,
        micro_batch=micro_batch(plan),
        predicted=bench.rig.predicted_bytes(settings),
        limit=memory_limit(plan),
    )
    if why is None:
        return None
    words = f"{show_setting(candidate.setting, candidate.value)}: not tried, {why}"
    return TuneTrial(
        setting=candidate.setting, settings=settings, against=best.settings, verdict="not tried", words=words
    )


def _hopeless(plan: Plan, best: PreparedSettings, candidate: PlanCandidate) -> str | None:
    """Why the CPU need not be tried: its arithmetic alone would take longer than a whole step does now.

    A step on it that has to be stopped would cost more of the budget than all other trials.
    """
    cores = plan.machine.cpu.logical_cores
    if candidate.setting != "device" or device_kind(plan) != "cpu" or cores is None:
        return None
    workload = plan.workload
    rows = workload.global_batch_size * (workload.mean_length or 1.0)
    seconds = 6 * workload.num_parameters * rows / (cores * _MOST_FLOPS_OF_A_CORE)
    if seconds <= best.prepared.step_seconds:
        return None
    return f"its arithmetic alone would take {format_seconds(seconds)} a step"


def run_trial(
    bench: SearchContext, best: PreparedSettings, candidate: PlanCandidate, *, until: float, prepare_seconds: float
) -> tuple[TuneTrial, PreparedSettings | None]:
    """The record of a trial, and the contender where it is the better one; else it is closed again."""
    started = bench.rig.clock()
    bench.watched.begin(" and ".join(f"{name} {format_value(value)}" for name, value in candidate.changes.items()))
    settings, name = apply_candidate(best.settings, candidate), show_setting(candidate.setting, candidate.value)

    def record(
        verdict: Verdict, words: str, rival: PreparedSettings | None = None, duel: PairedTiming | None = None
    ) -> TuneTrial:
        return record_trial(
            candidate.setting, settings, best, verdict, words, ours=rival, duel=duel, spent=bench.rig.clock() - started
        )

    try:
        rival = bench.prepare(settings, seconds=prepare_seconds)
    except ProbeFailedError as error:
        usual = best.prepared.preparation_seconds
        if error.kind == "timeout":
            return record("cut off", describe_timeout(name, seconds=prepare_seconds, usual=usual)), None
        if error.kind == "refused":
            return record("not tried", f"{name}: not tried, {error.reason}"), None
        return record("failed", f"{name}: {error.kind}, {error.reason}"), None

    is_kept = False
    try:
        verdict, words, duel = _weigh(bench, best, rival, candidate, until=until)
        trial = record(verdict, words, rival, duel)
        is_kept = verdict in ("faster", "likely")
        return trial, rival if is_kept else None
    finally:
        if not is_kept:
            rival.prepared.close()


def _weigh(
    bench: SearchContext, best: PreparedSettings, rival: PreparedSettings, candidate: PlanCandidate, *, until: float
) -> tuple[Verdict, str, PairedTiming | None]:
    name = show_setting(candidate.setting, candidate.value)
    excess = _excess(rival)
    if excess is not None:
        return "failed", f"{name}: {excess}", None
    clock = bench.rig.clock
    try:
        duel = compare(
            rival.prepared,
            best.prepared,
            clock=clock,
            until=until,
            coin=bench.coin,
            most_pairs=_MOST_PAIRS,
            tick=bench.watched.again,
        )
    except ProbeFailedError as error:
        return "failed", f"{name}: {error.kind}, {error.reason}", None
    bench.learn_memory(rival)
    excess = _excess(rival)
    if excess is not None:
        return "failed", f"{name}: {excess}", duel
    won: Verdict = "faster"
    if _is_likely(duel):
        won = "likely"
    elif duel.answer != "faster":
        return duel.answer, describe_timing(name, duel), duel

    cost = break_even(rival, best, duel)
    if not cost.pays:
        return "not worth it", describe_break_even(candidate.setting, cost), duel
    if {"precision", "attention", "norms"} & {*candidate.changes} and rival.plan.precision not in _EXACT:
        try:
            agreement = bench.agreement(rival, seconds=max(0.0, until - clock()))
        except ProbeFailedError as error:
            return "unclear", f"{name}: whether it computes the same was not found out ({error.reason})", duel
        if not agreement.agrees:
            worst = max(agreement.loss_error, agreement.gradient_error)
            return (
                "disagrees",
                f"{name} computes something else: off by {worst:.2g}, bound {agreement.bound:.2g}",
                duel,
            )
    found = duel.estimate
    assert found is not None
    before = show_setting(candidate.setting, best.plan.settings[candidate.setting].value)
    if cost.cost_seconds > _WORTH_TELLING.get(candidate.setting, math.inf):
        return won, f"{describe_gain(found, before)}; {describe_break_even(candidate.setting, cost)}", duel
    return won, describe_gain(found, before), duel


def _is_likely(duel: PairedTiming) -> bool:
    """Whether all its pairs leave a gain inside the interval, though not beyond all doubt.

    To drop it would cost more often than to keep it: nothing is claimed before the last duel, in fresh pairs.
    """
    found = duel.estimate
    if duel.answer != "unclear" or found is None or found.pairs < _MOST_PAIRS:
        return False
    return found.low >= 1 + WORTH_HAVING and is_steady(duel.log_ratios)


def break_even(ours: PreparedSettings, theirs: PreparedSettings, duel: PairedTiming) -> BreakEven:
    """What ours costs before the first step, and saves in each."""
    return BreakEven(
        cost_seconds=max(0.0, ours.prepared.preparation_seconds - theirs.prepared.preparation_seconds),
        saved_seconds=duel.their_seconds - duel.our_seconds,
        num_steps=ours.plan.workload.num_steps,
    )


def record_trial(
    setting: str,
    settings: Settings,
    against: PreparedSettings,
    verdict: Verdict,
    words: str,
    *,
    ours: PreparedSettings | None = None,
    duel: PairedTiming | None = None,
    spent: float = 0.0,
) -> TuneTrial:
    """All that is known about one trial."""
    found = duel.estimate if duel else None
    return TuneTrial(
        setting=setting,
        settings=dict(settings),
        against=dict(against.settings),
        verdict=verdict,
        words=words,
        repeats=found.pairs if found else 0,
        median_seconds=duel.our_seconds if duel else None,
        rival_seconds=duel.their_seconds if duel else None,
        speedup=found.speedup if found else None,
        interval=(found.low, found.high) if found else None,
        preparation_seconds=ours.prepared.preparation_seconds if ours else None,
        peak_bytes=ours.prepared.peak_bytes() if ours else None,
        spent_seconds=max(0.0, spent),
    )


def _excess(contender: PreparedSettings) -> str | None:
    """That it took more memory than planned for, in words."""
    peak, limit = contender.prepared.peak_bytes(), memory_limit(contender.plan)
    if peak is None or limit is None or peak <= limit:
        return None
    return f"took {format_bytes(peak)}, more than the {format_bytes(limit)} planned for"
