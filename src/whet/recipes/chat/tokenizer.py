"""The tokenizer of a chat model: byte pairs plus marks for turns."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers

from whet.base.errors import UsageError, WhetError
from whet.recipes.chat.conversation import ROLES, Role
from whet.recipes.hub import explain_hub_error
from whet.run.disk import read_regular_file

MARKS = ("<|pad|>", "<|end|>", *(f"<|{role}|>" for role in ROLES))
"""Padding, the end of a turn, and the start of a turn of each role; their ids follow the vocabulary in this order."""

MOST_IDS = 2**24
"""Of a vocabulary: the library takes minutes to write one with an id of billions."""


class ChatTokenizer:
    """Texts to ids and back; every id of a text is below `pad_id`, the first of the marks."""

    def __init__(self, engine: Engine) -> None:
        # "<|user|>" or "<|endoftext|>" in a text is text, whatever the vocabulary knows it as.
        engine.encode_special_tokens = True
        engine.no_truncation()
        engine.no_padding()
        self._engine = engine
        self.pad_id = max(engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.pad_id > MOST_IDS:
            raise ValueError(f"ids up to {self.pad_id - 1:,}, which no table of tokens has room for")
        self.end_id = self.pad_id + 1
        self.role_ids: dict[Role, int] = {role: self.pad_id + 2 + place for place, role in enumerate(ROLES)}
        self.vocab_size = self.pad_id + len(MARKS)
        """How many ids there are, marks included."""

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> "ChatTokenizer":
        """A byte-level vocabulary of at most `vocab_size` ids with the marks; the same texts give the same one."""
        engine = Engine(models.BPE())
        # No normalizer: what goes in comes out, sign by sign.
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
        """The tokenizer that `to_json` wrote, or any tokenizer.json of the tokenizers library."""
        try:
            return cls(Engine.from_str(text if isinstance(text, str) else text.decode()))
        except Exception as error:  # The library raises bare Exception.
            raise WhetError(
                "a tokenizer cannot be read", got=str(error)[:200], try_="a tokenizer.json, unchanged"
            ) from None

    def to_json(self) -> str:
        """Everything, as JSON: it can live in a run folder."""
        return self._engine.to_str()

    def encode(self, text: str) -> list[int]:
        """The ids of a text; never a mark."""
        try:
            return self._engine.encode(text, add_special_tokens=False).ids
        except Exception as error:
            raise _refused(error) from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores. A process with threads must not be forked: not where workers are."""
        try:
            return [found.ids for found in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)]
        except Exception as error:
            raise _refused(error) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text behind ids; marks are left out."""
        return self._engine.decode([number for number in ids if number < self.pad_id], skip_special_tokens=False)

    def spell(self, ids: Sequence[int]) -> str:
        """The same with marks shown, for a person to look at."""
        pieces: list[str] = []
        start = 0
        for place, number in enumerate(ids):
            if number >= self.pad_id:
                pieces += [self.decode(ids[start:place]), MARKS[number - self.pad_id]]
                start = place + 1
        return "".join((*pieces, self.decode(ids[start:])))

    def stream(self) -> "TextStream":
        """The text of ids that come one by one."""
        return TextStream(self._engine, first_mark=self.pad_id)


class TextStream:
    """Ids in, text out as soon as it is sure: a sign may be made of several tokens."""

    def __init__(self, engine: Engine, *, first_mark: int) -> None:
        self._engine = engine
        self._first_mark = first_mark
        self._stream = decoders.DecodeStream(skip_special_tokens=False)

    def push(self, number: int) -> str:
        """What is new with this id; nothing for a mark, or while a sign is incomplete."""
        return "" if number >= self._first_mark else self._stream.step(self._engine, number) or ""


def _refused(error: Exception) -> WhetError:
    """The library raises bare Exception, for a vocabulary that lacks the word for what it does not know, above all."""
    return WhetError("the tokenizer cannot write a text", got=str(error)[:200], try_="another --tokenizer")


BYTE_PAIRS = "bpe"
"""The word for a byte-level vocabulary learned from the training conversations."""

_FILE = "tokenizer.json"


def find_tokenizer(word: str) -> ChatTokenizer:
    """The tokenizer that a word names; the hub's cache is asked before the hub."""
    path = Path(word).expanduser()
    if path.is_dir():
        path = path / _FILE
        if not path.is_file():
            raise UsageError(f"no tokenizer in {word}", got=f"no {_FILE}", try_="a folder with a fast tokenizer")
    if not path.is_file():
        # A dot alone says nothing: many names on the hub have one (Qwen2.5).
        if path.suffix == ".json" or word.startswith((".", "/", "~")):
            raise UsageError("no such tokenizer", got=word, try_=f"{BYTE_PAIRS}, a {_FILE}, or a name on the hub")
        path = _from_hub(word)
    return ChatTokenizer.from_json(read_regular_file(path, follows_links=True))


def _from_hub(word: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    name, _, revision = word.partition("@")
    reason = Exception()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # Without a network it would tell of each of six tries.
    try:
        for is_local in (True, False):
            try:
                return Path(hf_hub_download(name, _FILE, revision=revision or None, local_files_only=is_local))
            except Exception as error:  # Many kinds: no network, no such name, no leave to read it.
                reason = error
    finally:
        logging.set_verbosity(verbosity)
    what, detail = explain_hub_error(reason)
    raise WhetError(
        f"no file or folder {name} is here, and {what}",
        got=f"{word}, looked up on the hub since it may be a name there: {detail}",
        try_=f"--tokenizer {BYTE_PAIRS}, learned from the data; or a {_FILE}",
    )
