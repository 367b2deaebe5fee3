"""What is a conversation? Turns of known roles with a text each, and what makes one unusable."""

import re
from typing import Literal, NamedTuple

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
Loss = Literal["assistant", "all"]
"""Whose words are learned."""

_INK = re.compile(r"\S")
_MAY_REPEAT = ("tool",)
"""Several tools may answer one call."""


class Turn(NamedTuple):
    """What one side says."""

    role: Role
    text: str


class Conversation(NamedTuple):
    """Turns in order, and where they were read."""

    turns: tuple[Turn, ...]
    where: str = ""


class MalformedError(ValueError):
    """A record that is no conversation; the message says why."""


def validate_turns(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns up to the last answer; MalformedError for what cannot be learned from.

    >>> check((Turn("user", "Hi"), Turn("assistant", "Hello."), Turn("user", "Bye")))
    (Turn(role='user', text='Hi'), Turn(role='assistant', text='Hello.'))
    """
    before = None
    for number, (role, text) in enumerate(turns, 1):
        if not _INK.search(text):
            raise MalformedError(f"turn {number} ({role}) is empty")
        if role == before and role not in _MAY_REPEAT:
            raise MalformedError(f"turns {number - 1} and {number} are both the {role}'s")
        if not text.isascii():
            _check_characters(text, number)
        before = role
    end = next((number for number in range(len(turns), 0, -1) if turns[number - 1].role == "assistant"), 0)
    if not end:
        raise MalformedError("no turn of an assistant" if turns else "no turns")
    return turns[:end]


def _check_characters(text: str, number: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MalformedError(f"turn {number} has bytes that are no UTF-8, or half of a surrogate pair") from None
