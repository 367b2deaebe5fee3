"""How is a turn read, whatever its keys are called?"""

from collections.abc import Mapping
from typing import Any

from whet.recipes.chat.conversation import MalformedError, Role, Turn

ROLE_NAMES: dict[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}


def read_turns(listed: Any, *, role_keys: tuple[str, ...], text_keys: tuple[str, ...]) -> tuple[Turn, ...]:
    """The turns of a list of objects."""
    if not isinstance(listed, list):
        raise MalformedError("its turns are no list")
    turns = []
    for number, said in enumerate(listed, 1):
        if type(said) is not dict:
            raise MalformedError(f"turn {number} is no object")
        turns.append(
            Turn(_role(_first(said, role_keys), number, role_keys), text_of(_first(said, text_keys), f"turn {number}"))
        )
    return tuple(turns)


def text_of(value: Any, where: str) -> str:
    """The text of a turn: a string, or the parts of one."""
    if type(value) is str:
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        other = [str(part.get("type")) for part in value if part.get("type") not in ("text", "input_text", None)]
        if other:
            raise MalformedError(f"{where} holds more than text: {other[0][:40]}")
        return "".join(text_of(part.get("text"), where) for part in value)
    raise MalformedError(f"{where} has no text")


def _first(said: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        if key in said:
            return said[key]
    return None


def _role(value: Any, number: int, keys: tuple[str, ...]) -> Role:
    if type(value) is str:
        role = ROLE_NAMES.get(value) or ROLE_NAMES.get(value.strip().lower())
        if role is not None:
            return role
        raise MalformedError(f"turn {number} is of an unknown role: {value[:40]!r}")
    raise MalformedError(f"turn {number} has no role ({' or '.join(keys)})")
