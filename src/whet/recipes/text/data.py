"""Tokenized splits for training, and a naive Bayes baseline to compare with."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from whet.data.batch import Ragged
from whet.recipes.text.config import TextArch
from whet.recipes.text.corpus import Corpus, Examples
from whet.recipes.text.tokenizer import PAD_ID, PretrainedTokenizer, Tokenizer

_WORD = re.compile(r"\w+")


def baseline_accuracy(corpus: Corpus) -> float:
    """The share of the test texts that naive Bayes, counted on the training texts, puts into the right class."""
    num_classes = len(corpus.classes)
    rows: dict[str, int] = {}
    for text in _full_texts(corpus.train):
        for word in _words(text):
            rows.setdefault(word, len(rows))
    # Add-one smoothing: a word that a class has never shown must not rule the class out.
    counts = np.ones((len(rows), num_classes))
    for text, label in zip(_full_texts(corpus.train), corpus.train.labels, strict=True):
        for word in _words(text):
            counts[rows[word], label] += 1
    evidence = np.log(counts / counts.sum(0))
    seen = Counter(corpus.train.labels)
    prior = np.array([math.log(seen[label]) if seen[label] else -math.inf for label in range(num_classes)])
    return _accuracy(corpus.test, rows=rows, evidence=evidence, prior=prior)


def _accuracy(examples: Examples, *, rows: dict[str, int], evidence: np.ndarray, prior: np.ndarray) -> float:
    right = 0
    for text, label in zip(_full_texts(examples), examples.labels, strict=True):
        known = [rows[word] for word in _words(text) if word in rows]
        right += int(np.argmax(prior + evidence[known].sum(0))) == label
    return right / len(examples)


def _full_texts(examples: Examples) -> list[str]:
    """Texts with their second halves."""
    pairs = examples.pairs or ("",) * len(examples)
    return [f"{text} {pair}" for text, pair in zip(examples.texts, pairs, strict=True)]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


AnyTokenizer = Tokenizer | PretrainedTokenizer


class SplitColumns(TypedDict):
    """A split: int64 token ids and the number of each text's class."""

    tokens: Ragged
    label: Tensor
    """int64 (rows); where a text may have several classes float32 (rows, classes), 1 for each that it has."""
    weight: NotRequired[Tensor]
    """float32 of the label's shape: how much it counts in the loss. Only where classes do not all count alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """Three splits as tensors, and what is needed to read a prediction."""

    train: SplitColumns
    val: SplitColumns
    test: SplitColumns
    classes: tuple[str, ...]
    tokenizer: AnyTokenizer
    max_length: int
    """Tokens of a text that are read: no more than the model has positions for."""
    fingerprint: str
    """Of the corpus: the same texts, labels and split have the same one."""
    mean_length: float
    """Tokens of a training text, on average."""
    has_pairs: bool
    """Whether a sample is two texts."""
    baseline: float | None
    """The share of the test texts that word counts alone get right; unknown where a text may have several classes."""
    notes: tuple[str, ...] = ()
    """What was understood, and what is wrong with it: told before the training starts."""

    @property
    def is_multi_label(self) -> bool:
        """Whether a text may have several classes, or none."""
        return self.train["label"].dim() == 2


def learn_tokenizer(corpus: Corpus, *, arch: TextArch) -> Tokenizer:
    """The tokenizer of a run, learned from the training texts alone."""
    return Tokenizer.train((*corpus.train.texts, *corpus.train.pairs), vocab_size=arch.vocab_size)


def tokenize(
    corpus: Corpus,
    *,
    tokenizer: AnyTokenizer,
    max_length: int,
    class_weights: Sequence[float] | None = None,
) -> TextData:
    """The corpus as columns."""
    splits = (corpus.train, corpus.val, corpus.test)
    train, val, test = (
        SplitColumns(
            tokens=token_column(part.texts, tokenizer=tokenizer, max_length=max_length, pairs=part.pairs),
            label=label_column(part, num_classes=len(corpus.classes)),
        )
        for part in splits
    )
    if class_weights is not None:
        # Only the training is weighed: metrics mean the same with and without.
        train["weight"] = weight_column(train["label"], class_weights)
    return TextData(
        train=train,
        val=val,
        test=test,
        classes=corpus.classes,
        tokenizer=tokenizer,
        max_length=max_length,
        fingerprint=corpus.fingerprint,
        has_pairs=corpus.has_pairs,
        baseline=None if corpus.is_multi_label else baseline_accuracy(corpus),
        mean_length=float(train["tokens"].lengths.double().mean()),
    )


def truncation_notes(data: TextData) -> list[str]:
    """How many training texts are as long as what is read of them, or longer."""
    lengths = data.train["tokens"].lengths
    num_full = int((lengths >= data.max_length).sum())
    if not num_full:
        return []
    number = f"{num_full:,} of {len(lengths):,} training texts have {data.max_length} tokens or more"
    return [f"{number}; what is beyond is not read (arch.max_length)"]


def label_column(part: Examples, *, num_classes: int) -> Tensor:
    """Class numbers, or a row of zeros and ones for each text."""
    if not part.label_sets:
        return torch.tensor(part.labels)
    table = torch.zeros(len(part), num_classes)
    for row, labels in enumerate(part.label_sets):
        table[row, list(labels)] = 1.0
    return table


def weight_column(label: Tensor, class_weights: Sequence[float]) -> Tensor:
    """What each label counts: the weight of its class; of several the classes that a text lacks count 1."""
    weights = torch.tensor(class_weights, dtype=torch.float32)
    return weights[label] if label.dim() == 1 else 1 + label * (weights - 1)


def token_column(
    texts: Sequence[str], *, tokenizer: AnyTokenizer, max_length: int, pairs: Sequence[str] = ()
) -> Ragged:
    """Texts alone, or with their second halves: both are read as far as there is room for them."""
    ids = (
        tokenizer.encode_pairs(texts, pairs, max_length=max_length)
        if pairs
        else tokenizer.encode(texts, max_length=max_length)
    )
    return Ragged.of([torch.tensor(row) for row in ids], pad_value=PAD_ID)
