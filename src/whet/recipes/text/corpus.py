"""Labeled texts: the corpus, its split into train, validation and test, and class weights. No torch."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from whet.base.errors import UsageError, closest_match

ClassWeights = Literal["auto", "none", "balanced"] | dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Texts with the class index of each text."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    """The class of each text. For multi-label data, the first of its classes, or -1 for none."""
    pairs: tuple[str, ...] = ()
    """The second texts of sentence pairs; empty for single texts."""
    label_sets: tuple[tuple[int, ...], ...] = ()
    """All classes of each text in ascending order; empty for single-label data."""

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, rows: Sequence[int]) -> "Examples":
        """Return the examples in these rows, in the given order."""
        return Examples(
            texts=tuple(self.texts[row] for row in rows),
            labels=tuple(self.labels[row] for row in rows),
            pairs=tuple(self.pairs[row] for row in rows) if self.pairs else (),
            label_sets=tuple(self.label_sets[row] for row in rows) if self.label_sets else (),
        )

    def joined(self, other: "Examples") -> "Examples":
        """Return the examples of this set followed by those of another set."""
        return Examples(
            texts=self.texts + other.texts,
            labels=self.labels + other.labels,
            pairs=self.pairs + other.pairs,
            label_sets=self.label_sets + other.label_sets,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The classes and the three splits of a dataset."""

    classes: tuple[str, ...]
    train: Examples
    val: Examples
    test: Examples

    @property
    def is_multi_label(self) -> bool:
        """Whether a text may have several classes, or none."""
        return bool(self.train.label_sets)

    @property
    def has_pairs(self) -> bool:
        """Whether a sample is a pair of texts."""
        return bool(self.train.pairs)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of classes, texts, labels and splits."""
        splits = []
        for part in (self.train, self.val, self.test):
            # Hash optional fields only if present, so that the fingerprint of a plain corpus does not change with them.
            optional = [part.pairs, part.label_sets] if part.pairs or part.label_sets else []
            splits.append([part.texts, part.labels, *optional])
        return hashlib.sha256(json.dumps([self.classes, splits]).encode()).hexdigest()


def normalize_text(text: str, pair: str | None = None) -> str:
    """Fold case and whitespace, so that texts that differ in nothing else compare equal.

    >>> normalize_text("  The  Fox\\n") == normalize_text("the fox"), normalize_text("a", "B")
    (True, 'a\\x00b')
    """
    folded = " ".join(text.casefold().split())
    return folded if pair is None else f"{folded}\0{' '.join(pair.casefold().split())}"


# --- splits -----------------------------------------------------------------------------------------------------------


def split(
    examples: Examples, *, classes: Sequence[str], seed: int = 0, groups: Sequence[str | None] | None = None
) -> Corpus:
    """Split each class 80/10/10 by hashes of the texts, without leakage between the splits.

    Rows of the same group, and rows whose texts differ only in case and whitespace, stay in the same split. The order
    of the rows does not affect the split. A class with fewer than five rows is used for training only.

    >>> rows = Examples(texts=tuple(f"text {n}" for n in range(40)), labels=(0, 1) * 20)
    >>> corpus = split(rows, classes=["even", "odd"])
    >>> len(corpus.train), len(corpus.val), len(corpus.test), sorted(corpus.test.labels)
    (32, 4, 4, [0, 0, 1, 1])
    """
    units = _linked_rows(examples, groups=groups)
    frequency = Counter(examples.labels)
    hashes = {unit: min(_row_hash(examples, row, seed=seed) for row in rows) for unit, rows in units.items()}
    by_class: defaultdict[int, list[int]] = defaultdict(list)
    for unit in sorted(units, key=lambda unit: hashes[unit]):
        by_class[_majority_label([examples.labels[row] for row in units[unit]], frequency)].append(unit)
    rows_of_split: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for of_class in by_class.values():
        for unit, name in zip(of_class, _assign_splits([len(units[unit]) for unit in of_class]), strict=True):
            rows_of_split[name] += units[unit]
    train, val, test = (examples.at(sorted(rows)) for rows in rows_of_split.values())
    return Corpus(classes=tuple(classes), train=train, val=val, test=test)


def _assign_splits(sizes: Sequence[int]) -> list[str]:
    """Return a split for each group of rows, given the sizes of the groups.

    Of ten single rows, the fifth goes to val and the tenth to test.

    >>> _assign_splits([1] * 10)
    ['train', 'train', 'train', 'train', 'val', 'train', 'train', 'train', 'train', 'test']
    """
    names: list[str] = []
    total = val = test = 0
    for size in sizes:
        total += size
        # Single rows: val gets the 5th, 15th, ... and test the 10th, 20th, ..., so both have about 10 % at any size.
        if 10 * val + 5 * size <= total:
            names.append("val")
            val += size
        elif 10 * test + 10 * size <= total:
            names.append("test")
            test += size
        else:
            names.append("train")
    return names


def _linked_rows(examples: Examples, *, groups: Sequence[str | None] | None) -> dict[int, list[int]]:
    """Group rows that share a text or a group, by union-find. Return the rows of each unit, keyed by its first row."""
    parent = list(range(len(examples)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    first_row: dict[tuple[str, str], int] = {}
    for row, text in enumerate(examples.texts):
        links = [("text", normalize_text(text, examples.pairs[row] if examples.pairs else None))]
        if groups is not None and groups[row] is not None:
            links.append(("group", str(groups[row])))
        for link in links:
            one, other = root(row), root(first_row.setdefault(link, row))
            # Use the smaller row as the root, because units are keyed by their first row.
            parent[max(one, other)] = min(one, other)
    units: defaultdict[int, list[int]] = defaultdict(list)
    for row in range(len(examples)):
        units[root(row)].append(row)
    return units


def _majority_label(labels: Sequence[int], frequency: Counter[int]) -> int:
    """Return the most frequent class of a unit. Ties go to the rarer class, so that rare classes reach all splits."""
    counts = Counter(labels)
    return min(counts, key=lambda label: (-counts[label], frequency[label], label))


def _row_hash(examples: Examples, row: int, *, seed: int) -> bytes:
    text = examples.texts[row] + (f"\0{examples.pairs[row]}" if examples.pairs else "")
    # Seed 0 hashes only the text, so that the default split depends on nothing else.
    return hashlib.sha256((f"{seed}\0{text}" if seed else text).encode()).digest()


# --- class weights ----------------------------------------------------------------------------------------------------


def read_class_weights(value: Any) -> Any:
    """Parse the option as written on a command line. pydantic validates the result.

    >>> read_class_weights("{rare: 5, 'a, b': 0.5}"), read_class_weights(None), read_class_weights("balanced")
    ({'rare': 5.0, 'a, b': 0.5}, 'none', 'balanced')
    """
    if value is None:
        return "none"
    if not isinstance(value, str) or not value.startswith("{"):
        return value
    import yaml

    try:
        # BaseLoader keeps every name as a string. safe_load would read a class "no" as False.
        return {name: float(weight) for name, weight in yaml.BaseLoader(value).get_single_data().items()}
    except (yaml.YAMLError, TypeError, ValueError):
        raise UsageError(
            "cannot parse class_weights", got=value[:200], try_="class_weights='{rare: 5, common: 1}'"
        ) from None


def class_weights(option: ClassWeights, corpus: Corpus) -> tuple[float, ...] | None:
    """Return the weight of each class, 1 for a class without one. "auto" and "none" return None."""
    if option in ("auto", "none"):
        return None
    if option == "balanced":
        return balanced_weights(corpus.train.label_sets or corpus.train.labels, num_classes=len(corpus.classes))
    assert isinstance(option, Mapping)
    for name, weight in option.items():
        if name not in corpus.classes:
            suggestion = closest_match(name, corpus.classes)
            raise UsageError(
                "class_weights names an unknown class",
                got=name,
                try_=suggestion or ", ".join(corpus.classes)[:200],
            )
        if not 0 <= weight < float("inf"):
            raise UsageError("a class weight must be 0 or more", got=f"{name}: {weight}", try_=f"{{{name}: 1}}")
    return tuple(float(option.get(name, 1.0)) for name in corpus.classes)


def rare_classes(corpus: Corpus) -> list[str]:
    """Return the classes with less than half the training rows of an even distribution; none for multi-label data."""
    if corpus.is_multi_label:
        return []
    counts = Counter(corpus.train.labels)
    limit = len(corpus.train) / len(corpus.classes) / 2
    return [name for index, name in enumerate(corpus.classes) if counts[index] < limit]


def balanced_weights(labels: Sequence[int] | Sequence[tuple[int, ...]], *, num_classes: int) -> tuple[float, ...]:
    """Return class weights that give every class the same share of the loss. Their mean over the rows is 1.

    >>> balanced_weights([0, 0, 0, 1], num_classes=2)
    (0.6666666666666666, 2.0)
    """
    counts = Counter(index for label in labels for index in (label if isinstance(label, tuple) else (label,)))
    return tuple(len(labels) / (num_classes * counts[index]) if counts[index] else 1.0 for index in range(num_classes))
