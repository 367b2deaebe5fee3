"""Conversations, their turns and their validation."""

from typing import Literal, NamedTuple

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
Loss = Literal["assistant", "all"]
"""The turns whose tokens are included in the loss."""


class Turn(NamedTuple):
    """A message of a conversation."""

    role: Role
    text: str


class Conversation(NamedTuple):
    """The turns of a conversation in order. `where` is its source, a file and record."""

    turns: tuple[Turn, ...]
    where: str = ""


class MalformedError(ValueError):
    """Raised if a record is not a usable conversation. The message is the reason."""


def validate_turns(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Return the turns up to the last answer, or raise MalformedError if they cannot be used for training.

    >>> validate_turns((Turn("user", "Hi"), Turn("assistant", "Hello."), Turn("user", "Bye")))
    (Turn(role='user', text='Hi'), Turn(role='assistant', text='Hello.'))
    """
    before = None
    for number, (role, text) in enumerate(turns, 1):
        if not text or text.isspace():
            raise MalformedError(f"turn {number} ({role}) is empty")
        # Allow consecutive tool turns, because a message may call several tools.
        if role == before and role != "tool":
            raise MalformedError(f"turns {number - 1} and {number} both have the role {role}")
        if not text.isascii():
            _check_encoding(text, number)
        before = role
    end = next((number for number in range(len(turns), 0, -1) if turns[number - 1].role == "assistant"), 0)
    if not end:
        raise MalformedError("no turn of an assistant" if turns else "no turns")
    return turns[:end]


def _check_encoding(text: str, number: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MalformedError(f"turn {number} contains invalid UTF-8 or half of a surrogate pair") from None
