"""What was measured for the plan of a run, candidate by candidate?"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from whet.base.record import Record
from whet.plan.setting import Scalar
from whet.plan.trial import Trial
from whet.plan.words import show_value

MOST = 200


class Candidate(Record):
    """One value of a setting that was timed beside another."""

    label: str
    against: str
    verdict: str
    words: str
    chosen: bool
    """The run used it."""
    repeats: int
    speedup: float | None
    low: float | None
    high: float | None
    median_seconds: float | None
    rival_seconds: float | None
    preparation_seconds: float | None
    peak_bytes: int | None


class Evidence(Record):
    """All candidates of one setting."""

    setting: str
    value: str
    """What the run used."""
    candidates: tuple[Candidate, ...]


def trials_of(plan: Mapping[str, Any]) -> tuple[Trial, ...]:
    """The trials of a plan.json, without those that this whet cannot read."""
    found: list[Trial] = []
    listed = plan.get("trials")
    for entry in listed if isinstance(listed, list | tuple) else ():
        try:
            found.append(Trial.model_validate(entry))
        except ValidationError:
            continue
    return tuple(found[:MOST])


def evidence(plan: Mapping[str, Any], trials: tuple[Trial, ...]) -> tuple[Evidence, ...]:
    """The trials by setting, in the order they were made; whole plans last."""
    names = list(dict.fromkeys(trial.setting for trial in trials))
    names.sort(key=lambda name: name == "plan")
    return tuple(
        Evidence(
            setting=name,
            value="" if name == "plan" else show_value(setting_value(plan, name)),
            candidates=tuple(_candidate(trial, plan) for trial in trials if trial.setting == name),
        )
        for name in names
    )


def setting_value(plan: Mapping[str, Any], name: str) -> Any:
    """The value of a setting in a plan.json; None where there is none."""
    settings = plan.get("settings")
    setting = settings.get(name) if isinstance(settings, Mapping) else None
    return setting.get("value") if isinstance(setting, Mapping) else None


def _candidate(trial: Trial, plan: Mapping[str, Any]) -> Candidate:
    low, high = trial.interval if trial.interval is not None else (None, None)
    return Candidate(
        label=_shown(trial.settings, first=trial.setting) or "the rules",
        against=_shown(trial.against, first=trial.setting) or "the rules",
        verdict=trial.verdict,
        words=trial.words,
        chosen=all(setting_value(plan, name) == value for name, value in trial.settings.items()),
        repeats=trial.repeats,
        speedup=trial.speedup,
        low=low,
        high=high,
        median_seconds=trial.median_seconds,
        rival_seconds=trial.rival_seconds,
        preparation_seconds=trial.preparation_seconds,
        peak_bytes=trial.peak_bytes,
    )


def _shown(settings: Mapping[str, Scalar], *, first: str) -> str:
    names = sorted(settings, key=lambda name: name != first)
    return ", ".join(f"{name}={show_value(settings[name])}" for name in names)
