"""OpenAI: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}."""

from collections.abc import Mapping
from typing import Any

from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.shapes.turns import read_turns


def fits(record: Mapping[str, Any]) -> bool:
    """Whether the record has this shape."""
    return "messages" in record


def read(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Its turns."""
    return read_turns(record.get("messages"), role_keys=("role",), text_keys=("content",))
