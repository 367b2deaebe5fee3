"""How far do word counts alone go? Multinomial naive Bayes: the number a trained model is read against."""

import math
import re
from collections import Counter

import numpy as np

from whet.recipes.text.corpus import Corpus, Examples

_WORD = re.compile(r"\w+")


def baseline_accuracy(corpus: Corpus) -> float:
    """The share of the test texts that naive Bayes, counted on the training texts, puts into the right class."""
    num_classes = len(corpus.classes)
    rows: dict[str, int] = {}
    for text in _whole(corpus.train):
        for word in _words(text):
            rows.setdefault(word, len(rows))
    # Add-one smoothing: a word that a class has never shown must not rule the class out.
    counts = np.ones((len(rows), num_classes))
    for text, label in zip(_whole(corpus.train), corpus.train.labels, strict=True):
        for word in _words(text):
            counts[rows[word], label] += 1
    evidence = np.log(counts / counts.sum(0))
    seen = Counter(corpus.train.labels)
    prior = np.array([math.log(seen[label]) if seen[label] else -math.inf for label in range(num_classes)])
    return _share_right(corpus.test, rows=rows, evidence=evidence, prior=prior)


def _share_right(examples: Examples, *, rows: dict[str, int], evidence: np.ndarray, prior: np.ndarray) -> float:
    right = 0
    for text, label in zip(_whole(examples), examples.labels, strict=True):
        known = [rows[word] for word in _words(text) if word in rows]
        right += int(np.argmax(prior + evidence[known].sum(0))) == label
    return right / len(examples)


def _whole(examples: Examples) -> list[str]:
    """Texts with their second halves."""
    pairs = examples.pairs or ("",) * len(examples)
    return [f"{text} {pair}" for text, pair in zip(examples.texts, pairs, strict=True)]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
