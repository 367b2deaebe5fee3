"""How do facts become conversations? Each way of asking once, some in the middle of a longer talk."""

import hashlib
from collections.abc import Sequence
from itertools import chain

from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.embedded.about_python import python_facts
from whet.recipes.chat.embedded.about_whet import whet_facts

PYTHON_FACTS = 1_200
_MOST_CHARACTERS = 600
"""Of a talk of several questions: one that came out longer by chance would set the length of every row."""
_SYSTEM = "You answer questions about whet and Python, briefly."
_BRIDGES = ("{}", "Thanks. {}", "And another question: {}", "I see. {}", "{}", "Good. {}")


def conversations() -> list[tuple[Turn, ...]]:
    """All of them, in a fixed order: the same whet and Python give the same ones."""
    known = list(whet_facts())
    python = sorted(python_facts(), key=lambda fact: _draw(fact.questions[0]))[:PYTHON_FACTS]
    made: list[tuple[Turn, ...]] = []
    # whet's own facts twice, alone and in company: they are few, and what is asked first.
    for round_number, (facts, longest) in enumerate(((known, 1), (known, 3), (python, 3))):
        asked = [(question, fact.answer) for fact in facts for question in fact.questions]
        asked.sort(key=lambda pair: _draw(f"{round_number} {pair[0]}"))
        start = 0
        while start < len(asked):
            size = 1 + _draw(f"{round_number} {asked[start][0]} size") % longest
            while size > 1 and sum(map(len, chain(*asked[start : start + size]))) > _MOST_CHARACTERS:
                size -= 1
            made.append(_talk(asked[start : start + size]))
            start += size
    return made


def _talk(asked: Sequence[tuple[str, str]]) -> tuple[Turn, ...]:
    draw = _draw(asked[0][0])
    turns = [Turn("system", _SYSTEM)] if draw % 4 == 0 else []
    for number, (question, answer) in enumerate(asked):
        bridge = _BRIDGES[_draw(question) % len(_BRIDGES)] if number else "{}"
        turns += [Turn("user", bridge.format(question)), Turn("assistant", answer)]
    return tuple(turns)


def _draw(text: str) -> int:
    """A number that looks random and is the same everywhere."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
