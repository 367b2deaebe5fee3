"""Tokenizers: byte-level BPE trained on the texts, or the tokenizer of a pretrained model."""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from whet.base.errors import UsageError, WhetError
from whet.recipes.text.backbone import import_transformers, quiet_transformers

SEGMENT_OFFSET = 1 << 24
"""A token of the second segment has its id plus this: so one column says both, and no vocabulary is that large."""

_FILE_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


class PretrainedTokenizer:
    """A tokenizer of transformers, with its files as text: they can live in a run folder."""

    def __init__(self, engine: Any, files: dict[str, str]) -> None:
        self._engine = engine
        self.files = files

    @classmethod
    def load(cls, folder: Path) -> "PretrainedTokenizer":
        """The tokenizer that lies in a model's folder."""
        engine = _open(folder)
        if not engine.is_fast:
            raise UsageError(
                "the model's tokenizer has no tokenizer.json", got=str(folder), try_="a model with a fast tokenizer"
            )
        with tempfile.TemporaryDirectory() as scratch:
            engine.save_pretrained(scratch)
            # Its old place is nobody's business, and a run must not depend on it.
            files = {
                file.name: _without_source_path(file) for file in sorted(Path(scratch).iterdir()) if file.is_file()
            }
        return cls(engine, files)

    @classmethod
    def from_json(cls, text: str) -> "PretrainedTokenizer":
        """The tokenizer that `to_json` wrote."""
        try:
            files = {str(name): str(written) for name, written in json.loads(text)["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WhetError(
                "a saved tokenizer cannot be read", got=str(error)[:200], try_="the run's own file, unchanged"
            ) from None
        with tempfile.TemporaryDirectory() as scratch:
            write_files(files, Path(scratch))
            return cls(_open(Path(scratch)), files)

    def to_json(self) -> str:
        """Everything, as JSON: it can live in a run folder."""
        return json.dumps({"files": self.files})

    @property
    def vocab_size(self) -> int:
        """How many entries it knows, special ones included."""
        return len(self._engine)

    @property
    def max_length(self) -> int:
        """The most tokens that its model takes, as far as it says."""
        return int(min(self._engine.model_max_length, 10**6))

    def encode(self, texts: Sequence[str], *, max_length: int) -> list[list[int]]:
        """The ids of each text with the model's special tokens, cut after `max_length`."""
        # One by one: batches use threads, and a process with threads must not be forked.
        return [self._ids(text, None, max_length=max_length) for text in texts]

    def encode_pairs(self, texts: Sequence[str], pairs: Sequence[str], *, max_length: int) -> list[list[int]]:
        """The ids of two texts in one row, as the model wants them; the longer one gives way first."""
        return [self._ids(text, pair, max_length=max_length) for text, pair in zip(texts, pairs, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text behind ids, without special tokens."""
        return str(self._engine.decode([number % SEGMENT_OFFSET for number in ids], skip_special_tokens=True))

    def _ids(self, text: str, pair: str | None, *, max_length: int) -> list[int]:
        found = self._engine(text, pair, truncation=True, max_length=max_length, return_token_type_ids=pair is not None)
        ids: list[int] = found["input_ids"]
        if pair is not None and found.get("token_type_ids"):
            ids = [
                number + SEGMENT_OFFSET * segment for number, segment in zip(ids, found["token_type_ids"], strict=True)
            ]
        return ids or [0]


def write_files(files: dict[str, str], folder: Path) -> None:
    """Writes a tokenizer's files; names come from a run folder, so none may lead out of `folder`."""
    for name, written in files.items():
        if not name or not set(name) <= _FILE_NAME_CHARACTERS or name.startswith("."):
            raise WhetError("a saved tokenizer has a file of a strange name", got=name[:100], try_="another run")
        (folder / name).write_text(written, encoding="utf-8")


def _open(folder: Path) -> Any:
    with quiet_transformers():
        try:
            return import_transformers().AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # Bare exceptions of the engine, OSError, ValueError, missing libraries.
            raise WhetError(
                "the model's tokenizer cannot be read",
                got=f"{folder}: {str(error).strip().splitlines()[0][:160]}",
                try_="a folder with tokenizer.json and tokenizer_config.json",
            ) from None


def _without_source_path(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.name != "tokenizer_config.json":
        return text
    settings = json.loads(text)
    settings.pop("name_or_path", None)
    return json.dumps(settings, indent=2, sort_keys=True)


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
        return [_join_pair(first, second, between=between, max_length=max_length) for first, second in both]

    def decode(self, ids: Sequence[int]) -> str:
        """The text behind ids."""
        return self._engine.decode(list(ids))


def _join_pair(first: list[int], second: list[int], *, between: list[int], max_length: int) -> list[int]:
    """Two texts in one row; where they do not fit, the longer one gives way first."""
    room = max(2, max_length - len(between))
    kept_first = max(room - len(second), room // 2)
    kept_second = room - min(len(first), kept_first)
    return [*first[:kept_first], *between, *second[:kept_second]][:max_length]
