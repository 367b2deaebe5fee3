"""Alpaca: {"instruction": "...", "input": "...", "output": "..."}, one question and its answer."""

from collections.abc import Mapping
from typing import Any

from whet.recipes.chat.conversation import MalformedError, Turn
from whet.recipes.chat.shapes.turns import text_of


def fits(record: Mapping[str, Any]) -> bool:
    """Whether the record has this shape."""
    return "instruction" in record and "output" in record


def read(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Its turns: a system's text, earlier questions and answers where there are any, then this one."""
    turns = []
    system = record.get("system")
    if isinstance(system, str) and system.strip():
        turns.append(Turn("system", system))
    for pair in record.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise MalformedError("its history is no list of pairs")
        turns += [Turn("user", text_of(pair[0], "history")), Turn("assistant", text_of(pair[1], "history"))]
    question = text_of(record.get("instruction"), "instruction")
    more = record.get("input")
    if isinstance(more, str) and more.strip():
        question = f"{question}\n\n{more}"
    elif more is not None and not isinstance(more, str):
        raise MalformedError("input is no text")
    return (*turns, Turn("user", question), Turn("assistant", text_of(record.get("output"), "output")))
