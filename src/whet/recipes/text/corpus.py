"""What is a labelled collection of texts? No torch."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass


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
    dev: Examples
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
        for part in (self.train, self.dev, self.test):
            # Texts alone with one class each keep the form they always had.
            more = [part.pairs, part.label_sets] if part.pairs or part.label_sets else []
            splits.append([part.texts, part.labels, *more])
        return hashlib.sha256(json.dumps([self.classes, splits]).encode()).hexdigest()


def gather(rows: Sequence[tuple[str, int]]) -> Examples:
    """Rows of (text, label) as columns."""
    return Examples(texts=tuple(text for text, _ in rows), labels=tuple(label for _, label in rows))
