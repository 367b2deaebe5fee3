"""What did a search find, and why is each setting what it is?"""

from collections.abc import Iterator, Mapping, Sequence

from pydantic import Field, NonNegativeFloat

from whet.base.record import Record
from whet.measure.words import short_words
from whet.plan.plan import Plan, make_plan
from whet.plan.setting import Evidence, Measured, Scalar
from whet.plan.trial import Trial

_MOST_PARTS = 3
_WIDEST = 2.0
NOT_QUIET = "the machine is not quiet: times changed while they were measured"


class Gain(Record):
    """How much faster than the rules, confirmed by a duel of its own."""

    speedup: float
    low: float
    high: float
    repeats: int


class Found(Record):
    """The result of a search; `measured` goes into `make_plan`, `trials` into the plan."""

    settings: Mapping[str, Scalar] = Field(default_factory=dict)
    """What is better than the rule-based plan; empty where nothing is."""
    measured: Mapping[str, Measured] = Field(default_factory=dict)
    """Settings that were tried, kept ones too."""
    trials: tuple[Trial, ...] = ()
    spent_seconds: NonNegativeFloat = 0.0
    gain: Gain | None = None
    """Over the rule-based plan; None where it was kept."""
    step_seconds: NonNegativeFloat | None = None
    """The median of a step under what was found; None where none was made."""
    preparation_seconds: NonNegativeFloat | None = None
    words: tuple[str, ...] = ()

    @property
    def holds_another_day(self) -> bool:
        """Not what was seen on a busy machine: times that changed, or a gain whose interval doubles from end to end.

        >>> Found(gain=Gain(speedup=14, low=3, high=50, repeats=8)).holds_another_day
        False
        """
        is_uneven = self.gain is not None and self.gain.high > _WIDEST * self.gain.low
        return not is_uneven and NOT_QUIET not in self.words

    def applied_to(self, plan: Plan) -> Plan:
        """The plan with what was found, and the trials as evidence."""
        return make_plan(
            plan.machine,
            plan.workload,
            wishes=plan.wishes,
            measured=self.measured,
            conditions=plan.conditions,
            trials=self.trials,
        )


def measured_settings(plan: Plan, trials: Sequence[Trial], *, reverted: str | None = None) -> dict[str, Measured]:
    """What was measured about each setting of the resulting plan: why it won, or why the others lost.

    `reverted` says why gains that single trials showed were given up again.
    """
    measured: dict[str, Measured] = {}
    for name in plan.settings:
        value = plan.value(name)
        group = [trial for trial in trials if trial.setting == name]
        losers = [trial for trial in group if trial.settings[name] != value]
        winner = _winner(name, value, trials) if reverted is None else None
        if winner is not None:
            along = "" if winner.setting == name else f"together with {winner.setting}: "
            measured[name] = Measured(value=value, reason=along + winner.words, evidence=_evidence(winner, name))
        elif losers:
            has_won = any(trial.verdict in ("faster", "likely") for trial in losers)
            reason = reverted if reverted is not None and has_won else _why_kept(losers)
            measured[name] = Measured(value=value, reason=reason, evidence=_evidence(_nearest(losers), name))
    return measured


def _winner(name: str, value: Scalar, trials: Sequence[Trial]) -> Trial | None:
    """The trial that brought this value in, by itself or along with another setting."""
    won = (t for t in trials if t.verdict in ("faster", "likely") and name in t.settings and t.setting in t.settings)
    return next((t for t in won if t.settings[name] == value and t.against.get(name) != value), None)


def _why_kept(losers: Sequence[Trial]) -> str:
    values = dict.fromkeys(trial.settings[trial.setting] for trial in losers)
    told = [_nearest([trial for trial in losers if trial.settings[trial.setting] == value]) for value in values]
    return told[0].words if len(told) == 1 else "; ".join(_parts(told))


def _parts(losers: Sequence[Trial]) -> Iterator[str]:
    yield from (short_words(trial) for trial in losers[:_MOST_PARTS])
    if len(losers) > _MOST_PARTS:
        yield f"and {len(losers) - _MOST_PARTS} more"


def _nearest(losers: Sequence[Trial]) -> Trial:
    """The loser that came closest."""
    return max(losers, key=lambda trial: trial.speedup or 0.0)


def _evidence(trial: Trial, name: str) -> Evidence:
    return {
        "tried": trial.settings[name],
        "verdict": trial.verdict,
        "repeats": trial.repeats,
        "median": trial.median_seconds,
        "rival_median": trial.rival_seconds,
        "speedup": trial.speedup,
        "interval": trial.interval,
        "bytes": trial.peak_bytes,
    }
