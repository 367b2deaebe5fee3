"""The linear classifier of word and character n-grams, weighted by TF-IDF.

A token encodes a distinct n-gram of a text together with its count: id * MAX_COUNT + count - 1.

Shapes: B texts, L n-grams of the longest text, F n-grams of the vocabulary, C classes.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.base.errors import WhetError
from whet.data.batch import Packed, Padded
from whet.recipes.text.attention import token_layout

MAX_NGRAMS = 2**18
"""The maximum vocabulary size, half of it for words, half for characters. The n-grams in the most texts are kept."""
MAX_COUNT = 32
"""The maximum count of an n-gram in a text. Weights grow only with the logarithm of the count."""
_MIN_TEXTS = 2
"""The minimum number of training texts with an n-gram. With rarer ones, the model would memorize single texts."""
_CHARACTERS = range(2, 6)
"""The lengths of character n-grams."""
_WORD = re.compile(r"\w+|[^\w\s]")


class NgramVocabulary:
    """The n-grams of the training texts: words, pairs of words and character n-grams. Id 0 is padding."""

    def __init__(self, words: Sequence[str], characters: Sequence[str], frequencies: Sequence[int], num_texts: int):
        self._words = {ngram: index for index, ngram in enumerate(words, start=1)}
        self._characters = {ngram: index for index, ngram in enumerate(characters, start=len(words) + 1)}
        self._names = ("", *words)
        self._frequencies = frequencies
        self._num_texts = num_texts

    @classmethod
    def train(cls, texts: Iterable[str]) -> "NgramVocabulary":
        """Collect the n-grams that occur in two texts or more. The result depends only on the texts."""
        words: Counter[str] = Counter()
        characters: Counter[str] = Counter()
        num_texts = 0
        for text in texts:
            words.update(word_ngrams(text).keys())
            characters.update(character_ngrams(text).keys())
            num_texts += 1
        kept = [
            [(ngram, count) for ngram, count in counts.most_common(MAX_NGRAMS // 2) if count >= _MIN_TEXTS]
            for counts in (words, characters)
        ]
        frequencies = [count for _, count in chain(*kept)]
        return cls([ngram for ngram, _ in kept[0]], [ngram for ngram, _ in kept[1]], frequencies, num_texts)

    @classmethod
    def from_json(cls, text: str) -> "NgramVocabulary":
        """Load a vocabulary written by `to_json`."""
        try:
            saved = json.loads(text)
            return cls(saved["words"], saved["characters"], saved["frequencies"], saved["num_texts"])
        except (ValueError, KeyError, TypeError) as error:
            raise WhetError(
                "cannot read a saved vocabulary", got=str(error)[:200], try_="the run's own file, unchanged"
            ) from None

    def to_json(self) -> str:
        """Serialize the vocabulary for the run folder."""
        saved = {"words": list(self._words), "characters": list(self._characters)}
        return json.dumps({**saved, "frequencies": list(self._frequencies), "num_texts": self._num_texts})

    @property
    def vocab_size(self) -> int:
        """The number of n-grams, including padding."""
        return len(self._words) + len(self._characters) + 1

    @property
    def num_words(self) -> int:
        """The number of word n-grams. Their ids come first."""
        return len(self._words)

    def weights(self) -> list[float]:
        """Return the inverse document frequency of each n-gram, 0 for padding."""
        return [0.0, *(1 + math.log((1 + self._num_texts) / (1 + count)) for count in self._frequencies)]

    def encode(self, texts: Sequence[str], *, max_length: int) -> list[list[int]]:
        """Encode the distinct known n-grams of each text, words first. A text without any becomes a padding token."""
        return [self._tokens(text)[:max_length] or [0] for text in texts]

    def encode_pairs(self, texts: Sequence[str], pairs: Sequence[str], *, max_length: int) -> list[list[int]]:
        """Encode each pair of texts as one text of two lines."""
        return self.encode([f"{one}\n{two}" for one, two in zip(texts, pairs, strict=True)], max_length=max_length)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the known words of a text in the order of their first occurrence."""
        ids = (token // MAX_COUNT for token in tokens)
        return " ".join(name for index in ids if index < len(self._names) and " " not in (name := self._names[index]))

    def _tokens(self, text: str) -> list[int]:
        return [
            known[ngram] * MAX_COUNT + min(count, MAX_COUNT) - 1
            for known, counts in ((self._words, word_ngrams(text)), (self._characters, character_ngrams(text)))
            for ngram, count in counts.items()
            if ngram in known
        ]


def word_ngrams(text: str) -> Counter[str]:
    """Count the words and the pairs of adjacent words in a text.

    >>> dict(word_ngrams("To be, to"))
    {'to': 2, 'be': 1, ',': 1, 'to be': 1, 'be ,': 1, ', to': 1}
    """
    words = _WORD.findall(text.lower())
    return Counter([*words, *(f"{one} {two}" for one, two in pairwise(words))])


def character_ngrams(text: str) -> Counter[str]:
    """Count the character n-grams of length two to five within words. Each word has a space before and after it.

    >>> dict(character_ngrams("to to"))
    {' t': 2, 'to': 2, 'o ': 2, ' to': 2, 'to ': 2, ' to ': 2}
    """
    pieces: Counter[str] = Counter()
    for word, count in Counter(text.lower().split()).items():
        padded = f" {word} "
        for size in _CHARACTERS:
            for start in range(len(padded) - size + 1):
                pieces[padded[start : start + size]] += count
    return pieces


class NgramClassifier(nn.Module):
    """A linear classifier of TF-IDF weights. Weights of word and of character n-grams have unit norm separately."""

    averages_over_texts = True
    """Divide the loss of a batch by the number of texts, not by the sum of their weights (evaluation.py)."""
    idf: Tensor
    scale: Tensor

    def __init__(self, vocabulary: NgramVocabulary, *, strengths: Sequence[float]) -> None:
        """Initialize all weights to zero. `strengths` contains the C of each class (config.py)."""
        super().__init__()
        self.num_words = vocabulary.num_words
        self.weight = nn.Parameter(torch.zeros(vocabulary.vocab_size, len(strengths)))
        self.bias = nn.Parameter(torch.zeros(len(strengths)))
        self.register_buffer("idf", torch.tensor(vocabulary.weights()))
        # Scaling the logits by s multiplies the effective learning rate by s^2 and the effective weight decay by
        # 1 / s^2. Their product is the same for all classes, so SGD converges equally fast for any C.
        self.register_buffer("scale", torch.tensor(strengths).sqrt())

    def forward(self, tokens: Padded | Packed) -> Tensor:
        """Return the class logits, (B, C), for a batch of encoded n-grams."""
        if isinstance(tokens, Packed) and tokens.values.is_cpu:
            return self._classify_packed(tokens)
        layout = token_layout(tokens)
        padded = layout.to_padded(tokens.values) * layout.is_real
        ids, counts = padded // MAX_COUNT, padded % MAX_COUNT + 1
        weights = self.idf[ids] * (1 + counts.log())
        is_word = ids <= self.num_words
        squares = weights.square()
        words, characters = ((squares * of_kind).sum(1, keepdim=True) for of_kind in (is_word, ~is_word))
        # The clamp keeps the gradient finite for a text without any known n-gram.
        weights = weights / torch.where(is_word, words, characters).sqrt().clamp(min=1e-12)
        logits = (functional.embedding(ids, self.weight) * weights[..., None]).sum(1)
        return logits[: layout.num_texts] * self.scale + self.bias

    def _classify_packed(self, tokens: Packed) -> Tensor:
        """Return the logits without padding. The sum over n-grams takes one kernel and no memory for their weights."""
        starts, num_bags = tokens.starts.long(), len(tokens.starts) - 1
        ids, counts = tokens.values // MAX_COUNT, tokens.values % MAX_COUNT + 1
        weights = self.idf[ids] * (1 + counts.log())
        owners = torch.repeat_interleave(torch.arange(num_bags), starts.diff(), output_size=len(ids))
        # Word and character n-grams of each text have their own norm.
        groups = 2 * owners + (ids <= self.num_words)
        squares = weights.new_zeros(2 * num_bags).index_add(0, groups, weights.square())
        weights = weights / squares.sqrt().clamp(min=1e-12)[groups]
        logits = functional.embedding_bag(ids, self.weight, starts[:-1], mode="sum", per_sample_weights=weights)
        return logits[: tokens.num_samples] * self.scale + self.bias
