"""`whet data chat`: read conversations, tokenize them and write a folder to train from."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.recipes.chat.conversation import Conversation, Loss, Turn
from whet.recipes.chat.dataset import Document, SplitWriter, token_type
from whet.recipes.chat.manifest import MANIFEST, SPLITS, TOKENIZER, ChatFile, ChatManifest, SplitFacts, hash_file
from whet.recipes.chat.selection import LEFT_OUT, Selection, select_conversations
from whet.recipes.chat.sources import ConversationFile, RejectedRecord, find_files, read_conversations
from whet.recipes.chat.template import MIN_LENGTH, TEMPLATE, TurnIds, fit_conversation, loss_bytes, write
from whet.recipes.chat.tokenizer import BYTE_PAIRS, MARKS, ChatTokenizer, find_tokenizer
from whet.run import durable


class Assembled(NamedTuple):
    """What became of one conversation."""

    documents: tuple[Document, ...]
    """One, where it was short enough."""
    num_cut: int = 0
    """Documents whose texts had to be shortened."""


def assemble(
    conversations: Sequence[tuple[Turn, ...]],
    ids: Sequence[Sequence[int]],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    loss: Loss,
) -> Iterator[Assembled]:
    """The documents of each conversation; `ids` are those of all their turns in order."""
    turns = [turn for conversation in conversations for turn in conversation]
    kind = token_type(tokenizer.vocab_size)
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids)) + 2
    ends = np.cumsum(lengths)
    starts = ends - lengths
    roles = np.array([tokenizer.role_ids[turn.role] for turn in turns], dtype=kind)
    is_learned = (roles == tokenizer.role_ids["assistant"]) | (loss == "all")
    sizes = np.array([len(text) if text.isascii() else len(text.encode()) for _, text in turns], dtype=np.int64)

    tokens = np.empty(int(ends[-1]), dtype=kind)
    is_text = np.ones(len(tokens), dtype=np.bool_)
    is_text[starts] = is_text[ends - 1] = False
    tokens[starts] = roles
    tokens[ends - 1] = tokenizer.end_id
    tokens[is_text] = np.fromiter(chain.from_iterable(ids), dtype=kind, count=len(tokens) - 2 * len(ids))

    after = np.cumsum([len(conversation) for conversation in conversations])
    first = np.concatenate([[0], after[:-1]])
    mask = np.repeat(is_learned.astype(np.uint8), lengths)
    mask[starts] = loss == "all"
    mask[starts[first]] = 0
    learned_bytes = np.add.reduceat(np.where(is_learned, sizes, 0), first).tolist()
    places = zip(starts[first].tolist(), ends[after - 1].tolist(), strict=True)
    for number, (start, end) in enumerate(places):
        if end - start <= max_length:
            whole = Document(tokens[start:end].tobytes(), mask[start:end].tobytes(), learned_bytes[number])
            yield Assembled((whole,))
        else:
            inside = range(int(first[number]), int(after[number]))
            as_ids = [TurnIds(turns[place].role, ids[place], True, int(sizes[place])) for place in inside]
            yield _split_ids(as_ids, tokenizer, max_length=max_length, loss=loss)


def _split_ids(turns: Sequence[TurnIds], tokenizer: ChatTokenizer, *, max_length: int, loss: Loss) -> Assembled:
    kind = token_type(tokenizer.vocab_size)
    pieces = fit_conversation(turns, max_length=max_length)
    documents = []
    for piece in pieces:
        tokens, mask = write(piece.turns, tokenizer, loss=loss)
        size = loss_bytes(piece.turns, tokenizer, loss=loss)
        documents.append(Document(np.array(tokens, dtype=kind).tobytes(), mask, size))
    return Assembled(tuple(documents), sum(piece.is_cut for piece in pieces))


_BATCH_CHARACTERS = 1_000_000
_BATCHES_AHEAD = 2

Progress = Callable[[str, int, int | None], None]
"""Is told what is done, how many conversations are through, and of how many, if that is known."""


class PrepareOptions(FrozenModel):
    """What `whet data chat` can be asked for."""

    format: Literal["auto", "sharegpt", "alpaca", "openai", "openassistant"] = "auto"
    tokenizer: str = BYTE_PAIRS
    vocab_size: int = Field(8192, ge=512, le=2**20)
    max_length: int = Field(2048, ge=MIN_LENGTH, le=2**20)
    subsample_size: int | None = Field(None, gt=0)
    train_split: float = Field(0.95, gt=0, le=1)
    seed: int = Field(42, ge=-(2**63), lt=2**63)
    loss: Loss = "assistant"
    max_bad: int = Field(100, ge=0)


class _Batch(NamedTuple):
    """Conversations that are tokenized together."""

    parts: list[int]
    turns: list[tuple[Turn, ...]]


@dataclass(slots=True)
class _Counts:
    """What is told at the end."""

    cut_apart: int = 0
    shortened: int = 0


def prepare_data(
    path: Path, folder: Path, options: PrepareOptions, *, told: Progress, in_threads: bool = True
) -> ChatManifest:
    """Prepares the conversations of a file, or of a folder with train, dev and test files."""
    sources = find_files(path, shape=options.format)
    told(f"{', '.join(sorted({source.shape.name for source in sources}))}: reading", 0, None)
    return prepare_conversations(sources, folder, options, told=told, in_threads=in_threads)


def prepare_conversations(
    sources: Sequence[ConversationFile],
    folder: Path,
    options: PrepareOptions,
    *,
    told: Progress,
    in_threads: bool = True,
) -> ChatManifest:
    """The same for files that were found already."""
    _check_output_dir(folder)
    tokenizer = None
    if options.tokenizer != BYTE_PAIRS:
        told(f"opening the tokenizer {options.tokenizer}", 0, None)  # The hub may be asked for half a minute.
        tokenizer = find_tokenizer(options.tokenizer)
    found = select_conversations(
        sources,
        seed=options.seed,
        train_split=options.train_split,
        subsample_size=options.subsample_size,
        max_bad=options.max_bad,
        learns_vocabulary=tokenizer is None,
        told=lambda done: told("reading", done, None),
    )
    if tokenizer is None:
        told("learning a vocabulary", 0, None)
        tokenizer = ChatTokenizer.train(found.sample, vocab_size=options.vocab_size)
    made: list[ChatManifest] = []

    def fill(draft: Path) -> None:
        made.append(_fill(draft, sources, found, tokenizer, options, told=told, in_threads=in_threads))

    new_parents = durable.make_directory(folder.absolute().parent)
    try:
        durable.publish_directory(folder.absolute(), fill=fill)
    except BaseException:
        durable.remove_empty(new_parents)
        raise
    return made[0]


def _fill(
    draft: Path,
    sources: Sequence[ConversationFile],
    found: Selection,
    tokenizer: ChatTokenizer,
    options: PrepareOptions,
    *,
    told: Progress,
    in_threads: bool,
) -> ChatManifest:
    counts = _Counts()
    writers = [SplitWriter(draft, part, max_length=options.max_length) for part in SPLITS]
    conversations = [int((found.parts == number).sum()) for number in range(len(SPLITS))]
    done, total = 0, sum(conversations)
    try:
        for batch, ids in _tokenized(_batches(sources, found), tokenizer, in_threads=in_threads):
            made = assemble(batch.turns, ids, tokenizer, max_length=options.max_length, loss=options.loss)
            for part, (documents, num_cut) in zip(batch.parts, made, strict=True):
                counts.cut_apart += len(documents) > 1
                counts.shortened += num_cut
                for document in documents:
                    writers[part].add(document)
            done += len(batch.parts)
            told("tokenizing", done, total)
        closed = [writer.close(conversations=number) for writer, number in zip(writers, conversations, strict=True)]
    finally:
        for writer in writers:
            writer.abandon()
    parts = {part: facts for part, (facts, _) in zip(SPLITS, closed, strict=True)}
    files = {name: facts for _, written in closed for name, facts in written.items()}
    written = durable.write_draft(draft / TOKENIZER, data=tokenizer.to_json().encode())
    files[TOKENIZER] = ChatFile(bytes=written.size, sha256=written.sha256)
    manifest = _manifest(sources, found, tokenizer, options, counts, parts, files)
    text = json.dumps(manifest.as_json(), indent=2, ensure_ascii=True) + "\n"
    durable.write_draft(draft / MANIFEST, data=text.encode(), is_last=True)
    return manifest


def _batches(sources: Sequence[ConversationFile], found: Selection) -> Iterator[_Batch]:
    """The conversations that were taken, in the order of the files, with their parts."""
    number, size = 0, 0
    batch = _Batch([], [])
    for conversation in _reread(sources):
        if number >= found.num_found:
            raise _changed(sources)
        part = int(found.parts[number])
        number += 1
        if part == LEFT_OUT:
            continue
        batch.parts.append(part)
        batch.turns.append(conversation.turns)
        size += sum([len(turn.text) for turn in conversation.turns])
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = _Batch([], []), 0
    if number != found.num_found:
        raise _changed(sources)
    if batch.parts:
        yield batch


def _reread(sources: Sequence[ConversationFile]) -> Iterator[Conversation]:
    for source in sources:
        for found in read_conversations(source):
            if not isinstance(found, RejectedRecord):
                yield found


def _tokenized(
    batches: Iterator[_Batch], tokenizer: ChatTokenizer, *, in_threads: bool
) -> Iterator[tuple[_Batch, list[list[int]]]]:
    """Batches with the ids of their texts in order; the next ones are tokenized while one is written."""
    if not in_threads:
        for batch in batches:
            yield batch, [tokenizer.encode(turn.text) for turns in batch.turns for turn in turns]
        return
    waiting: deque[tuple[_Batch, Future[list[list[int]]]]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for batch in batches:
            texts = [turn.text for turns in batch.turns for turn in turns]
            waiting.append((batch, pool.submit(tokenizer.encode_batch, texts)))
            if len(waiting) > _BATCHES_AHEAD:
                first, ids = waiting.popleft()
                yield first, ids.result()
        while waiting:
            first, ids = waiting.popleft()
            yield first, ids.result()


def _manifest(
    sources: Sequence[ConversationFile],
    found: Selection,
    tokenizer: ChatTokenizer,
    options: PrepareOptions,
    counts: _Counts,
    parts: dict[Any, SplitFacts],
    files: dict[str, ChatFile],
) -> ChatManifest:
    return ChatManifest(
        made_from=tuple(_source_facts(source) for source in sources),
        options=options.as_json(),
        template=TEMPLATE,
        loss=options.loss,
        max_length=options.max_length,
        tokenizer=options.tokenizer,
        vocab_size=tokenizer.vocab_size,
        marks={mark: tokenizer.pad_id + place for place, mark in enumerate(MARKS)},
        token_type=cast("Literal['<u2', '<u4']", token_type(tokenizer.vocab_size)),
        parts=parts,
        told={
            "conversations_found": found.num_found,
            "conversations_left_out_by_subsample": int((found.parts == LEFT_OUT).sum()) - found.num_repeated,
            "conversations_left_out_as_held_out_elsewhere": found.num_repeated,
            "conversations_cut_apart": counts.cut_apart,
            "documents_shortened": counts.shortened,
            "texts_that_the_tokenizer_changes": _num_changed(found.sample, tokenizer, options),
            "bad_records": found.num_bad,
            "bad_records_shown": [list(bad) for bad in found.bad],
        },
        files=files,
    )


def _num_changed(texts: Sequence[str], tokenizer: ChatTokenizer, options: PrepareOptions) -> int:
    """Texts of a sample that do not come back; a byte-level vocabulary of our own loses nothing."""
    if options.tokenizer == BYTE_PAIRS:
        return 0
    return sum(tokenizer.decode(tokenizer.encode(text)) != text for text in texts)


def _source_facts(source: ConversationFile) -> dict[str, Any]:
    return {"name": source.path.name, **hash_file(source.path).as_json(), "shape": source.shape.name}


def _check_output_dir(folder: Path) -> None:
    with durable.disk_errors("create", folder):
        is_taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if is_taken:
        raise UsageError("the output folder is not empty", got=folder, try_="another --output-dir, or remove it")


def _changed(sources: Sequence[ConversationFile]) -> WhetError:
    names = ", ".join(source.path.name for source in sources)
    return WhetError("the file changed while it was read", got=names, try_="the same command once it is complete")
