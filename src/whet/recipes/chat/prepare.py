"""`whet data chat`: read conversations, tokenize them, and write a folder for training."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.recipes.chat.conversation import Loss, Turn
from whet.recipes.chat.dataset import Document, SplitWriter, token_type
from whet.recipes.chat.manifest import MANIFEST, SPLITS, TOKENIZER, ChatFile, ChatManifest, SplitFacts, hash_file
from whet.recipes.chat.selection import EXCLUDED, Selection, select_conversations
from whet.recipes.chat.sources import ConversationFile, RejectedRecord, find_files, read_conversations
from whet.recipes.chat.template import MIN_LENGTH, TEMPLATE, TurnIds, count_loss_bytes, encode_turns, fit_conversation
from whet.recipes.chat.tokenizer import BYTE_PAIRS, MARKS, ChatTokenizer, load_tokenizer
from whet.run import durable


def make_documents(
    turns: Sequence[Turn], ids: Sequence[Sequence[int]], tokenizer: ChatTokenizer, *, max_length: int, loss: Loss
) -> tuple[list[Document], int]:
    """Return the documents of a conversation, and how many of them were truncated.

    A conversation that is longer than a row has several documents.
    """
    encoded = [
        TurnIds(role, text_ids, True, len(text) if text.isascii() else len(text.encode()))
        for (role, text), text_ids in zip(turns, ids, strict=True)
    ]
    segments = fit_conversation(encoded, max_length=max_length)
    documents = []
    for segment in segments:
        tokens, mask = encode_turns(segment.turns, tokenizer, loss=loss)
        size = count_loss_bytes(segment.turns, tokenizer, loss=loss)
        documents.append(Document(np.array(tokens, dtype=token_type(tokenizer.vocab_size)).tobytes(), mask, size))
    return documents, sum(segment.is_truncated for segment in segments)


# Texts are tokenized in batches of about this size.
_BATCH_CHARACTERS = 1_000_000
# Number of batches that may be tokenized ahead of the one that is being written.
_BATCHES_AHEAD = 2

Progress = Callable[[str, int, int | None], None]
"""Callback that receives the current activity, the number of conversations processed, and the total or None."""


class PrepareOptions(FrozenModel):
    """Options of `whet data chat`."""

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

    splits: list[int]
    turns: list[tuple[Turn, ...]]


def prepare_data(
    path: Path, folder: Path, options: PrepareOptions, *, on_progress: Progress, in_threads: bool = True
) -> ChatManifest:
    """Prepare the conversations of a file, or of a folder with train, val and test files. Return the manifest.

    `folder` is created atomically.
    """
    sources = find_files(path, format_name=options.format)
    on_progress(f"{', '.join(sorted({source.format.name for source in sources}))}: reading", 0, None)
    _check_output_dir(folder)
    tokenizer = None
    if options.tokenizer != BYTE_PAIRS:
        on_progress(f"opening the tokenizer {options.tokenizer}", 0, None)  # A download may take half a minute.
        tokenizer = load_tokenizer(options.tokenizer)
    selection = select_conversations(
        sources,
        seed=options.seed,
        train_split=options.train_split,
        subsample_size=options.subsample_size,
        max_bad=options.max_bad,
        trains_tokenizer=tokenizer is None,
        on_progress=lambda done: on_progress("reading", done, None),
    )
    if tokenizer is None:
        on_progress("training a tokenizer", 0, None)
        tokenizer = ChatTokenizer.train(selection.sample, vocab_size=options.vocab_size)
    manifests: list[ChatManifest] = []

    def fill(draft: Path) -> None:
        manifests.append(
            _write_files(draft, sources, selection, tokenizer, options, on_progress=on_progress, in_threads=in_threads)
        )

    new_parents = durable.make_directory(folder.absolute().parent)
    try:
        durable.publish_directory(folder.absolute(), fill=fill)
    except BaseException:
        durable.remove_empty(new_parents)
        raise
    return manifests[0]


def _write_files(
    draft: Path,
    sources: Sequence[ConversationFile],
    selection: Selection,
    tokenizer: ChatTokenizer,
    options: PrepareOptions,
    *,
    on_progress: Progress,
    in_threads: bool,
) -> ChatManifest:
    num_split = num_truncated = 0
    writers = [SplitWriter(draft, split, max_length=options.max_length) for split in SPLITS]
    conversations = [int((selection.splits == number).sum()) for number in range(len(SPLITS))]
    done, total = 0, sum(conversations)
    try:
        for batch, ids in _tokenized(_batches(sources, selection), tokenizer, in_threads=in_threads):
            first = 0
            for split, turns in zip(batch.splits, batch.turns, strict=True):
                documents, truncated = make_documents(
                    turns,
                    ids[first : first + len(turns)],
                    tokenizer,
                    max_length=options.max_length,
                    loss=options.loss,
                )
                first += len(turns)
                num_split += len(documents) > 1
                num_truncated += truncated
                for document in documents:
                    writers[split].add(document)
            done += len(batch.splits)
            on_progress("tokenizing", done, total)
        closed = [writer.close(conversations=number) for writer, number in zip(writers, conversations, strict=True)]
    finally:
        for writer in writers:
            writer.abandon()
    splits: dict[Any, SplitFacts] = {split: facts for split, (facts, _) in zip(SPLITS, closed, strict=True)}
    files = {name: facts for _, written in closed for name, facts in written.items()}
    written = durable.write_draft(draft / TOKENIZER, data=tokenizer.to_json().encode())
    files[TOKENIZER] = ChatFile(bytes=written.size, sha256=written.sha256)
    manifest = ChatManifest(
        sources=tuple(_source_facts(source) for source in sources),
        options=options.as_json(),
        template=TEMPLATE,
        loss=options.loss,
        max_length=options.max_length,
        tokenizer=options.tokenizer,
        vocab_size=tokenizer.vocab_size,
        marks={mark: tokenizer.pad_id + index for index, mark in enumerate(MARKS)},
        token_type=cast("Literal['<u2', '<u4']", token_type(tokenizer.vocab_size)),
        splits=splits,
        counts={
            "conversations": selection.num_conversations,
            "excluded_by_subsample": int((selection.splits == EXCLUDED).sum()) - selection.num_repeated,
            "excluded_as_held_out": selection.num_repeated,
            "conversations_split": num_split,
            "documents_truncated": num_truncated,
            "texts_changed_by_tokenizer": _num_changed(selection.sample, tokenizer, options),
            "rejected_records": selection.num_rejected,
            "rejected_examples": [list(record) for record in selection.rejected],
        },
        files=files,
    )
    text = json.dumps(manifest.as_json(), indent=2, ensure_ascii=True) + "\n"
    durable.write_draft(draft / MANIFEST, data=text.encode(), is_last=True)
    return manifest


def _batches(sources: Sequence[ConversationFile], selection: Selection) -> Iterator[_Batch]:
    """Read the files again, and yield the selected conversations with their splits. Raise WhetError if they changed."""
    number, size = 0, 0
    batch = _Batch([], [])
    for conversation in (item for source in sources for item in read_conversations(source)):
        if isinstance(conversation, RejectedRecord):
            continue
        if number >= selection.num_conversations:
            raise _changed(sources)
        split = int(selection.splits[number])
        number += 1
        if split == EXCLUDED:
            continue
        batch.splits.append(split)
        batch.turns.append(conversation.turns)
        size += sum([len(turn.text) for turn in conversation.turns])
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = _Batch([], []), 0
    if number != selection.num_conversations:
        raise _changed(sources)
    if batch.splits:
        yield batch


def _tokenized(
    batches: Iterator[_Batch], tokenizer: ChatTokenizer, *, in_threads: bool
) -> Iterator[tuple[_Batch, list[list[int]]]]:
    """Yield batches with the ids of their texts. With `in_threads`, later batches are tokenized in a thread."""
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


def _num_changed(texts: Sequence[str], tokenizer: ChatTokenizer, options: PrepareOptions) -> int:
    """Return the number of texts that change when they are encoded and decoded."""
    if options.tokenizer == BYTE_PAIRS:
        return 0  # A byte-level vocabulary is lossless.
    return sum(tokenizer.decode(tokenizer.encode(text)) != text for text in texts)


def _source_facts(source: ConversationFile) -> dict[str, Any]:
    return {"name": source.path.name, **hash_file(source.path).as_json(), "format": source.format.name}


def _check_output_dir(folder: Path) -> None:
    with durable.disk_errors("create", folder):
        is_taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if is_taken:
        raise UsageError("the output folder is not empty", got=folder, try_="another --out, or remove it")


def _changed(sources: Sequence[ConversationFile]) -> WhetError:
    names = ", ".join(source.path.name for source in sources)
    return WhetError(
        "the file changed while it was read", got=names, try_="run the same command again once the file is complete"
    )
