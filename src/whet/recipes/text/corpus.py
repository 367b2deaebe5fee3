"""Labeled texts: the corpus, its split into train, validation and test, and class weights. No torch."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from whet.base.errors import UsageError, closest_match


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Texts with the index of each one's class."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    """Where a text may have several classes: the first of them, -1 for none."""
    pairs: tuple[str, ...] = ()
    """The second halves of sentence pairs; empty where texts stand alone."""
    label_sets: tuple[tuple[int, ...], ...] = ()
    """All classes of each text, in order; empty where each has exactly one."""

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, rows: Sequence[int]) -> "Examples":
        """Some of the rows, in the order given."""
        return Examples(
            texts=tuple(self.texts[row] for row in rows),
            labels=tuple(self.labels[row] for row in rows),
            pairs=tuple(self.pairs[row] for row in rows) if self.pairs else (),
            label_sets=tuple(self.label_sets[row] for row in rows) if self.label_sets else (),
        )

    def joined(self, other: "Examples") -> "Examples":
        """These rows, then the other's."""
        return Examples(
            texts=self.texts + other.texts,
            labels=self.labels + other.labels,
            pairs=self.pairs + other.pairs,
            label_sets=self.label_sets + other.label_sets,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Everything a classifier learns from and is judged by."""

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
        """Whether a sample is two texts."""
        return bool(self.train.pairs)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of classes, texts, labels and split: two corpora are the same when these are."""
        splits = []
        for part in (self.train, self.val, self.test):
            # Texts alone with one class each keep the form they always had.
            more = [part.pairs, part.label_sets] if part.pairs or part.label_sets else []
            splits.append([part.texts, part.labels, *more])
        return hashlib.sha256(json.dumps([self.classes, splits]).encode()).hexdigest()


def gather(rows: Sequence[tuple[str, int]]) -> Examples:
    """Rows of (text, label) as columns."""
    return Examples(texts=tuple(text for text, _ in rows), labels=tuple(label for _, label in rows))


def normalize_text(text: str, pair: str | None = None) -> str:
    """A text, with its second half if it has one, as it is compared.

    >>> folded("  The  Fox\\n") == folded("the fox"), folded("a", "B")
    (True, 'a\\x00b')
    """
    whole = " ".join(text.casefold().split())
    return whole if pair is None else f"{whole}\0{' '.join(pair.casefold().split())}"


def split(
    examples: Examples, *, classes: Sequence[str], seed: int = 0, groups: Sequence[str | None] | None = None
) -> Corpus:
    """80/10/10 in every class, decided by the texts alone; what belongs together stays on one side.

    Together belong rows of one group, and rows whose texts differ in case and spaces only. The order of rows does not
    matter, and a class of fewer than five rows is trained on whole.

    >>> rows = Examples(texts=tuple(f"text {n}" for n in range(40)), labels=(0, 1) * 20)
    >>> corpus = split(rows, classes=["even", "odd"])
    >>> len(corpus.train), len(corpus.dev), len(corpus.test), sorted(corpus.test.labels)
    (32, 4, 4, [0, 0, 1, 1])
    """
    units = _linked_rows(examples, groups=groups)
    often = Counter(examples.labels)
    hashed = {unit: min(_row_hash(examples, row, seed=seed) for row in rows) for unit, rows in units.items()}
    by_class: defaultdict[int, list[int]] = defaultdict(list)
    for unit in sorted(units, key=lambda unit: hashed[unit]):
        by_class[_majority_label([examples.labels[row] for row in units[unit]], often)].append(unit)
    places: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for inside in by_class.values():
        for unit, place in zip(inside, _assign_splits([len(units[unit]) for unit in inside]), strict=True):
            places[place] += units[unit]
    train, val, test = (examples.at(sorted(rows)) for rows in places.values())
    return Corpus(classes=tuple(classes), train=train, val=val, test=test)


def _assign_splits(sizes: Sequence[int]) -> list[str]:
    """Where units of these sizes go: of ten single rows the fifth to dev, the tenth to test.

    >>> _cut([1] * 10)
    ['train', 'train', 'train', 'train', 'dev', 'train', 'train', 'train', 'train', 'test']
    """
    places: list[str] = []
    taken = val = test = 0
    for size in sizes:
        taken += size
        if 10 * val + 5 * size <= taken:
            places.append("val")
            val += size
        elif 10 * test + 10 * size <= taken:
            places.append("test")
            test += size
        else:
            places.append("train")
    return places


def _linked_rows(examples: Examples, *, groups: Sequence[str | None] | None) -> dict[int, list[int]]:
    """The rows that must stay together, by the first row of each unit."""
    leader = list(range(len(examples)))

    def lead(row: int) -> int:
        while leader[row] != row:
            leader[row] = leader[leader[row]]
            row = leader[row]
        return row

    seen: dict[tuple[str, str], int] = {}
    for row, text in enumerate(examples.texts):
        ties = [("text", normalize_text(text, examples.pairs[row] if examples.pairs else None))]
        if groups is not None and groups[row] is not None:
            ties.append(("group", str(groups[row])))
        for tie in ties:
            one, other = lead(row), lead(seen.setdefault(tie, row))
            leader[max(one, other)] = min(one, other)
    units: defaultdict[int, list[int]] = defaultdict(list)
    for row in range(len(examples)):
        units[lead(row)].append(row)
    return units


def _majority_label(labels: Sequence[int], often: Counter[int]) -> int:
    """The class that a unit counts for: its most frequent one, of equals the rarer, so that rare ones are spread."""
    inside = Counter(labels)
    return min(inside, key=lambda label: (-inside[label], often[label], label))


def _row_hash(examples: Examples, row: int, *, seed: int) -> bytes:
    text = examples.texts[row] + (f"\0{examples.pairs[row]}" if examples.pairs else "")
    return hashlib.sha256((f"{seed}\0{text}" if seed else text).encode()).digest()


ClassWeights = Literal["none", "balanced"] | dict[str, float]


def read_class_weights(value: Any) -> Any:
    """The words that a command line gives as what they mean; pydantic judges the rest.

    >>> read_class_weights("{rare: 5, 'a, b': 0.5}"), read_class_weights(None), read_class_weights("balanced")
    ({'rare': 5.0, 'a, b': 0.5}, 'none', 'balanced')
    """
    if value is None:
        return "none"
    if not isinstance(value, str) or not (value.startswith("{") and value.endswith("}")):
        return value
    weights: dict[str, float] = {}
    for item in _split_items(value[1:-1]):
        name, _, number = item.rpartition(":")
        try:
            weights[name.strip().strip("'\"")] = float(number)
        except ValueError:
            raise UsageError(
                "class_weights cannot be read", got=item.strip(), try_="class_weights='{rare: 5, common: 1}'"
            ) from None
    return weights


def _split_items(text: str) -> list[str]:
    """What stands between commas that are inside no quotes."""
    items, quote = [""], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        if letter == "," and not quote:
            items.append("")
        else:
            items[-1] += letter
    return [item for item in items if item.strip()]


def class_weights(wish: ClassWeights, corpus: Corpus) -> tuple[float, ...] | None:
    """The weight of each class in order; None when all count alike. A class that you do not name counts 1."""
    if wish == "none":
        return None
    if wish == "balanced":
        return balanced_weights(corpus.train.label_sets or corpus.train.labels, num_classes=len(corpus.classes))
    assert isinstance(wish, Mapping)
    for name, weight in wish.items():
        if name not in corpus.classes:
            meant = closest_match(name, corpus.classes)
            known = ", ".join(corpus.classes)[:200]
            raise UsageError("class_weights names no class of the data", got=name, try_=meant or known)
        if not 0 <= weight < float("inf"):
            raise UsageError("a class weight is a number from 0 on", got=f"{name}: {weight}", try_=f"{{{name}: 1}}")
    return tuple(float(wish.get(name, 1.0)) for name in corpus.classes)


def balanced_weights(labels: Sequence[int] | Sequence[tuple[int, ...]], *, num_classes: int) -> tuple[float, ...]:
    """Weights that give every class the same share of the loss, with a mean of 1 over the rows.

    >>> balanced([0, 0, 0, 1], num_classes=2)
    (0.6666666666666666, 2.0)
    """
    seen = Counter(index for label in labels for index in (label if isinstance(label, tuple) else (label,)))
    return tuple(len(labels) / (num_classes * seen[index]) if seen[index] else 1.0 for index in range(num_classes))
