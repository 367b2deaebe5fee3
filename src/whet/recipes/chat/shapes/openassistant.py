"""OpenAssistant: lists of messages, and its dumps: trees of replies, or one message a row with its parent's id.

A tree holds many conversations that share their beginnings. One of each is taken: at every message the reply that
people ranked first, or the first one where nobody did, so that no text is learned twice.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from whet.recipes.chat.conversation import MalformedError, Turn
from whet.recipes.chat.reading import Record
from whet.recipes.chat.shapes.turns import read_turns

_KEYS = {"role_keys": ("role",), "text_keys": ("text", "content")}


def fits(record: Mapping[str, Any]) -> bool:
    """Whether the record has this shape."""
    return is_tree(record) or is_message(record) or _is_list(record)


def is_message(record: Any) -> bool:
    """Whether this is a row of the flat dump."""
    return isinstance(record, dict) and "message_id" in record and "parent_id" in record and "text" in record


def is_tree(record: Mapping[str, Any]) -> bool:
    """Whether this is a tree of the dump."""
    prompt = record.get("prompt")
    return isinstance(prompt, dict) and "replies" in prompt


def read(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Its turns."""
    if is_tree(record):
        return read_turns(list(_best_path(record["prompt"])), **_KEYS)
    return read_turns(record.get("messages"), **_KEYS)


def gather(records: Iterable[Record]) -> Iterator[Record]:
    """Rows of one tree, which lie together in the dump, as one record; others as they are."""
    rows: list[Record] = []
    for record in records:
        is_row = is_message(record.value)
        if rows and (not is_row or _tree_of(record.value) != _tree_of(rows[0].value)):
            yield _grown(rows)
            rows = []
        if is_row:
            rows.append(record)
        else:
            yield record
    if rows:
        yield _grown(rows)


def _is_list(record: Mapping[str, Any]) -> bool:
    messages = record.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and (first.get("role") == "prompter" or ("text" in first and "content" not in first))


def _tree_of(row: Mapping[str, Any]) -> Any:
    return row.get("message_tree_id") or row.get("message_id")


def _grown(rows: list[Record]) -> Record:
    """A tree from its rows; a row without its parent belongs to nothing."""
    below: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    nodes = [{**row.value, "replies": []} for row in rows]
    for node in nodes:
        below[node["parent_id"]].append(node)
    for node in nodes:
        node["replies"] = below.get(node["message_id"], [])
    name = str(_tree_of(rows[0].value))
    known = {node["message_id"] for node in nodes}
    roots = [node for node in nodes if node["parent_id"] not in known]
    if len(roots) != 1 or roots[0]["parent_id"]:
        return Record(rows[0].number, {"id": name}, "its messages do not lead to one first message")
    return Record(rows[0].number, {"id": name, "prompt": roots[0]})


def _best_path(node: Any) -> Iterator[Any]:
    """From the first message down, without what was deleted."""
    while True:
        if not isinstance(node, dict):
            raise MalformedError("a message is no object")
        yield node
        replies = [reply for reply in node.get("replies") or () if isinstance(reply, dict) and not reply.get("deleted")]
        if not replies:
            return
        # sorted() is stable: where ranks are missing or equal, the first reply is taken.
        node = sorted(replies, key=_rank)[0]


def _rank(reply: Mapping[str, Any]) -> float:
    rank = reply.get("rank")
    return float(rank) if isinstance(rank, int | float) else float("inf")
