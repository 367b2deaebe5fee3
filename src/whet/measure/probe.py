"""Is one candidate better than the best so far? It must fit, come up in time, be faster, pay, and compute the same."""

import math
import random
from dataclasses import dataclass, field

from whet.base.units import show_bytes, show_seconds
from whet.measure.budget import Budget
from whet.measure.candidates import Candidate, device_kind, memory_limit, merged, planned
from whet.measure.duel import Duel, fight
from whet.measure.fitting import Fitting
from whet.measure.objective import BreakEven
from whet.measure.progress import Watched
from whet.measure.rig import Agreement, Prepared, ProbeFailedError, Rig, Settings
from whet.measure.statistics import WORTH_HAVING, is_steady
from whet.measure.words import break_even_words, duel_words, gain_words, shown, timeout_words
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.trial import Trial, Verdict
from whet.plan.words import show_value

_MOST_PAIRS = 24
"""A candidate that needs more to be told apart is not worth the time; the last duel may take more."""
_EXACT = ("fp32",)
_WORTH_TELLING = {"compile": 1.0, "graph": 0.05, "workers": 1.0}
"""Seconds of preparing from which on it is said when they are earned back."""
_MOST_FLOPS_OF_A_CORE = 2e11
"""More than any core of today computes in float32: two 512-bit units at 3 GHz."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Settings that are ready to make steps."""

    settings: Settings
    plan: Plan
    prepared: Prepared


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What all trials of one search share."""

    rule_plan: Plan
    rig: Rig
    budget: Budget
    coin: random.Random
    watched: Watched
    fitting: Fitting = field(default_factory=Fitting)
    agreements: dict[tuple[object, ...], Agreement] = field(default_factory=dict)
    plans: dict[frozenset[tuple[str, Scalar]], Plan] = field(default_factory=dict)

    def planned(self, settings: Settings) -> Plan:
        """The whole plan behind settings; the rules are asked once."""
        key = frozenset(settings.items())
        if key not in self.plans:
            self.plans[key] = planned(self.rule_plan, settings)
        return self.plans[key]

    def prepare(self, settings: Settings, *, seconds: float) -> Contender:
        """Makes settings ready, and learns what memory they take. Raises ProbeFailedError."""
        prepared = self.rig.prepare(settings, seconds=seconds)
        contender = Contender(settings=settings, plan=self.planned(settings), prepared=prepared)
        self.learn_memory(contender)
        return contender

    def learn_memory(self, contender: Contender) -> None:
        """Takes note of the contender's peak."""
        settings = contender.settings
        self.fitting.learn(
            settings,
            micro_batch=micro_batch(contender.plan),
            measured=contender.prepared.peak_bytes(),
            predicted=self.rig.predicted_bytes(settings),
        )

    def agreement(self, contender: Contender, *, seconds: float) -> Agreement:
        """Asked once for each precision on each device, for each attention kernel, and for whose norms."""
        key = tuple(contender.plan.value(name) for name in ("device", "precision", "attention", "norms"))
        if key not in self.agreements:
            self.agreements[key] = self.rig.agreement(contender.settings, seconds=seconds)
        return self.agreements[key]


def micro_batch(plan: Plan) -> int:
    """How many samples go through at once."""
    value = plan.value("micro_batch")
    assert isinstance(value, int)
    return value


def refuse(bench: Bench, best: Contender, candidate: Candidate) -> Trial | None:
    """The record of a candidate that would not fit into memory, or cannot win; None where it may be tried."""
    settings = merged(best.settings, candidate)
    plan = bench.planned(settings)
    why = _hopeless(plan, best, candidate) or bench.fitting.refusal(
        settings,
        micro_batch=micro_batch(plan),
        predicted=bench.rig.predicted_bytes(settings),
        limit=memory_limit(plan),
    )
    if why is None:
        return None
    words = f"{shown(candidate.setting, candidate.value)}: not tried, {why}"
    return Trial(setting=candidate.setting, settings=settings, against=best.settings, verdict="not tried", words=words)


def _hopeless(plan: Plan, best: Contender, candidate: Candidate) -> str | None:
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
    return f"its arithmetic alone would take {show_seconds(seconds)} a step"


def try_out(
    bench: Bench, best: Contender, candidate: Candidate, *, until: float, prepare_seconds: float
) -> tuple[Trial, Contender | None]:
    """The record of a trial, and the contender where it is the better one; else it is closed again."""
    started = bench.rig.clock()
    bench.watched.begin(" and ".join(f"{name} {show_value(value)}" for name, value in candidate.changes.items()))
    settings, name = merged(best.settings, candidate), shown(candidate.setting, candidate.value)

    def record(verdict: Verdict, words: str, rival: Contender | None = None, duel: Duel | None = None) -> Trial:
        return record_duel(
            candidate.setting, settings, best, verdict, words, ours=rival, duel=duel, spent=bench.rig.clock() - started
        )

    try:
        rival = bench.prepare(settings, seconds=prepare_seconds)
    except ProbeFailedError as error:
        usual = best.prepared.preparation_seconds
        if error.kind == "timeout":
            return record("cut off", timeout_words(name, seconds=prepare_seconds, usual=usual)), None
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
    bench: Bench, best: Contender, rival: Contender, candidate: Candidate, *, until: float
) -> tuple[Verdict, str, Duel | None]:
    name = shown(candidate.setting, candidate.value)
    excess = _excess(rival)
    if excess is not None:
        return "failed", f"{name}: {excess}", None
    clock = bench.rig.clock
    try:
        duel = fight(
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
        return duel.answer, duel_words(name, duel), duel

    cost = break_even(rival, best, duel)
    if not cost.pays:
        return "not worth it", break_even_words(candidate.setting, cost), duel
    if {"precision", "attention", "norms"} & {*candidate.changes} and rival.plan.value("precision") not in _EXACT:
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
    before = shown(candidate.setting, best.plan.value(candidate.setting))
    if cost.cost_seconds > _WORTH_TELLING.get(candidate.setting, math.inf):
        return won, f"{gain_words(found, before)}; {break_even_words(candidate.setting, cost)}", duel
    return won, gain_words(found, before), duel


def _is_likely(duel: Duel) -> bool:
    """Whether all its pairs leave a gain inside the interval, though not beyond all doubt.

    To drop it would cost more often than to keep it: nothing is claimed before the last duel, in fresh pairs.
    """
    found = duel.estimate
    if duel.answer != "unclear" or found is None or found.pairs < _MOST_PAIRS:
        return False
    return found.low >= 1 + WORTH_HAVING and is_steady(duel.log_ratios)


def break_even(ours: Contender, theirs: Contender, duel: Duel) -> BreakEven:
    """What ours costs before the first step, and saves in each."""
    return BreakEven(
        cost_seconds=max(0.0, ours.prepared.preparation_seconds - theirs.prepared.preparation_seconds),
        saved_seconds=duel.their_seconds - duel.our_seconds,
        num_steps=ours.plan.workload.num_steps,
    )


def record_duel(
    setting: str,
    settings: Settings,
    against: Contender,
    verdict: Verdict,
    words: str,
    *,
    ours: Contender | None = None,
    duel: Duel | None = None,
    spent: float = 0.0,
) -> Trial:
    """All that is known about one trial."""
    found = duel.estimate if duel else None
    return Trial(
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


def _excess(contender: Contender) -> str | None:
    """That it took more memory than planned for, in words."""
    peak, limit = contender.prepared.peak_bytes(), memory_limit(contender.plan)
    if peak is None or limit is None or peak <= limit:
        return None
    return f"took {show_bytes(peak)}, more than the {show_bytes(limit)} planned for"
