"""Small files of conversations of every shape, and records with one defect each."""

import json
from pathlib import Path
from typing import Any

SHAREGPT = {
    "id": "s1",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "What is 2 + 2?"},
        {"from": "gpt", "value": "4, or \u56db."},
        {"from": "human", "value": "And 3 + 3?"},
        {"from": "gpt", "value": "6."},
    ],
}
ALPACA = {"instruction": "Translate.", "input": "der Hund", "output": "the dog"}
OPENAI = {
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]},
        {"role": "assistant", "content": "4."},
        {"role": "tool", "content": "{}"},
        {"role": "tool", "content": "[]"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "No answer to this."},
    ]
}
OPENASSISTANT = {"messages": [{"role": "prompter", "text": "Hi"}, {"role": "assistant", "text": "Hello."}]}


def message(name: str, parent: str | None, role: str, text: str, **more: Any) -> dict[str, Any]:
    """A row of OpenAssistant's flat dump."""
    known = {"message_id": name, "parent_id": parent, "message_tree_id": "m1", "role": role, "text": text}
    return {**known, **more}


FLAT = [
    message("m1", None, "prompter", "Hi"),
    message("m2", "m1", "assistant", "The worse one.", rank=1),
    message("m3", "m1", "assistant", "The better one.", rank=0),
    message("m4", "m3", "prompter", "Removed.", deleted=True),
    message("m5", "m3", "prompter", "More?"),
    message("m6", "m5", "assistant", "Yes."),
]
TREE = {
    "message_tree_id": "m1",
    "prompt": {
        **FLAT[0],
        "replies": [
            {**FLAT[1], "replies": []},
            {**FLAT[2], "replies": [FLAT[3], {**FLAT[4], "replies": [{**FLAT[5], "replies": []}]}]},
        ],
    },
}
BRANCH = [("user", "Hi"), ("assistant", "The better one."), ("user", "More?"), ("assistant", "Yes.")]

GOLDEN: dict[str, tuple[str, list[dict[str, Any]], list[tuple[str, str]]]] = {
    "sharegpt": (
        "sharegpt",
        [SHAREGPT],
        [
            ("system", "Be brief."),
            ("user", "What is 2 + 2?"),
            ("assistant", "4, or \u56db."),
            ("user", "And 3 + 3?"),
            ("assistant", "6."),
        ],
    ),
    "alpaca": ("alpaca", [ALPACA], [("user", "Translate.\n\nder Hund"), ("assistant", "the dog")]),
    "openai": (
        "openai",
        [OPENAI],
        [
            ("system", "Be brief."),
            ("user", "What is 2 + 2?"),
            ("assistant", "4."),
            ("tool", "{}"),
            ("tool", "[]"),
            ("assistant", "Done."),
        ],
    ),
    "openassistant": ("openassistant", [OPENASSISTANT], [("user", "Hi"), ("assistant", "Hello.")]),
    "openassistant flat": ("openassistant", FLAT, BRANCH),
    "openassistant tree": ("openassistant", [TREE], BRANCH),
}

_OK = {"from": "human", "value": "Hi"}
DEFECTS: dict[str, tuple[bytes, str]] = {
    "bad JSON": (b'{"id": "x", "conversations": [}', "not JSON"),
    "a NUL": (b'{"id": "x", "conversations": "\0"}', "not JSON"),
    "no object": (b'"a text"', "not an object"),
    "another shape": (b'{"id": "x", "text": "a"}', "not in the format sharegpt"),
    "no list": (b'{"id": "x", "conversations": "a"}', "its turns are not a list"),
    "no turns": (b'{"id": "x", "conversations": []}', "no turns"),
    "no role": (b'{"id": "x", "conversations": [{"value": "Hi"}]}', "turn 1 has no role"),
    "an unknown role": (b'{"id": "x", "conversations": [{"from": "cat", "value": "Hi"}]}', "unknown role: 'cat'"),
    "no text": (b'{"id": "x", "conversations": [{"from": "gpt", "value": null}]}', "turn 1 has no text"),
    "an empty turn": (b'{"id": "x", "conversations": [{"from": "gpt", "value": " \\n"}]}', "(assistant) is empty"),
    "two answers": (
        json.dumps(
            {"id": "x", "conversations": [_OK, {"from": "gpt", "value": "a"}, {"from": "gpt", "value": "b"}]}
        ).encode(),
        "turns 2 and 3 both have the role assistant",
    ),
    "no answer": (json.dumps({"id": "x", "conversations": [_OK]}).encode(), "no turn of an assistant"),
    "half a pair": (b'{"id": "x", "conversations": [{"from": "gpt", "value": "\\ud800"}]}', ""),
    "no UTF-8": (b'{"id": "x", "conversations": [{"from": "gpt", "value": "\xff"}]}', ""),
}


def talk(number: int, *, words: int = 8) -> dict[str, Any]:
    """A conversation unlike the others."""
    asked = " ".join(f"word{number * 7 + place}" for place in range(words))
    reported = [{"from": "human", "value": f"What of {asked}?"}, {"from": "gpt", "value": f"Of {number}: {asked}."}]
    return {"id": f"c{number}", "conversations": reported}


def write_array(path: Path, records: list[Any]) -> Path:
    """One JSON array over many lines."""
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return path


def write_lines(path: Path, records: list[Any]) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
