"""What does the trainer get to see? A corpus as columns of token ids and class numbers, one set per split."""

from dataclasses import dataclass

import torch
from torch import Tensor

from whet.data.ragged import Ragged
from whet.recipes.text.config import Arch
from whet.recipes.text.corpus import Corpus, Examples
from whet.recipes.text.tokenizer import PAD_ID, Tokenizer

Columns = dict[str, Ragged | Tensor]
"""`tokens` (Ragged, int64) and `label` (int64), row by row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """Three splits as tensors, and what is needed to read a prediction."""

    train: Columns
    dev: Columns
    test: Columns
    classes: tuple[str, ...]
    fingerprint: str
    """Of the corpus: the same texts, labels and split have the same one."""
    mean_length: float
    """Tokens of a training text, on average."""


def learn_tokenizer(corpus: Corpus, *, arch: Arch) -> Tokenizer:
    """The tokenizer of a run, learned from the training texts alone."""
    return Tokenizer.train(corpus.train.texts, vocab_size=arch.vocab_size)


def tokenize(corpus: Corpus, *, tokenizer: Tokenizer, max_length: int) -> TextData:
    """The corpus as columns."""
    train, dev, test = (
        _columns(part, tokenizer=tokenizer, max_length=max_length) for part in (corpus.train, corpus.dev, corpus.test)
    )
    return TextData(
        train=train,
        dev=dev,
        test=test,
        classes=corpus.classes,
        fingerprint=corpus.fingerprint,
        mean_length=len(train["tokens"].values) / len(corpus.train),
    )


def token_column(texts: tuple[str, ...], *, tokenizer: Tokenizer, max_length: int) -> Ragged:
    """Texts alone, for a prediction."""
    ids = tokenizer.encode(texts, max_length=max_length)
    return Ragged.of([torch.tensor(row) for row in ids], pad_value=PAD_ID)


def _columns(examples: Examples, *, tokenizer: Tokenizer, max_length: int) -> Columns:
    tokens = token_column(examples.texts, tokenizer=tokenizer, max_length=max_length)
    return {"tokens": tokens, "label": torch.tensor(examples.labels)}
