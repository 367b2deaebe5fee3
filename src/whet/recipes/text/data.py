"""Tokenized splits for training, and the metrics of two baselines: naive Bayes and the most frequent class."""

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
from whet.recipes.text.corpus import Corpus, Examples
from whet.recipes.text.evaluation import Scores
from whet.recipes.text.ngrams import NgramVocabulary
from whet.recipes.text.tokenizer import PAD_ID, PretrainedTokenizer, Tokenizer

AnyTokenizer = Tokenizer | NgramVocabulary | PretrainedTokenizer
_WORD = re.compile(r"\w+")


class SplitColumns(TypedDict):
    tokens: Ragged
    """int64 token ids."""
    label: Tensor
    """int64 (rows); for multi-label data float32 (rows, classes), 1 for each class of a text."""
    weight: NotRequired[Tensor]
    """float32, the shape of `label`: the weight of each label in the loss. Absent without class weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """Three splits as tensors, and the data needed to interpret a prediction."""

    train: SplitColumns
    val: SplitColumns
    test: SplitColumns
    classes: tuple[str, ...]
    tokenizer: AnyTokenizer
    max_length: int
    """Texts are truncated to this many tokens."""
    fingerprint: str
    """The fingerprint of the corpus. The same texts, labels and splits have the same fingerprint."""
    mean_length: float
    """The mean number of tokens of a training text."""
    has_pairs: bool
    """Whether a sample is a pair of texts."""
    baselines: dict[str, dict[str, float]]
    """The test metrics of trivial classifiers by name; empty for multi-label data."""
    is_uneven: bool = False
    """Whether a class has less than half the training rows of an even distribution."""
    notes: tuple[str, ...] = ()
    """How the data was interpreted, and its defects. Shown before training starts."""

    @property
    def class_counts(self) -> list[int]:
        """The number of training texts of each class."""
        label = self.train["label"]
        counts = label.sum(0) if self.is_multi_label else torch.bincount(label, minlength=len(self.classes))
        return [int(count) for count in counts]

    @property
    def is_multi_label(self) -> bool:
        """Whether a text may have several classes, or none."""
        return self.train["label"].dim() == 2


def tokenize(
    corpus: Corpus,
    *,
    tokenizer: AnyTokenizer,
    max_length: int,
    class_weights: Sequence[float] | None = None,
) -> TextData:
    """Convert a corpus to tensors."""
    train, val, test = (
        SplitColumns(
            tokens=token_column(part.texts, tokenizer=tokenizer, max_length=max_length, pairs=part.pairs),
            label=label_column(part, num_classes=len(corpus.classes)),
        )
        for part in (corpus.train, corpus.val, corpus.test)
    )
    if class_weights is not None:
        # Weight only the training loss, so that metrics stay comparable with and without weights.
        weight = weight_column(train["label"], class_weights)
        # The linear classifier divides by the number of texts (evaluation.py), so its weights need a mean of 1.
        train["weight"] = weight / weight.mean() if isinstance(tokenizer, NgramVocabulary) else weight
    return TextData(
        train=train,
        val=val,
        test=test,
        classes=corpus.classes,
        tokenizer=tokenizer,
        max_length=max_length,
        fingerprint=corpus.fingerprint,
        has_pairs=corpus.has_pairs,
        baselines={} if corpus.is_multi_label else baseline_metrics(corpus),
        mean_length=float(train["tokens"].lengths.double().mean()),
    )


def truncation_notes(data: TextData) -> list[str]:
    """Return a note with the number of training texts that reach or exceed the maximum length."""
    lengths = data.train["tokens"].lengths
    num_full = int((lengths >= data.max_length).sum())
    if not num_full:
        return []
    count = f"{num_full:,} of {len(lengths):,} training texts have {data.max_length} tokens or more"
    return [f"{count} and are truncated (arch.max_length)"]


def label_column(part: Examples, *, num_classes: int) -> Tensor:
    """Return class indices; for multi-label data, a row of zeros and ones for each text."""
    if not part.label_sets:
        return torch.tensor(part.labels)
    table = torch.zeros(len(part), num_classes)
    for row, labels in enumerate(part.label_sets):
        table[row, list(labels)] = 1.0
    return table


def weight_column(label: Tensor, class_weights: Sequence[float]) -> Tensor:
    """Return the weight of each label. In multi-label data, classes that a text does not have get weight 1."""
    weights = torch.tensor(class_weights, dtype=torch.float32)
    return weights[label] if label.dim() == 1 else 1 + label * (weights - 1)


def token_column(
    texts: Sequence[str], *, tokenizer: AnyTokenizer, max_length: int, pairs: Sequence[str] = ()
) -> Ragged:
    """Encode texts, or pairs of texts if `pairs` is given."""
    ids = (
        tokenizer.encode_pairs(texts, pairs, max_length=max_length)
        if pairs
        else tokenizer.encode(texts, max_length=max_length)
    )
    return Ragged.of([torch.tensor(row) for row in ids], pad_value=PAD_ID)


# --- trivial baselines ------------------------------------------------------------------------------------------------


def baseline_metrics(corpus: Corpus) -> dict[str, dict[str, float]]:
    """Return the test metrics of naive Bayes, and of always predicting the most frequent class."""
    frequent = Counter(corpus.train.labels).most_common(1)[0][0]
    predictions = {"naive Bayes": _naive_bayes(corpus), "most frequent class": [frequent] * len(corpus.test)}
    result = {}
    for name, predicted in predictions.items():
        scores = Scores(len(corpus.classes), is_multi_label=False)
        scores.add(np.eye(len(corpus.classes))[predicted], corpus.test.labels)
        metrics = scores.metrics()
        result[name] = {metric: float(metrics[metric]) for metric in ("accuracy", "macro_f1", "micro_f1")}
    return result


def _naive_bayes(corpus: Corpus) -> list[int]:
    """Return the test predictions of multinomial naive Bayes on the word counts of the training texts."""
    num_classes = len(corpus.classes)
    vocabulary: dict[str, int] = {}
    for text in _full_texts(corpus.train):
        for word in _words(text):
            vocabulary.setdefault(word, len(vocabulary))
    # Add-one smoothing: a word that never occurs in a class must not exclude the class.
    counts = np.ones((len(vocabulary), num_classes))
    for text, label in zip(_full_texts(corpus.train), corpus.train.labels, strict=True):
        for word in _words(text):
            counts[vocabulary[word], label] += 1
    log_likelihood = np.log(counts / counts.sum(0))
    frequency = Counter(corpus.train.labels)
    # A class without training rows gets probability 0.
    log_prior = np.array(
        [math.log(frequency[label]) if frequency[label] else -math.inf for label in range(num_classes)]
    )
    predicted = []
    for text in _full_texts(corpus.test):
        known = [vocabulary[word] for word in _words(text) if word in vocabulary]
        predicted.append(int(np.argmax(log_prior + log_likelihood[known].sum(0))))
    return predicted


def _full_texts(examples: Examples) -> list[str]:
    """Return each text joined with the second text of its pair."""
    pairs = examples.pairs or ("",) * len(examples)
    return [f"{text} {pair}" for text, pair in zip(examples.texts, pairs, strict=True)]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
