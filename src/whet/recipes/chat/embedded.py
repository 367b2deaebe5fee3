"""The embedded conversations, used if no data is given."""

import hashlib
import json
import platform
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from whet.base import env
from whet.base.errors import WhetError
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.dataset import ChatDataset, open_dataset
from whet.recipes.chat.embedded_facts import python_facts, whet_facts
from whet.recipes.chat.prepare import PrepareOptions, prepare_data
from whet.run import durable

_MAX_CHARACTERS = 600
"""The limit for conversations with several questions: the longest conversation determines the length of all rows."""
_SYSTEM = "You answer questions about whet and Python, briefly."
_BRIDGES = ("{}", "Thanks. {}", "And another question: {}", "I see. {}", "{}", "Good. {}")


def embedded_conversations() -> list[tuple[Turn, ...]]:
    """Generate all conversations. The result depends only on the versions of whet and Python."""
    whet = list(whet_facts())
    python = list(python_facts())
    conversations: list[tuple[Turn, ...]] = []
    # Facts about whet are few but the most frequent topic, so they occur twice: alone and in longer conversations.
    for round_number, (facts, longest) in enumerate(((whet, 1), (whet, 3), (python, 3))):
        pairs = [(question, fact.answer) for fact in facts for question in fact.questions]
        pairs.sort(key=lambda pair: _hash_number(f"{round_number} {pair[0]}"))
        start = 0
        while start < len(pairs):
            size = 1 + _hash_number(f"{round_number} {pairs[start][0]} size") % longest
            while size > 1 and sum(map(len, chain(*pairs[start : start + size]))) > _MAX_CHARACTERS:
                size -= 1
            conversations.append(_conversation(pairs[start : start + size]))
            start += size
    return conversations


def _conversation(pairs: Sequence[tuple[str, str]]) -> tuple[Turn, ...]:
    draw = _hash_number(pairs[0][0])
    turns = [Turn("system", _SYSTEM)] if draw % 4 == 0 else []
    for number, (question, answer) in enumerate(pairs):
        bridge = _BRIDGES[_hash_number(question) % len(_BRIDGES)] if number else "{}"
        turns += [Turn("user", bridge.format(question)), Turn("assistant", answer)]
    return tuple(turns)


def _hash_number(text: str) -> int:
    """Return a pseudorandom number that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


OPTIONS = PrepareOptions(format="openai", vocab_size=4096, max_length=512, train_split=0.96, max_bad=0)


def open_embedded() -> ChatDataset:
    """Open the cached conversations. Generate them if they are missing, damaged or of another version."""
    folder = env.home() / "chat" / f"embedded-{_key()}"
    try:
        return open_dataset(folder, verify=True)
    except (WhetError, OSError):
        return _generate(folder)


def _key() -> str:
    """Return a hash of everything that the conversations depend on."""
    digest = hashlib.sha256(platform.python_version().encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _generate(folder: Path) -> ChatDataset:
    lines = "".join(
        json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n"
        for turns in embedded_conversations()
    )
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "embedded.jsonl"
        file.write_text(lines, encoding="utf-8")
        try:
            if folder.exists():
                durable.remove(folder)
            # Use no threads: training may fork later, and threads do not survive a fork.
            prepare_data(file, folder, OPTIONS, on_progress=_ignore_progress, in_threads=False)
        except WhetError:
            # Another process may have written the cache meanwhile. If the home folder is read-only, use a temporary
            # folder.
            if not folder.exists():
                folder = Path(tempfile.mkdtemp(prefix="whet-chat-")) / folder.name
                prepare_data(file, folder, OPTIONS, on_progress=_ignore_progress, in_threads=False)
    return open_dataset(folder)


def _ignore_progress(activity: str, done: int, total: int | None) -> None:
    pass
