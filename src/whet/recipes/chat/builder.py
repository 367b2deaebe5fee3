"""How do conversations in a file become a folder to train from? Read twice, tokenized in batches, published at once.

The first reading decides what goes where (survey.py), the second writes. Neither keeps more than a few batches, so a
file may be larger than memory; and the folder appears when it is complete, or not at all.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.recipes.chat.assembling import assemble
from whet.recipes.chat.conversation import Conversation, Loss, Turn
from whet.recipes.chat.fitting import LEAST_LENGTH
from whet.recipes.chat.manifest import MANIFEST, PARTS, TOKENIZER, FileFacts, Manifest, PartFacts, facts_of
from whet.recipes.chat.sources import Bad, Source, find_sources, read_conversations
from whet.recipes.chat.survey import LEFT_OUT, Survey, survey
from whet.recipes.chat.template import TEMPLATE
from whet.recipes.chat.tokenizer import MARKS, ChatTokenizer
from whet.recipes.chat.vocabulary import BYTE_PAIRS, find_tokenizer
from whet.recipes.chat.writing import PartWriter, token_type
from whet.run import durable

_BATCH_CHARACTERS = 1_000_000
_BATCHES_AHEAD = 2

Told = Callable[[str, int, int | None], None]
"""Is told what is done, how many conversations are through, and of how many, if that is known."""


class Options(FrozenModel):
    """What `whet data chat` can be asked for."""

    format: Literal["auto", "sharegpt", "alpaca", "openai", "openassistant"] = "auto"
    tokenizer: str = BYTE_PAIRS
    vocab_size: int = Field(8192, ge=512, le=2**20)
    max_length: int = Field(2048, ge=LEAST_LENGTH, le=2**20)
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


def build(path: Path, folder: Path, options: Options, *, told: Told, in_threads: bool = True) -> Manifest:
    """Prepares the conversations of a file, or of a folder with train, dev and test files."""
    sources = find_sources(path, shape=options.format)
    told(f"{', '.join(sorted({source.shape.name for source in sources}))}: reading", 0, None)
    return build_from(sources, folder, options, told=told, in_threads=in_threads)


def build_from(
    sources: Sequence[Source], folder: Path, options: Options, *, told: Told, in_threads: bool = True
) -> Manifest:
    """The same for files that were found already."""
    _refuse_taken(folder)
    tokenizer = None
    if options.tokenizer != BYTE_PAIRS:
        told(f"opening the tokenizer {options.tokenizer}", 0, None)  # The hub may be asked for half a minute.
        tokenizer = find_tokenizer(options.tokenizer)
    found = survey(
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
    made: list[Manifest] = []

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
    sources: Sequence[Source],
    found: Survey,
    tokenizer: ChatTokenizer,
    options: Options,
    *,
    told: Told,
    in_threads: bool,
) -> Manifest:
    counts = _Counts()
    writers = [PartWriter(draft, part, max_length=options.max_length) for part in PARTS]
    conversations = [int((found.parts == number).sum()) for number in range(len(PARTS))]
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
    parts = {part: facts for part, (facts, _) in zip(PARTS, closed, strict=True)}
    files = {name: facts for _, written in closed for name, facts in written.items()}
    written = durable.write_draft(draft / TOKENIZER, data=tokenizer.to_json().encode())
    files[TOKENIZER] = FileFacts(bytes=written.size, sha256=written.sha256)
    manifest = _manifest(sources, found, tokenizer, options, counts, parts, files)
    text = json.dumps(manifest.as_json(), indent=2, ensure_ascii=True) + "\n"
    durable.write_draft(draft / MANIFEST, data=text.encode(), is_last=True)
    return manifest


def _batches(sources: Sequence[Source], found: Survey) -> Iterator[_Batch]:
    """The conversations that were taken, in the order of the files, with their parts."""
    number, size = 0, 0
    batch = _Batch([], [])
    for conversation in _again(sources):
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


def _again(sources: Sequence[Source]) -> Iterator[Conversation]:
    for source in sources:
        for found in read_conversations(source):
            if not isinstance(found, Bad):
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
    sources: Sequence[Source],
    found: Survey,
    tokenizer: ChatTokenizer,
    options: Options,
    counts: _Counts,
    parts: dict[Any, PartFacts],
    files: dict[str, FileFacts],
) -> Manifest:
    return Manifest(
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


def _num_changed(texts: Sequence[str], tokenizer: ChatTokenizer, options: Options) -> int:
    """Texts of a sample that do not come back; a byte-level vocabulary of our own loses nothing."""
    if options.tokenizer == BYTE_PAIRS:
        return 0
    return sum(tokenizer.decode(tokenizer.encode(text)) != text for text in texts)


def _source_facts(source: Source) -> dict[str, Any]:
    return {"name": source.path.name, **facts_of(source.path).as_json(), "shape": source.shape.name}


def _refuse_taken(folder: Path) -> None:
    with durable.disk_errors("create", folder):
        is_taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if is_taken:
        raise UsageError("the output folder is not empty", got=folder, try_="another --output-dir, or remove it")


def _changed(sources: Sequence[Source]) -> WhetError:
    names = ", ".join(source.path.name for source in sources)
    return WhetError("the file changed while it was read", got=names, try_="the same command once it is complete")
