"""Tokenizer of a chat model: byte-level BPE, or an existing tokenizer, with special tokens for turns."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers

from whet.base.errors import UsageError, WhetError
from whet.recipes.chat.conversation import ROLES, Role
from whet.recipes.hub import explain_hub_error
from whet.run.disk import read_regular_file

MARKS = ("<|pad|>", "<|end|>", *(f"<|{role}|>" for role in ROLES))
"""The special tokens: padding, the end of a turn, and the start of a turn of each role.

Their ids follow the vocabulary in this order.
"""

MAX_IDS = 2**24
"""Maximum vocabulary size. The tokenizers library takes minutes to serialize ids in the billions."""


class ChatTokenizer:
    """Encodes and decodes text. The ids of text are below `pad_id`, the id of the first special token."""

    def __init__(self, engine: Engine) -> None:
        # Encode "<|user|>" or "<|endoftext|>" in a text as plain text, never as a special token.
        engine.encode_special_tokens = True
        engine.no_truncation()
        engine.no_padding()
        self._engine = engine
        self.pad_id = max(engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.pad_id > MAX_IDS:
            raise ValueError(f"ids up to {self.pad_id - 1:,}, which no embedding table can hold")
        self.end_id = self.pad_id + 1
        self.role_ids: dict[Role, int] = {role: self.pad_id + 2 + place for place, role in enumerate(ROLES)}
        self.vocab_size = self.pad_id + len(MARKS)
        """Number of ids, including special tokens."""

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> "ChatTokenizer":
        """Train a byte-level BPE vocabulary of at most `vocab_size` ids, including special tokens. Deterministic."""
        engine = Engine(models.BPE())
        # Use no normalizer, so that decoding returns exactly the encoded text.
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.ByteLevel()
        engine.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=vocab_size - len(MARKS),
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        return cls(engine)

    @classmethod
    def from_json(cls, text: str | bytes) -> "ChatTokenizer":
        """Load a tokenizer written by `to_json`, or any tokenizer.json of the tokenizers library."""
        try:
            return cls(Engine.from_str(text if isinstance(text, str) else text.decode()))
        except Exception as error:  # The tokenizers library raises a bare Exception.
            raise WhetError(
                "the tokenizer cannot be read", got=str(error)[:200], try_="a tokenizer.json, unchanged"
            ) from None

    def to_json(self) -> str:
        return self._engine.to_str()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, which never include special tokens."""
        try:
            return self._engine.encode(text, add_special_tokens=False).ids
        except Exception as error:
            raise _encoding_error(error) from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, using all cores. This starts threads, so do not call it before a fork."""
        try:
            return [encoding.ids for encoding in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)]
        except Exception as error:
            raise _encoding_error(error) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, without special tokens."""
        return self._engine.decode([token for token in ids if token < self.pad_id], skip_special_tokens=False)

    def decode_with_marks(self, ids: Sequence[int]) -> str:
        """Decode ids to text for display, with special tokens."""
        parts: list[str] = []
        start = 0
        for index, token in enumerate(ids):
            if token >= self.pad_id:
                parts += [self.decode(ids[start:index]), MARKS[token - self.pad_id]]
                start = index + 1
        return "".join((*parts, self.decode(ids[start:])))

    def stream(self) -> "TextStream":
        """Create a decoder for ids that arrive one by one."""
        return TextStream(self._engine, first_mark=self.pad_id)


class TextStream:
    """Decodes ids one by one. Text is returned once its characters are complete."""

    def __init__(self, engine: Engine, *, first_mark: int) -> None:
        self._engine = engine
        self._first_mark = first_mark
        self._stream = decoders.DecodeStream(skip_special_tokens=False)

    def push(self, token: int) -> str:
        """Add an id and return the new text, which is empty for a special token or while a character is incomplete."""
        return "" if token >= self._first_mark else self._stream.step(self._engine, token) or ""


def _encoding_error(error: Exception) -> WhetError:
    # The tokenizers library raises a bare Exception, usually because the vocabulary has no token for unknown text.
    return WhetError("the tokenizer cannot encode a text", got=str(error)[:200], try_="another --tokenizer")


BYTE_PAIRS = "bpe"
"""Name that selects a byte-level BPE vocabulary trained on the conversations."""

_FILE = "tokenizer.json"


def load_tokenizer(name: str) -> ChatTokenizer:
    """Load a tokenizer from a file, a folder or the Hugging Face Hub, whose local cache is tried first."""
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / _FILE
        if not path.is_file():
            raise UsageError(f"no tokenizer in {name}", got=f"no {_FILE}", try_="a folder with a fast tokenizer")
    if not path.is_file():
        # A dot alone does not indicate a file, because many names on the hub contain one (Qwen2.5).
        if path.suffix == ".json" or name.startswith((".", "/", "~")):
            raise UsageError("no such tokenizer", got=name, try_=f"{BYTE_PAIRS}, a {_FILE}, or a name on the hub")
        path = _from_hub(name)
    return ChatTokenizer.from_json(read_regular_file(path, follows_links=True))


def _from_hub(word: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    name, _, revision = word.partition("@")
    reason = Exception()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # Without a network connection, the library would log each of its six attempts.
    try:
        for is_local in (True, False):
            try:
                return Path(hf_hub_download(name, _FILE, revision=revision or None, local_files_only=is_local))
            except Exception as error:  # Many types are possible: no network, unknown name, gated repository.
                reason = error
    finally:
        logging.set_verbosity(verbosity)
    what, detail = explain_hub_error(reason)
    raise WhetError(
        f"there is no local file or folder {name}, and {what}",
        got=f"{word}, which was then looked up on the hub: {detail}",
        try_=f"--tokenizer {BYTE_PAIRS}, trained on the data; or a {_FILE}",
    )
