"""Select the conversations to use and assign each to a split, in a first pass over the files.

Conversations are sorted by a hash of their content that is keyed by the seed, which gives a random order. The first
`subsample_size` of them are used: first the training split, then validation, then test. The splits therefore depend on
the seed, but not on the order of the file, and equal conversations, which have equal hashes, are in the same split. The
pass keeps only hashes, which take eight bytes per conversation, and a sample of texts in memory.
"""

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from whet.base.errors import WhetError
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.manifest import SPLITS, Split
from whet.recipes.chat.sources import ConversationFile, RejectedRecord, read_conversations

Array = np.ndarray[Any, np.dtype[Any]]
EXCLUDED = 255
"""Value of unused conversations in `Selection.splits`. All other values are indices of SPLITS."""

_TRAIN_CHARACTERS, _TEST_CHARACTERS = 8_000_000, 100_000
"""Number of characters for training a tokenizer, and for testing an existing one. More text does not noticeably improve
a vocabulary of a few thousand entries.
"""
_MAX_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The result of the first pass over the files."""

    splits: Array
    """(conversations,) of uint8, in reading order: the index of the split, or EXCLUDED."""
    sample: tuple[str, ...]
    """Texts of the training split, for training or testing a tokenizer."""
    rejected: tuple[RejectedRecord, ...]
    """The first few rejected records."""
    num_rejected: int
    num_conversations: int
    num_repeated: int
    """Number of conversations that are excluded because a held-out file also contains them."""


def select_conversations(
    sources: Sequence[ConversationFile],
    *,
    seed: int,
    train_split: float,
    subsample_size: int | None,
    max_bad: int,
    trains_tokenizer: bool,
    on_progress: Callable[[int], None],
) -> Selection:
    """Read all files once and select conversations. Raise WhetError if more than `max_bad` records are rejected."""
    hashes, file_numbers = array("Q"), array("B")
    sample = _TextSample(_TRAIN_CHARACTERS if trains_tokenizer else _TEST_CHARACTERS)
    rejected: list[RejectedRecord] = []
    num_rejected = 0
    key = seed.to_bytes(16, "little", signed=True)
    for number, source in enumerate(sources):
        for item in read_conversations(source):
            if isinstance(item, RejectedRecord):
                num_rejected += 1
                if len(rejected) < _MAX_SHOWN:
                    rejected.append(item)
                if num_rejected > max_bad:
                    raise _too_many(rejected, max_bad)
                continue
            content_hash = _content_hash(item.turns, key)
            hashes.append(content_hash)
            file_numbers.append(number)
            if source.split in (None, "train"):
                sample.offer(content_hash, item.turns)
            if len(hashes) % 1024 == 0:
                on_progress(len(hashes))
    if not hashes:
        first = f"; the first: {rejected[0].where}: {rejected[0].why}" if rejected else ""
        raise WhetError("no conversation could be read", got=f"{num_rejected} bad records{first}", try_="another file")
    all_hashes = np.frombuffer(hashes, dtype=np.uint64)
    split_of_file = np.array([SPLITS.index(source.split or "train") for source in sources], dtype=np.uint8)
    given = {source.split for source in sources if source.split}
    splits, num_repeated = _assign_splits(
        all_hashes,
        split_of_file[np.asarray(file_numbers)],
        missing=[split for split in ("val", "test") if split not in given],
        train_split=train_split,
        subsample_size=subsample_size,
    )
    last = all_hashes[splits == 0].max(initial=0)
    return Selection(
        splits=splits,
        sample=tuple(sample.texts(int(last))),
        rejected=tuple(rejected),
        num_rejected=num_rejected,
        num_conversations=len(hashes),
        num_repeated=num_repeated,
    )


def _assign_splits(
    hashes: Array, given: Array, *, missing: Sequence[Split], train_split: float, subsample_size: int | None
) -> tuple[Array, int]:
    """Return the split of each conversation, and the number of conversations excluded as repeats of held-out ones.

    `given` are the splits of the files that contain the conversations. Splits in `missing`, which have no file, are
    taken from the training split.
    """
    splits = given.copy()
    # Exclude conversations of held-out files from train, and conversations of the test file from val.
    num_repeated = 0
    for split in (0, 1):
        members = np.flatnonzero(given == split) if (given > split).any() else np.empty(0, dtype=np.int64)
        repeated = members[np.isin(hashes[members], hashes[given > split])]
        splits[repeated] = EXCLUDED
        num_repeated += len(repeated)
    train = np.flatnonzero(splits == 0)
    order = train[np.argsort(hashes[train], kind="stable")]
    if subsample_size is not None:
        end = _group_boundary(hashes[order], min(subsample_size, len(order)))
        splits[order[end:]] = EXCLUDED
        order = order[:end]
    num_held_out = _num_held_out(len(order), train_split) if missing else 0
    start = _group_boundary(hashes[order], len(order) - num_held_out)
    middle = start if missing == ["test"] else _group_boundary(hashes[order], (start + len(order) + 1) // 2)
    middle = len(order) if missing == ["val"] else middle
    splits[order[start:middle]] = SPLITS.index("val")
    splits[order[middle:]] = SPLITS.index("test")
    return splits, num_repeated


def _num_held_out(total: int, train_split: float) -> int:
    """Return the number of held-out conversations, which is at least two if there are three or more conversations.

    It is 0 if `train_split` is 1, or with fewer than three conversations.
    """
    if train_split >= 1 or total < 3:
        return 0
    return max(2, round(total * (1 - train_split)))


def _group_boundary(ordered: Array, end: int) -> int:
    """Move `end` back so that it does not separate equal hashes, or forward if it would be 0."""
    if end in (0, len(ordered)) or ordered[end] != ordered[end - 1]:
        return end
    before = int(np.searchsorted(ordered, ordered[end], side="left"))
    return before or int(np.searchsorted(ordered, ordered[end], side="right"))


def _content_hash(turns: tuple[Turn, ...], key: bytes) -> int:
    content = "\0".join([part for turn in turns for part in turn])
    return int.from_bytes(blake2b(content.encode(), digest_size=8, key=key).digest(), "little")


class _TextSample:
    """The texts of the conversations with the smallest hashes, up to a total number of characters."""

    def __init__(self, max_characters: int) -> None:
        self._max = max_characters
        self._size = 0
        # A max-heap, from which the largest hash is removed first.
        self._texts: list[tuple[int, tuple[str, ...]]] = []

    def offer(self, content_hash: int, turns: tuple[Turn, ...]) -> None:
        if self._size >= self._max and (not self._texts or content_hash >= -self._texts[0][0]):
            return
        texts = tuple(turn.text for turn in turns)
        self._size += sum(map(len, texts))
        heapq.heappush(self._texts, (-content_hash, texts))
        while self._size > self._max and len(self._texts) > 1:
            self._size -= sum(map(len, heapq.heappop(self._texts)[1]))

    def texts(self, last: int) -> Iterator[str]:
        """Yield texts in the order of their hashes, up to `last`, the largest hash in the training split."""
        for negative_hash, texts in sorted(self._texts, reverse=True):
            if -negative_hash <= last:
                yield from texts


def _too_many(rejected: Sequence[RejectedRecord], max_bad: int) -> WhetError:
    shown = "; ".join(f"{where}: {why}" for where, why in rejected[:3])
    return WhetError(
        f"more than {max_bad} records are not conversations",
        got=shown,
        try_="another --format, a cleaner file, or a larger --max-bad to skip them",
    )
