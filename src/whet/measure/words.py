"""What did a trial show? In one line, with the numbers that stand behind it."""

from whet.base.units import show_seconds
from whet.measure.duel import HOPELESS, Duel
from whet.measure.objective import BreakEven
from whet.measure.statistics import Estimate, is_slower
from whet.plan.trial import Trial
from whet.plan.words import show_value

_DOING = {"compile": "compile", "workers": "start workers", "data_home": "move the data", "graph": "capture"}


def duel_words(shown: str, duel: Duel) -> str:
    """A candidate that did not win."""
    found = duel.estimate
    if duel.answer == "cut off":
        return f"{shown} was at least {HOPELESS:.0f}x slower, stopped"
    if found is None:
        return f"{shown}: no time for even one pair of steps"
    quiet = "" if duel.is_quiet else "; the machine is not quiet"
    if duel.answer == "unclear":
        return f"{shown}: not clear in the time there was ({interval_words(found)}){quiet}"
    if not is_slower(duel.log_ratios):
        return f"{shown} brings nothing here ({interval_words(found)}){quiet}"
    return f"{shown} was {_slower(found)} here ({_repeats(found)}){quiet}"


def gain_words(found: Estimate, before: str) -> str:
    """A candidate that won, against what was best before it."""
    return f"{found.speedup:.2f}x {before} ({_repeats(found)})"


def interval_words(found: Estimate) -> str:
    """A speed-up with its interval."""
    return f"{found.speedup:.2f}x, {found.low:.2f}x to {found.high:.2f}x in {found.pairs} repeats"


def break_even_words(setting: str, cost: BreakEven) -> str:
    """What has to be earned back, and whether this run does."""
    return cost.words(_DOING.get(setting, "prepare"))


def timeout_words(shown: str, *, seconds: float, usual: float) -> str:
    """A preparation that was stopped, with what it usually takes."""
    return f"{shown} was not ready after {show_seconds(seconds)}, stopped (before: {show_seconds(usual)})"


def short_words(trial: Trial) -> str:
    """A trial in a few words, to stand beside others of the same setting."""
    shown = show_value(trial.settings[trial.setting])
    if trial.verdict in ("no gain", "unclear") and trial.speedup is not None:
        return f"{shown}: {trial.speedup:.2f}x"
    if trial.verdict == "cut off" and trial.speedup is not None:
        return f"{shown}: at least {HOPELESS:.0f}x slower"
    return f"{shown}: {trial.words.removeprefix(shown).lstrip(' :')}"


def _slower(found: Estimate) -> str:
    times = 1 / found.speedup
    return f"{times:.1f}x slower" if times >= 2 else f"{times - 1:.0%} slower".replace("%", " %")


def _repeats(found: Estimate) -> str:
    return f"{found.pairs} repeats, spread {found.spread:.0%}".replace("%", " %")
