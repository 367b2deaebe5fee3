"""What does the trainer get to see? A corpus as columns of token ids and class numbers, one set per split."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from whet.data.ragged import Ragged
from whet.recipes.text.config import Arch
from whet.recipes.text.corpus import Corpus
from whet.recipes.text.naive_bayes import baseline_accuracy
from whet.recipes.text.tokenizer import PAD_ID, Tokenizer


class Columns(TypedDict):
    """A split: int64 token ids and the number of each text's class."""

    tokens: Ragged
    label: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """Three splits as tensors, and what is needed to read a prediction."""

    train: Columns
    dev: Columns
    test: Columns
    classes: tuple[str, ...]
    tokenizer: Tokenizer
    fingerprint: str
    """Of the corpus: the same texts, labels and split have the same one."""
    mean_length: float
    """Tokens of a training text, on average."""
    baseline: float
    """The share of the test texts that word counts alone get right."""


def learn_tokenizer(corpus: Corpus, *, arch: Arch) -> Tokenizer:
    """The tokenizer of a run, learned from the training texts alone."""
    return Tokenizer.train(corpus.train.texts, vocab_size=arch.vocab_size)


def tokenize(corpus: Corpus, *, tokenizer: Tokenizer, max_length: int) -> TextData:
    """The corpus as columns."""
    splits = (corpus.train, corpus.dev, corpus.test)
    tokens = [token_column(part.texts, tokenizer=tokenizer, max_length=max_length) for part in splits]
    train, dev, test = (
        Columns(tokens=column, label=torch.tensor(part.labels)) for column, part in zip(tokens, splits, strict=True)
    )
    return TextData(
        train=train,
        dev=dev,
        test=test,
        classes=corpus.classes,
        tokenizer=tokenizer,
        fingerprint=corpus.fingerprint,
        baseline=baseline_accuracy(corpus),
        mean_length=float(tokens[0].lengths.double().mean()),
    )


def token_column(texts: Sequence[str], *, tokenizer: Tokenizer, max_length: int) -> Ragged:
    """Texts alone, for a prediction."""
    ids = tokenizer.encode(texts, max_length=max_length)
    return Ragged.of([torch.tensor(row) for row in ids], pad_value=PAD_ID)
