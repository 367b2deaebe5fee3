"""How does a text become numbers? Byte-level byte-pair encoding, learned from the training texts in about a second."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from whet.base.errors import WhetError

PAD_ID = 0
_PAD = "<pad>"


class Tokenizer:
    """Texts to token ids and back; every text can be written, since single bytes are tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.encode_special_tokens = True  # "<pad>" in a text is text, not padding.

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> "Tokenizer":
        """A tokenizer of at most `vocab_size` entries; the same texts give the same one."""
        engine = Engine(models.BPE())
        # Case rarely tells classes apart, and lower case makes one token of "Return" and "return".
        engine.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        engine.decoder = decoders.ByteLevel()
        engine.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=vocab_size,
                special_tokens=[_PAD],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        return cls(engine)

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """The tokenizer that `to_json` wrote."""
        try:
            return cls(Engine.from_str(text))
        except Exception as error:  # The library raises bare Exception.
            raise WhetError(
                "a saved tokenizer cannot be read", got=str(error)[:200], try_="the run's own file, unchanged"
            ) from error

    def to_json(self) -> str:
        """Everything, as JSON: it can live in a run folder."""
        return self._engine.to_str()

    @property
    def vocab_size(self) -> int:
        """How many entries were learned, padding included."""
        return self._engine.get_vocab_size()

    def encode(self, texts: Sequence[str], *, max_length: int) -> list[list[int]]:
        """The ids of each text, cut after `max_length`; never empty, so that there is always something to read."""
        # One by one: batches use threads, and a process with threads must not be forked.
        return [self._engine.encode(text, add_special_tokens=False).ids[:max_length] or [PAD_ID] for text in texts]

    def encode_pairs(self, texts: Sequence[str], pairs: Sequence[str], *, max_length: int) -> list[list[int]]:
        """The ids of two texts in one row, a line break between them."""
        between = self.encode(["\n"], max_length=8)[0]
        both = zip(self.encode(texts, max_length=max_length), self.encode(pairs, max_length=max_length), strict=True)
        return [_joined(first, second, between=between, max_length=max_length) for first, second in both]

    def decode(self, ids: Sequence[int]) -> str:
        """The text behind ids."""
        return self._engine.decode(list(ids))


def _joined(first: list[int], second: list[int], *, between: list[int], max_length: int) -> list[int]:
    """Two texts in one row; where they do not fit, the longer one gives way first."""
    room = max(2, max_length - len(between))
    kept_first = max(room - len(second), room // 2)
    kept_second = room - min(len(first), kept_first)
    return [*first[:kept_first], *between, *second[:kept_second]][:max_length]
