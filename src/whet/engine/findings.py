"""What may an evaluation tell besides its metrics? A confusion matrix, scores of classes, samples: all of bounded size.

    {"accuracy": 0.8, "confusion": {"labels": ["cat", "dog"], "counts": [[8, 2], [2, 8]]},
     "classes": {"labels": ["cat", "dog"], "f1": [0.8, 0.8], "support": [10, 10]},
     "samples": [{"input": "...", "expected": "cat", "predicted": "dog"}]}

A row of `counts` is a true class, a column what it was taken for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from whet.base.errors import UsageError

MOST_CLASSES = 32
"""Of more classes the rarest become one, so that every evaluation of a long run can be kept."""
MOST_SAMPLES = 16
MOST_NAMES = 8
MOST_CHARACTERS = 300
REST = "(other)"
_SCORES = '{"labels": ["a", "b"], "f1": [0.8, 0.9], "support": [10, 12]}'
_MATRIX = '{"labels": ["a", "b"], "counts": [[8, 2], [2, 8]]}'


def read_findings(found: Mapping[str, Any]) -> dict[str, Any]:
    """What an evaluation gave, in plain types and bounded size; what can be neither written nor shown is refused."""
    return {name: _read(name, value) for name, value in found.items()}


def metrics_of(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among what `read_findings` gave."""
    return {name: value for name, value in found.items() if isinstance(value, float)}


def _read(name: str, value: Any) -> Any:
    if isinstance(value, Mapping) and _ends(name, "confusion"):
        return _confusion(value)
    if isinstance(value, Mapping) and _ends(name, "classes"):
        return _classes(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and _ends(name, "samples"):
        return [_sample(item) for item in value[:MOST_SAMPLES]]
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the metric {name!r} is not a number",
            got=f"{type(value).__name__}: {error}",
            try_=_MATRIX
            if _ends(name, "confusion")
            else 'a number; other things are named "confusion", "classes" and "samples"',
        ) from None


def _ends(name: str, word: str) -> bool:
    """Of the test part names begin with "test_"."""
    return name == word or name.endswith(f"_{word}")


def _confusion(value: Mapping[str, Any]) -> dict[str, Any]:
    labels, counts = value.get("labels"), value.get("counts")
    if counts is not None and hasattr(counts, "tolist"):
        counts = counts.tolist()
    try:
        names = [_short(str(label)) for label in labels or ()]
        rows = [[int(count) for count in row] for row in counts or ()]
    except (TypeError, ValueError):
        names, rows = [], []
    if not names or len(rows) != len(names) or {len(row) for row in rows} != {len(names)}:
        raise UsageError(
            "a confusion matrix needs a row and a column for each label",
            got=f"labels {_short(repr(labels))}, counts {_short(repr(counts))}",
            try_=_MATRIX,
        )
    if min(map(min, rows)) < 0:
        raise UsageError("a confusion matrix counts samples", got=f"counts {_short(repr(counts))}", try_=_MATRIX)
    return _merged(names, rows) if len(names) > MOST_CLASSES else {"labels": names, "counts": rows}


def _classes(value: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of the most frequent classes, by their support where that is told."""
    try:
        labels = [_short(str(label)) for label in value.get("labels") or ()]
        scores = {
            _short(str(name)): [float(number) for number in numbers]
            for name, numbers in [*value.items()][: MOST_NAMES + 1]
            if name != "labels"
        }
    except (TypeError, ValueError):
        labels, scores = [], {}
    if not labels or {len(numbers) for numbers in scores.values()} != {len(labels)}:
        raise UsageError("scores of classes need a number for each label", got=_short(repr({**value})), try_=_SCORES)
    support = scores.get("support", [0.0] * len(labels))
    places = sorted(sorted(range(len(labels)), key=lambda place: -support[place])[:MOST_CLASSES])
    kept = {"labels": [labels[place] for place in places]}
    return {**kept, **{name: [numbers[place] for place in places] for name, numbers in scores.items()}}


def _merged(names: list[str], rows: list[list[int]]) -> dict[str, Any]:
    """The most frequent classes, and all others as one."""
    frequent = sorted(range(len(names)), key=lambda place: -sum(rows[place]))[: MOST_CLASSES - 1]
    places = {place: new for new, place in enumerate(sorted(frequent))}
    rest = len(places)
    counts = [[0] * (rest + 1) for _ in range(rest + 1)]
    for truth, row in enumerate(rows):
        for answer, count in enumerate(row):
            counts[places.get(truth, rest)][places.get(answer, rest)] += count
    return {"labels": [*(names[place] for place in places), REST], "counts": counts}


def _sample(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise UsageError(
            "samples are maps", got=type(item).__name__, try_='[{"input": "...", "expected": "a", "predicted": "b"}]'
        )
    return {_short(str(name)): _cell(value) for name, value in [*item.items()][:MOST_NAMES]}


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return _short(value if isinstance(value, str) else str(value))


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 4] + " ..."
