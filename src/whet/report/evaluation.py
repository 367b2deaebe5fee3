"""Details of the newest evaluations: scores per class, confusion matrices and samples."""

import itertools
from collections.abc import Mapping
from typing import Any, Literal

from whet.base.model import FrozenModel
from whet.run.event import Event, as_number
from whet.run.events import History

MAX_CLASSES = 60
MAX_SAMPLES = 50
MAX_COLUMNS = 8
_MAX_TEXT, _MAX_LABEL = 2000, 200
_MAX_EVALUATIONS = 50
"""Evaluations; older ones say little about the model as it is."""


EvaluationSplit = Literal["val", "test"]
_PREFIXES: dict[EvaluationSplit, str] = {"val": "", "test": "test_"}


class ConfusionMatrix(FrozenModel):
    """How many samples of each class were taken for which; rows are the truth."""

    part: EvaluationSplit
    step: int
    labels: tuple[str, ...]
    counts: tuple[tuple[float, ...], ...]


class ClassTable(FrozenModel):
    """Scores of each class, such as precision and recall."""

    part: EvaluationSplit
    step: int
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]


class SampleTable(FrozenModel):
    """Some samples of an evaluation."""

    part: EvaluationSplit
    step: int
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class EvaluationDetails(FrozenModel):
    """The newest of each part of the data."""

    classes: tuple[ClassTable, ...] = ()
    confusions: tuple[ConfusionMatrix, ...] = ()
    samples: tuple[SampleTable, ...] = ()


def evaluation_details(history: History) -> EvaluationDetails:
    """What the newest evaluations that say more than numbers say."""
    classes: dict[EvaluationSplit, ClassTable] = {}
    confusions: dict[EvaluationSplit, ConfusionMatrix] = {}
    samples: dict[EvaluationSplit, SampleTable] = {}
    for event in itertools.islice(history.backwards(kinds=("eval",)), _MAX_EVALUATIONS):
        for part in _PREFIXES:
            if part not in classes and (scores := _classes(event, part)) is not None:
                classes[part] = scores
            if part not in confusions and (matrix := _confusion(event, part)) is not None:
                confusions[part] = matrix
            if part not in samples and (table := _samples(event, part)) is not None:
                samples[part] = table
        if len(classes) == len(confusions) == len(samples) == len(_PREFIXES):
            break
    return EvaluationDetails(
        classes=tuple(classes[part] for part in _PREFIXES if part in classes),
        confusions=tuple(confusions[part] for part in _PREFIXES if part in confusions),
        samples=tuple(samples[part] for part in _PREFIXES if part in samples),
    )


def _classes(event: Event, part: EvaluationSplit) -> ClassTable | None:
    said = event.get(_PREFIXES[part] + "classes")
    labels = said.get("labels") if isinstance(said, Mapping) else None
    if not isinstance(said, Mapping) or not isinstance(labels, list) or not 0 < len(labels) <= MAX_CLASSES:
        return None
    columns: dict[str, list[float]] = {}
    for name, numbers in [*said.items()][: MAX_COLUMNS + 1]:
        known = [as_number(value) for value in numbers] if isinstance(numbers, list) and name != "labels" else []
        whole = [number for number in known if number is not None]
        if len(whole) == len(labels):
            columns[str(name)[:_MAX_LABEL]] = whole
    if not columns:
        return None
    names = tuple(str(label)[:_MAX_LABEL] for label in labels)
    rows = tuple(zip(*columns.values(), strict=True))
    return ClassTable(part=part, step=event.step, labels=names, columns=tuple(columns), rows=rows)


def _confusion(event: Event, part: EvaluationSplit) -> ConfusionMatrix | None:
    said = event.get(_PREFIXES[part] + "confusion")
    if not isinstance(said, Mapping):
        return None
    labels, rows = said.get("labels"), said.get("counts")
    if not isinstance(labels, list) or not isinstance(rows, list) or not 0 < len(labels) == len(rows) <= MAX_CLASSES:
        return None
    counts: list[tuple[float, ...]] = []
    for row in rows:
        numbers = [as_number(value) for value in row] if isinstance(row, list) else []
        whole = [number for number in numbers if number is not None and 0 <= number < float("inf")]
        if len(whole) != len(labels):
            return None
        counts.append(tuple(whole))
    names = tuple(str(label)[:_MAX_LABEL] for label in labels)
    return ConfusionMatrix(part=part, step=event.step, labels=names, counts=tuple(counts))


def _samples(event: Event, part: EvaluationSplit) -> SampleTable | None:
    said = event.get(_PREFIXES[part] + "samples")
    listed = [item for item in said if isinstance(item, Mapping)] if isinstance(said, list) else []
    if not listed:
        return None
    columns = tuple(dict.fromkeys(str(name) for item in listed for name in item))[:MAX_COLUMNS]
    rows = tuple(tuple(_cell(item.get(name)) for name in columns) for item in listed[:MAX_SAMPLES])
    return SampleTable(part=part, step=event.step, columns=columns, rows=rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."
