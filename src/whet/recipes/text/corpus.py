"""What is a labelled collection of texts, and how is it cut into train, dev and test? No torch."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

# Of ten texts of a class, in hashed order, the fifth goes to dev and the tenth to test: 80/10/10 in every class, and
# a class of fewer than five texts is trained on whole.
_CUT = ("train", "train", "train", "train", "dev", "train", "train", "train", "train", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Texts with the index of each one's class."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Everything a classifier learns from and is judged by."""

    classes: tuple[str, ...]
    train: Examples
    dev: Examples
    test: Examples

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of classes, texts, labels and split: two corpora are the same when these are."""
        splits = [[part.texts, part.labels] for part in (self.train, self.dev, self.test)]
        return hashlib.sha256(json.dumps([self.classes, splits]).encode()).hexdigest()


def split(examples: Examples, *, classes: Sequence[str]) -> Corpus:
    """The same 80/10/10 in every class, decided by the texts alone: rows that share a text stay together.

    >>> rows = Examples(texts=tuple(f"text {n}" for n in range(40)), labels=(0, 1) * 20)
    >>> corpus = split(rows, classes=["even", "odd"])
    >>> len(corpus.train), len(corpus.dev), len(corpus.test), sorted(corpus.test.labels)
    (32, 4, 4, [0, 0, 1, 1])
    """
    first_label: dict[str, int] = {}
    for text, label in zip(examples.texts, examples.labels, strict=True):
        first_label.setdefault(text, label)
    taken: Counter[int] = Counter()
    place: dict[str, str] = {}
    for text in sorted(first_label, key=_hashed):
        place[text] = _CUT[taken[first_label[text]] % len(_CUT)]
        taken[first_label[text]] += 1
    parts: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for text, label in zip(examples.texts, examples.labels, strict=True):
        parts[place[text]].append((text, label))
    train, dev, test = (gather(parts[name]) for name in ("train", "dev", "test"))
    return Corpus(classes=tuple(classes), train=train, dev=dev, test=test)


def gather(rows: Sequence[tuple[str, int]]) -> Examples:
    """Rows of (text, label) as columns."""
    return Examples(texts=tuple(text for text, _ in rows), labels=tuple(label for _, label in rows))


def _hashed(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
