"""ShareGPT: {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}."""

from collections.abc import Mapping
from typing import Any

from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.shapes.turns import read_turns


def fits(record: Mapping[str, Any]) -> bool:
    """Whether the record has this shape."""
    return _LIST in record or _OTHER_LIST in record


def read(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Its turns; a system's text may stand beside them."""
    listed = record.get(_LIST, record.get(_OTHER_LIST))
    turns = read_turns(listed, role_keys=("from", "role"), text_keys=("value", "content", "text"))
    system = record.get("system")
    if isinstance(system, str) and system.strip() and turns and turns[0].role != "system":
        return (Turn("system", system), *turns)
    return turns


_LIST, _OTHER_LIST = "conversations", "conversation"
