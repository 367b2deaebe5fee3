"""Normalization of evaluation results: metrics, a confusion matrix, scores by class, and samples.

    {"accuracy": 0.8, "confusion": {"labels": ["cat", "dog"], "counts": [[8, 2], [2, 8]]},
     "classes": {"labels": ["cat", "dog"], "f1": [0.8, 0.8], "support": [10, 10]},
     "samples": [{"input": "...", "expected": "cat", "predicted": "dog"}]}

A row of `counts` is the true class, and a column is the predicted class.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from whet.base.errors import UsageError

MAX_CLASSES = 32
"""Maximum number of classes to keep; the rarest ones are merged. This limits the event log of a long run."""
MAX_SAMPLES = 16
MAX_FIELDS = 8
MAX_CHARACTERS = 300
OTHER_CLASS = "(other)"
_CLASSES_EXAMPLE = '{"labels": ["a", "b"], "f1": [0.8, 0.9], "support": [10, 12]}'
_CONFUSION_EXAMPLE = '{"labels": ["a", "b"], "counts": [[8, 2], [2, 8]]}'


def normalize_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the result of an evaluation to plain types of limited size. Raise if a value cannot be logged."""
    return {name: _read(name, value) for name, value in values.items()}


def scalar_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return only the numbers of a normalized result."""
    return {name: value for name, value in values.items() if isinstance(value, float)}


def _read(name: str, value: Any) -> Any:
    if isinstance(value, Mapping) and _is_named(name, "confusion"):
        return _confusion(value)
    if isinstance(value, Mapping) and _is_named(name, "classes"):
        return _classes(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and _is_named(name, "samples"):
        return [_sample(item) for item in value[:MAX_SAMPLES]]
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the metric {name!r} is not a number",
            got=f"{type(value).__name__}: {error}",
            try_=_CONFUSION_EXAMPLE
            if _is_named(name, "confusion")
            else 'a number; other things are named "confusion", "classes" and "samples"',
        ) from None


def _is_named(name: str, word: str) -> bool:
    """Return whether a name equals `word`, possibly with a prefix such as "test_"."""
    return name == word or name.endswith(f"_{word}")


def _confusion(value: Mapping[str, Any]) -> dict[str, Any]:
    labels, counts = value.get("labels"), value.get("counts")
    if counts is not None and hasattr(counts, "tolist"):
        counts = counts.tolist()
    try:
        names = [_truncate(str(label)) for label in labels or ()]
        rows = [[int(count) for count in row] for row in counts or ()]
    except (TypeError, ValueError):
        names, rows = [], []
    if not names or len(rows) != len(names) or {len(row) for row in rows} != {len(names)}:
        raise UsageError(
            "a confusion matrix needs a row and a column for each label",
            got=f"labels {_truncate(repr(labels))}, counts {_truncate(repr(counts))}",
            try_=_CONFUSION_EXAMPLE,
        )
    if min(map(min, rows)) < 0:
        raise UsageError(
            "a confusion matrix counts samples", got=f"counts {_truncate(repr(counts))}", try_=_CONFUSION_EXAMPLE
        )
    return _merge_rare_classes(names, rows) if len(names) > MAX_CLASSES else {"labels": names, "counts": rows}


def _classes(value: Mapping[str, Any]) -> dict[str, Any]:
    """Normalize scores by class and keep the classes with the highest support."""
    try:
        labels = [_truncate(str(label)) for label in value.get("labels") or ()]
        scores = {
            _truncate(str(name)): [float(number) for number in numbers]
            for name, numbers in [*value.items()][: MAX_FIELDS + 1]
            if name != "labels"
        }
    except (TypeError, ValueError):
        labels, scores = [], {}
    if not labels or {len(numbers) for numbers in scores.values()} != {len(labels)}:
        raise UsageError(
            "scores of classes need a number for each label", got=_truncate(repr({**value})), try_=_CLASSES_EXAMPLE
        )
    support = scores.get("support", [0.0] * len(labels))
    places = sorted(sorted(range(len(labels)), key=lambda place: -support[place])[:MAX_CLASSES])
    kept = {"labels": [labels[place] for place in places]}
    return {**kept, **{name: [numbers[place] for place in places] for name, numbers in scores.items()}}


def _merge_rare_classes(names: list[str], rows: list[list[int]]) -> dict[str, Any]:
    """Keep the most frequent classes and merge the rest into OTHER_CLASS."""
    frequent = sorted(range(len(names)), key=lambda place: -sum(rows[place]))[: MAX_CLASSES - 1]
    places = {place: new for new, place in enumerate(sorted(frequent))}
    rest = len(places)
    counts = [[0] * (rest + 1) for _ in range(rest + 1)]
    for truth, row in enumerate(rows):
        for answer, count in enumerate(row):
            counts[places.get(truth, rest)][places.get(answer, rest)] += count
    return {"labels": [*(names[place] for place in places), OTHER_CLASS], "counts": counts}


def _sample(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise UsageError(
            "samples must be dicts",
            got=type(item).__name__,
            try_='[{"input": "...", "expected": "a", "predicted": "b"}]',
        )
    return {_truncate(str(name)): _cell(value) for name, value in [*item.items()][:MAX_FIELDS]}


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return _truncate(value if isinstance(value, str) else str(value))


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 4] + " ..."
