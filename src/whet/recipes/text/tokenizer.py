"""Tokenizers: byte-level BPE trained on the texts, or the tokenizer of a pretrained model.

Texts are encoded one by one: the batch methods of both libraries start threads, and a process with threads must not
fork.
"""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from whet.base.errors import UsageError, WhetError, first_line
from whet.recipes.text.backbone import import_transformers, quiet_transformers

PAD_ID = 0
_PAD = "<pad>"
SEGMENT_OFFSET = 1 << 24
"""Added to token ids of the second segment, so that one column holds ids and segments. No vocabulary is this large."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
"""The files that contain a vocabulary. A model needs one of them."""

# No path separators: a file name from a run folder must stay inside its folder.
_FILE_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


class Tokenizer:
    """Byte-level byte-pair encoding. Every text can be encoded, because single bytes are tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.encode_special_tokens = True  # "<pad>" in a text is text, not padding.

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> "Tokenizer":
        """Train a tokenizer with at most `vocab_size` entries. The result depends only on the texts."""
        engine = Engine(models.BPE())
        # Case rarely distinguishes classes. In lower case, "Return" and "return" are one token.
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
        """Load a tokenizer written by `to_json`."""
        try:
            return cls(Engine.from_str(text))
        except Exception as error:  # The tokenizers library raises bare Exception.
            raise _saved_tokenizer_error(error) from error

    def to_json(self) -> str:
        """Serialize the tokenizer for the run folder."""
        return self._engine.to_str()

    @property
    def vocab_size(self) -> int:
        """The number of entries in the vocabulary, including padding."""
        return self._engine.get_vocab_size()

    def encode(self, texts: Sequence[str], *, max_length: int) -> list[list[int]]:
        """Encode each text, truncated to `max_length`. An empty text becomes one padding token."""
        return [self._engine.encode(text, add_special_tokens=False).ids[:max_length] or [PAD_ID] for text in texts]

    def encode_pairs(self, texts: Sequence[str], pairs: Sequence[str], *, max_length: int) -> list[list[int]]:
        """Encode each pair of texts as one row with a line break between them."""
        separator = self.encode(["\n"], max_length=8)[0]
        encoded = zip(self.encode(texts, max_length=max_length), self.encode(pairs, max_length=max_length), strict=True)
        return [_join_pair(first, second, separator=separator, max_length=max_length) for first, second in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Convert ids back to text."""
        return self._engine.decode(list(ids))


class PretrainedTokenizer:
    """A transformers tokenizer, with the contents of its files for the run folder."""

    def __init__(self, engine: Any, files: dict[str, str]) -> None:
        self._engine = engine
        self.files = files

    @classmethod
    def load(cls, folder: Path) -> "PretrainedTokenizer":
        """Load the tokenizer from the folder of a model."""
        # Without these files, transformers silently creates a tokenizer with an empty vocabulary.
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise _missing_tokenizer_error(folder, "none of " + ", ".join(_TOKENIZER_FILES[:4]))
        engine = _load_transformers_tokenizer(folder)
        if not set(engine.get_vocab()) - set(engine.all_special_tokens):
            raise _missing_tokenizer_error(folder, "a vocabulary of special tokens only")
        if not engine.is_fast:
            raise UsageError(
                "the model's tokenizer has no tokenizer.json", got=str(folder), try_="a model with a fast tokenizer"
            )
        with tempfile.TemporaryDirectory() as scratch:
            # Let transformers save the tokenizer: the set of files depends on the tokenizer class.
            engine.save_pretrained(scratch)
            files = {
                file.name: _without_source_path(file) for file in sorted(Path(scratch).iterdir()) if file.is_file()
            }
        return cls(engine, files)

    @classmethod
    def from_json(cls, text: str) -> "PretrainedTokenizer":
        """Load a tokenizer written by `to_json`."""
        try:
            files = {str(name): str(content) for name, content in json.loads(text)["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _saved_tokenizer_error(error) from None
        with tempfile.TemporaryDirectory() as scratch:
            write_files(files, Path(scratch))
            return cls(_load_transformers_tokenizer(Path(scratch)), files)

    def to_json(self) -> str:
        """Serialize the tokenizer for the run folder."""
        return json.dumps({"files": self.files})

    @property
    def vocab_size(self) -> int:
        """The number of entries in the vocabulary, including special tokens."""
        return len(self._engine)

    @property
    def max_id(self) -> int:
        """The highest token id. The embedding of the model must have a row for it."""
        return int(max(self._engine.get_vocab().values()))

    @property
    def max_length(self) -> int:
        """The maximum number of tokens declared by the tokenizer, at most 10^6."""
        return int(min(self._engine.model_max_length, 10**6))

    def encode(self, texts: Sequence[str], *, max_length: int) -> list[list[int]]:
        """Encode each text with the model's special tokens, truncated to `max_length`."""
        return [self._ids(text, None, max_length=max_length) for text in texts]

    def encode_pairs(self, texts: Sequence[str], pairs: Sequence[str], *, max_length: int) -> list[list[int]]:
        """Encode each pair of texts in the model's format. The longer text is truncated first."""
        return [self._ids(text, pair, max_length=max_length) for text, pair in zip(texts, pairs, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """Convert ids back to text, without special tokens."""
        return str(self._engine.decode([token % SEGMENT_OFFSET for token in ids], skip_special_tokens=True))

    def _ids(self, text: str, pair: str | None, *, max_length: int) -> list[int]:
        encoded = self._engine(
            text, pair, truncation=True, max_length=max_length, return_token_type_ids=pair is not None
        )
        ids: list[int] = encoded["input_ids"]
        if pair is not None and encoded.get("token_type_ids"):
            ids = [
                token + SEGMENT_OFFSET * segment for token, segment in zip(ids, encoded["token_type_ids"], strict=True)
            ]
        return ids or [0]


def write_files(files: dict[str, str], folder: Path) -> None:
    """Write the files of a tokenizer. Names come from a run folder, so reject any that point outside `folder`."""
    for name, content in files.items():
        if not name or not set(name) <= _FILE_NAME_CHARACTERS or name.startswith("."):
            raise WhetError("a saved tokenizer has an invalid file name", got=name[:100], try_="another run")
        (folder / name).write_text(content, encoding="utf-8")


def _join_pair(first: list[int], second: list[int], *, separator: list[int], max_length: int) -> list[int]:
    """Join two encoded texts. If they do not fit, the longer one is truncated first."""
    max_ids = max(2, max_length - len(separator))
    # The first text gets at least half of the space, or all that the second text does not need.
    kept_first = max(max_ids - len(second), max_ids // 2)
    kept_second = max_ids - min(len(first), kept_first)
    return [*first[:kept_first], *separator, *second[:kept_second]][:max_length]


def _load_transformers_tokenizer(folder: Path) -> Any:
    with quiet_transformers():
        try:
            return import_transformers().AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # tokenizers raises bare Exception, too.
            raise WhetError(
                "cannot read the model's tokenizer",
                got=f"{folder}: {first_line(error, limit=160)}",
                try_="a folder with tokenizer.json and tokenizer_config.json",
            ) from None


def _missing_tokenizer_error(folder: Path, got: str) -> UsageError:
    return UsageError(
        "the model's folder has no tokenizer",
        got=f"{folder}: {got}",
        try_="copy tokenizer.json and tokenizer_config.json of the model into it (tokenizer.save_pretrained)",
    )


def _without_source_path(file: Path) -> str:
    """Return the content of a tokenizer file without the path it was loaded from, which must not affect a run."""
    text = file.read_text(encoding="utf-8")
    if file.name != "tokenizer_config.json":
        return text
    settings = json.loads(text)
    settings.pop("name_or_path", None)
    return json.dumps(settings, indent=2, sort_keys=True)


def _saved_tokenizer_error(error: Exception) -> WhetError:
    return WhetError("cannot read a saved tokenizer", got=str(error)[:200], try_="the run's own file, unchanged")
