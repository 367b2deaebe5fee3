"""Evaluations of a run: metrics over time, and details of the newest ones (classes, confusion matrix, samples)."""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from whet.base.model import FrozenModel
from whet.run.event import Event, as_number
from whet.run.events import History

# Limits that keep a report readable and small with thousands of classes or samples.
MAX_CLASSES = 60
MAX_SAMPLES = 50
MAX_COLUMNS = 8
_MAX_CELL, _MAX_LABEL = 2000, 200
# Look for details in at most this many evaluations. Older ones do not describe the current model.
_MAX_EVALUATIONS = 50

EvaluationSplit = Literal["val", "test"]
_PREFIXES: dict[EvaluationSplit, str] = {"val": "", "test": "test_"}

Details = TypeVar("Details")


class Evaluation(FrozenModel):
    """The metrics of one evaluation."""

    step: int
    time: float
    metrics: dict[str, float]


class ConfusionMatrix(FrozenModel):
    """Number of samples by true class (row) and predicted class (column)."""

    split: EvaluationSplit
    step: int
    labels: tuple[str, ...]
    counts: tuple[tuple[float, ...], ...]


class ClassTable(FrozenModel):
    """Scores of each class, such as precision and recall."""

    split: EvaluationSplit
    step: int
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]


class SampleTable(FrozenModel):
    """Examples from an evaluation, with inputs and predictions."""

    split: EvaluationSplit
    step: int
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class EvaluationDetails(FrozenModel):
    """The newest class scores, confusion matrices and samples of each split."""

    classes: tuple[ClassTable, ...] = ()
    confusions: tuple[ConfusionMatrix, ...] = ()
    samples: tuple[SampleTable, ...] = ()


def read_evaluations(history: History) -> tuple[Evaluation, ...]:
    """Return all evaluations of a run, with their numeric fields."""
    evaluations = []
    for event in history.events(kinds=("eval",)):
        numbers = {name: as_number(value) for name, value in event.fields.items()}
        metrics = {name: number for name, number in numbers.items() if number is not None}
        evaluations.append(Evaluation(step=event.step, time=event.time, metrics=metrics))
    return tuple(evaluations)


def tested_step(history: History) -> int | None:
    """Return the step of the checkpoint that was evaluated on the test split, or None if it is not recorded."""
    names = (event.get("weights") for event in history.backwards(kinds=("eval",)))
    matches = (re.fullmatch(r"step-(\d{1,18})", name) for name in names if isinstance(name, str))
    return next((int(match[1]) for match in matches if match), None)


def evaluation_details(history: History) -> EvaluationDetails:
    """Return class scores, confusion matrices and samples from the newest evaluations that include them."""
    events = list(itertools.islice(history.backwards(kinds=("eval",)), _MAX_EVALUATIONS))
    return EvaluationDetails(
        classes=_newest(events, _classes),
        confusions=_newest(events, _confusion),
        samples=_newest(events, _samples),
    )


def _newest(events: list[Event], read: Callable[[Event, EvaluationSplit], Details | None]) -> tuple[Details, ...]:
    newest = (next((d for event in events if (d := read(event, split)) is not None), None) for split in _PREFIXES)
    return tuple(details for details in newest if details is not None)


def _classes(event: Event, split: EvaluationSplit) -> ClassTable | None:
    value = event.get(_PREFIXES[split] + "classes")
    labels = value.get("labels") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(labels, list) or not 0 < len(labels) <= MAX_CLASSES:
        return None
    columns: dict[str, list[float]] = {}
    for name, numbers in [*value.items()][: MAX_COLUMNS + 1]:
        known = [as_number(item) for item in numbers] if isinstance(numbers, list) and name != "labels" else []
        complete = [number for number in known if number is not None]
        if len(complete) == len(labels):
            columns[str(name)[:_MAX_LABEL]] = complete
    if not columns:
        return None
    rows = tuple(zip(*columns.values(), strict=True))
    return ClassTable(split=split, step=event.step, labels=_labels(labels), columns=tuple(columns), rows=rows)


def _confusion(event: Event, split: EvaluationSplit) -> ConfusionMatrix | None:
    value = event.get(_PREFIXES[split] + "confusion")
    if not isinstance(value, Mapping):
        return None
    labels, rows = value.get("labels"), value.get("counts")
    if not isinstance(labels, list) or not isinstance(rows, list) or not 0 < len(labels) == len(rows) <= MAX_CLASSES:
        return None
    counts: list[tuple[float, ...]] = []
    for row in rows:
        numbers = [as_number(item) for item in row] if isinstance(row, list) else []
        valid = [number for number in numbers if number is not None and 0 <= number < float("inf")]
        if len(valid) != len(labels):
            return None
        counts.append(tuple(valid))
    return ConfusionMatrix(split=split, step=event.step, labels=_labels(labels), counts=tuple(counts))


def _samples(event: Event, split: EvaluationSplit) -> SampleTable | None:
    value = event.get(_PREFIXES[split] + "samples")
    listed = [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
    if not listed:
        return None
    columns = tuple(dict.fromkeys(str(name) for item in listed for name in item))[:MAX_COLUMNS]
    rows = tuple(tuple(_cell(item.get(name)) for name in columns) for item in listed[:MAX_SAMPLES])
    return SampleTable(split=split, step=event.step, columns=columns, rows=rows)


def _labels(labels: list[Any]) -> tuple[str, ...]:
    return tuple(str(label)[:_MAX_LABEL] for label in labels)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_CELL else text[:_MAX_CELL] + " ..."
