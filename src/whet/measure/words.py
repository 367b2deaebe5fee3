"""What did a trial show? In one line, with the numbers that stand behind it."""

from whet.base.units import show_seconds, show_share
from whet.measure.duel import Duel
from whet.measure.objective import BreakEven
from whet.measure.statistics import Estimate, is_slower
from whet.plan.setting import Scalar
from whet.plan.trial import Trial
from whet.plan.words import show_value

_DOING = {"compile": "compile", "workers": "start workers", "data_home": "move the data", "graph": "capture"}


def shown(setting: str, value: Scalar) -> str:
    """A value that can be understood without its table row.

    >>> shown("precision", "bf16"), shown("compile", "on"), shown("micro_batch", 8)
    ('bf16', 'compile=on', 'micro_batch=8')
    """
    speaks = isinstance(value, str) and value not in ("on", "off")
    return str(value) if speaks else f"{setting}={show_value(value)}"


def duel_words(name: str, duel: Duel) -> str:
    """A candidate that did not win."""
    found = duel.estimate
    if found is None:
        return f"{name}: no time for even one pair of steps"
    if duel.answer == "cut off":
        return f"{name} was about {1 / found.speedup:.0f}x slower in its first step, stopped"
    quiet = "" if duel.is_quiet else "; the machine is not quiet"
    if duel.answer == "unclear":
        return f"{name}: repeats too few or too uneven to be sure ({interval_words(found)}){quiet}"
    if not is_slower(duel.log_ratios):
        return f"{name} brings nothing here ({interval_words(found)}){quiet}"
    return f"{name} was {_slower(found)} here ({_repeats(found)}){quiet}"


def gain_words(found: Estimate, before: str) -> str:
    """A candidate that won, against what was best before it."""
    return f"{found.speedup:.2f}x as fast as {before} ({_repeats(found)})"


def interval_words(found: Estimate) -> str:
    """A speed-up with its interval."""
    return f"{found.speedup:.2f}x, {found.low:.2f}x to {found.high:.2f}x in {_count(found)}"


def break_even_words(setting: str, cost: BreakEven) -> str:
    """What has to be earned back, and whether this run does."""
    return cost.words(_DOING.get(setting, "prepare"))


def timeout_words(name: str, *, seconds: float, usual: float) -> str:
    """A preparation that was stopped, with what it usually takes."""
    return f"{name} was not ready after {show_seconds(seconds)}, stopped (before: {show_seconds(usual)})"


def short_words(trial: Trial) -> str:
    """A trial in a few words, to stand beside others of the same setting."""
    value = trial.settings[trial.setting]
    short = show_value(value)
    if trial.verdict in ("no gain", "unclear") and trial.speedup is not None:
        return f"{short}: {trial.speedup:.2f}x"
    if trial.verdict == "cut off" and trial.speedup is not None:
        return f"{short}: about {1 / trial.speedup:.0f}x slower"
    return f"{short}: {trial.words.removeprefix(shown(trial.setting, value)).lstrip(' :')}"


def _slower(found: Estimate) -> str:
    times = 1 / found.speedup
    return f"{times:.1f}x slower" if times >= 2 else f"{show_share(times - 1)} slower"


def _count(found: Estimate) -> str:
    return f"{found.pairs} repeat{'' if found.pairs == 1 else 's'}"


def _repeats(found: Estimate) -> str:
    return f"{_count(found)}, spread {show_share(found.spread)}"
