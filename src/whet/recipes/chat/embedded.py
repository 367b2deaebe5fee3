"""The conversations that are trained on when no data is given."""

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

PYTHON_FACTS = 1_200
_MOST_CHARACTERS = 600
"""Of a talk of several questions: one that came out longer by chance would set the length of every row."""
_SYSTEM = "You answer questions about whet and Python, briefly."
_BRIDGES = ("{}", "Thanks. {}", "And another question: {}", "I see. {}", "{}", "Good. {}")


def embedded_conversations() -> list[tuple[Turn, ...]]:
    """All of them, in a fixed order: the same whet and Python give the same ones."""
    known = list(whet_facts())
    python = sorted(python_facts(), key=lambda fact: _hash_number(fact.questions[0]))[:PYTHON_FACTS]
    made: list[tuple[Turn, ...]] = []
    # whet's own facts twice, alone and in company: they are few, and what is asked first.
    for round_number, (facts, longest) in enumerate(((known, 1), (known, 3), (python, 3))):
        asked = [(question, fact.answer) for fact in facts for question in fact.questions]
        asked.sort(key=lambda pair: _hash_number(f"{round_number} {pair[0]}"))
        start = 0
        while start < len(asked):
            size = 1 + _hash_number(f"{round_number} {asked[start][0]} size") % longest
            while size > 1 and sum(map(len, chain(*asked[start : start + size]))) > _MOST_CHARACTERS:
                size -= 1
            made.append(_conversation(asked[start : start + size]))
            start += size
    return made


def _conversation(asked: Sequence[tuple[str, str]]) -> tuple[Turn, ...]:
    draw = _hash_number(asked[0][0])
    turns = [Turn("system", _SYSTEM)] if draw % 4 == 0 else []
    for number, (question, answer) in enumerate(asked):
        bridge = _BRIDGES[_hash_number(question) % len(_BRIDGES)] if number else "{}"
        turns += [Turn("user", bridge.format(question)), Turn("assistant", answer)]
    return tuple(turns)


def _hash_number(text: str) -> int:
    """A number that looks random and is the same everywhere."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


OPTIONS = PrepareOptions(format="openai", vocab_size=4096, max_length=512, train_split=0.96, max_bad=0)


_PACKAGE = Path(__file__).parents[2]
_MADE_FROM = ("cli", "config", "plan/rules", "recipes/chat")
"""Where the conversations come from, besides Python's library."""


def open_embedded() -> ChatDataset:
    """The prepared conversations; made again for another whet or Python, or where they are damaged."""
    folder = env.home() / "chat" / f"embedded-{_key()}"
    try:
        return open_dataset(folder, verify=True)
    except (WhetError, OSError):
        return _make(folder)


def _key() -> str:
    """Changes whenever another Python or another source of ours could give other bytes."""
    digest = hashlib.sha256(platform.python_version().encode())
    for part in _MADE_FROM:
        for path in sorted((_PACKAGE / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _make(folder: Path) -> ChatDataset:
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
            # One by one: a training may fork later, and threads do not survive that.
            prepare_data(file, folder, OPTIONS, told=lambda _what, _done, _total: None, in_threads=False)
        except WhetError:
            # Another process may have made it meanwhile; a home that cannot be written costs a folder elsewhere.
            if not folder.exists():
                folder = Path(tempfile.mkdtemp(prefix="whet-chat-")) / folder.name
                prepare_data(file, folder, OPTIONS, told=lambda _what, _done, _total: None, in_threads=False)
    return open_dataset(folder)
