"""From a config to rows: prepared folders, or the embedded conversations."""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from whet.base.errors import UsageError
from whet.base.units import format_count, format_plural
from whet.recipes.chat.config import ChatConfig, data_folders, read_manifests, settled
from whet.recipes.chat.dataset import ChatDataset, Sample, open_dataset
from whet.recipes.chat.judging import NUM_QUESTIONS
from whet.recipes.chat.rows import ChatData, Rows, questions_of


def read_chat(config: ChatConfig) -> ChatData:
    """All three parts."""
    datasets = _datasets(config)
    tokenizer = datasets[0].tokenizer
    longest = max(part.facts.longest for each in datasets for part in (each.train, each.val, each.test))
    arch = settled(config.arch, longest=longest)
    assert isinstance(arch.seq_len, int)
    train, val, test = (
        Rows(parts, row_length=arch.seq_len, pad_id=tokenizer.pad_id)
        for parts in (
            [each.train for each in datasets],
            [each.val for each in datasets],
            [each.test for each in datasets],
        )
    )
    for name, part in (("train", train), ("val", val)):
        if not len(part):
            raise UsageError(f"the {name} part is empty", got="0 rows", try_="more conversations, or --train-split 0.9")
    num_tokens = sum(each.train.facts.tokens for each in datasets)
    notes = (
        f"{format_plural(sum(each.train.facts.conversations for each in datasets), 'conversation')} to train on, "
        f"{format_count(num_tokens)} tokens in {format_plural(len(train), 'row')} of {arch.seq_len}",
        arch.words(tokenizer.vocab_size),
        *_shared(datasets),
    )
    return ChatData(
        train=train.in_memory(),
        val=val.in_memory(),
        test=test.in_memory() if len(test) else None,
        arch=arch,
        num_places=arch.seq_len,
        tokenizer=tokenizer,
        num_rows=len(train),
        longest=longest,
        fingerprint="+".join(each.fingerprint for each in datasets),
        questions=questions_of(datasets[0].val, tokenizer, count=NUM_QUESTIONS, most_tokens=arch.seq_len),
        notes=notes,
    )


def _datasets(config: ChatConfig) -> list[ChatDataset]:
    folders = data_folders(config)
    if not folders:
        from whet.recipes.chat.embedded.opening import open_embedded

        return [open_embedded()]
    read_manifests(folders)
    return [open_dataset(folder) for folder in folders]


def _shared(datasets: Sequence[ChatDataset]) -> tuple[str, ...]:
    """What is held out in one folder and trained on in another: then a score says less than it seems to."""
    if len(datasets) < 2:
        return ()
    held = Counter(_print(document) for each in datasets for part in (each.val, each.test) for document in part)
    trained = {mark for each in datasets for document in each.train if (mark := _print(document)) in held}
    num_shared = sum(held[mark] for mark in trained)
    if not num_shared:
        return ()
    return (f"{num_shared:,} of {held.total():,} conversations for dev and test are trained on too, in another folder",)


def _print(document: Sample) -> bytes:
    return blake2b(document.tokens.tobytes(), digest_size=8).digest()
