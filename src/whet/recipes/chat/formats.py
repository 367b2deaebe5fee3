"""The formats of conversation files: ShareGPT, Alpaca, OpenAI, OpenAssistant and TRM folders."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from whet.base.errors import UsageError, WhetError
from whet.recipes.chat.conversation import MalformedError, Role, Turn
from whet.recipes.chat.json_records import Record, read_records
from whet.run.disk import read_regular_file

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
            Turn(
                _role(_first_value(said, role_keys), number, role_keys),
                text_of(_first_value(said, text_keys), f"turn {number}"),
            )
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


def _first_value(said: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
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


def fits_alpaca(record: Mapping[str, Any]) -> bool:
    """Whether the record has this shape."""
    return "instruction" in record and "output" in record


def read_alpaca(record: Mapping[str, Any]) -> tuple[Turn, ...]:
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


def fits_openai(record: Mapping[str, Any]) -> bool:
    """Whether the record has this shape."""
    return "messages" in record


def read_openai(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Its turns."""
    return read_turns(record.get("messages"), role_keys=("role",), text_keys=("content",))


_MESSAGE_KEYS = {"role_keys": ("role",), "text_keys": ("text", "content")}


def fits_openassistant(record: Mapping[str, Any]) -> bool:
    """Whether the record has this shape."""
    return is_tree(record) or is_message(record) or _is_list(record)


def is_message(record: Any) -> bool:
    """Whether this is a row of the flat dump."""
    return isinstance(record, dict) and "message_id" in record and "parent_id" in record and "text" in record


def is_tree(record: Mapping[str, Any]) -> bool:
    """Whether this is a tree of the dump."""
    prompt = record.get("prompt")
    return isinstance(prompt, dict) and "replies" in prompt


def read_openassistant(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Its turns."""
    if is_tree(record):
        return read_turns(list(_best_path(record["prompt"])), **_MESSAGE_KEYS)
    return read_turns(record.get("messages"), **_MESSAGE_KEYS)


def merge_openassistant(records: Iterable[Record]) -> Iterator[Record]:
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


def fits_sharegpt(record: Mapping[str, Any]) -> bool:
    """Whether the record has this shape."""
    return _LIST in record or _OTHER_LIST in record


def read_sharegpt(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Its turns; a system's text may stand beside them."""
    listed = record.get(_LIST, record.get(_OTHER_LIST))
    turns = read_turns(listed, role_keys=("from", "role"), text_keys=("value", "content", "text"))
    system = record.get("system")
    if isinstance(system, str) and system.strip() and turns and turns[0].role != "system":
        return (Turn("system", system), *turns)
    return turns


_LIST, _OTHER_LIST = "conversations", "conversation"


TRM_ROWS = "all__inputs.npy"
_TRM_ROLES = ("user", "assistant")
_TRM_HINT = "the JSON file that it was made from"


def is_trm_folder(path: Path) -> bool:
    """Whether a folder was prepared so."""
    return all(
        (path / name).is_file() for name in ("train/dataset.json", f"train/{TRM_ROWS}", "tokenizer/tokenizer.json")
    )


def fits_trm_folder(record: Mapping[str, Any]) -> bool:
    """Whether the record was read here."""
    return fits_openai(record)


def read_trm_folder(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Its turns."""
    return read_openai(record)


def read_trm_rows(path: Path) -> Iterator[Record]:
    """The conversations of a file of rows."""
    import numpy as np
    from tokenizers import Tokenizer

    folder = path.parent.parent
    try:
        engine = Tokenizer.from_str(
            read_regular_file(folder / "tokenizer" / "tokenizer.json", follows_links=True).decode()
        )
    except WhetError:
        raise
    except Exception as error:  # The library raises bare Exception.
        got = f"tokenizer/tokenizer.json: {str(error)[:160]}"
        raise UsageError(f"{folder} is no folder of conversations", got=got, try_=_TRM_HINT) from None
    starts = {engine.token_to_id(f"<|{role}|>"): role for role in _TRM_ROLES}
    ends = {engine.token_to_id(f"<|end{role}|>") for role in _TRM_ROLES}
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"{path} holds not numbers", got=str(error)[:200], try_="the file as it was written") from None
    if None in starts or None in ends or rows.ndim != 2 or rows.dtype.kind not in "iu":
        got = f"{rows.ndim} dimensions of {rows.dtype}" if None not in ends else "a tokenizer without <|enduser|>"
        raise UsageError(f"{folder} is no folder of conversations", got=got, try_=_TRM_HINT)
    for number, row in enumerate(rows, 1):
        messages: list[dict[str, str]] = []
        role, inside = "", list[int]()
        for token in row.tolist():
            if token in starts:
                role, inside = starts[token], []
            elif token in ends and role:
                messages.append({"role": role, "content": engine.decode(inside, skip_special_tokens=False)})
                role = ""
            else:
                inside.append(token)
        yield Record(number, {"messages": messages})


_NUM_DETECTED = 64


class Format(NamedTuple):
    """How records become turns."""

    name: str
    fits: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any]], tuple[Turn, ...]]
    gather: Callable[[Iterable[Record]], Iterator[Record]] = iter
    """Puts records together that are one conversation only together."""
    records: Callable[[Path], Iterator[Record]] = read_records
    """Reads a file."""


# The order decides where two fit: lists of messages are OpenAssistant's only where they say so.
FORMATS = {
    shape.name: shape
    for shape in (
        Format("sharegpt", fits_sharegpt, read_sharegpt),
        Format("alpaca", fits_alpaca, read_alpaca),
        Format("openassistant", fits_openassistant, read_openassistant, merge_openassistant),
        Format("openai", fits_openai, read_openai),
    )
}

TRM_FOLDER = Format("trm-folder", fits_trm_folder, read_trm_folder, records=read_trm_rows)
"""Found by its files, not by records."""


def detect_format(path: Path) -> Format:
    """The shape that most of the first records have."""
    looked = list(islice(read_records(path), _NUM_DETECTED))
    seen = [record.value for record in looked if isinstance(record.value, dict)]
    fitting = Counter(name for value in seen for name, shape in FORMATS.items() if shape.fits(value))
    if not fitting:
        raise UsageError(
            f"the records of {path} have no known shape",
            got=_describe_first(looked),
            try_="conversations (sharegpt), instruction and output (alpaca), messages (openai, openassistant)",
        )
    return max((FORMATS[name] for name in FORMATS), key=lambda shape: fitting[shape.name])


def _describe_first(looked: Sequence[Record]) -> str:
    """The first record as far as it says why nothing fits."""
    record = next((record for record in looked if isinstance(record.value, dict)), next(iter(looked), None))
    if record is None:
        return "no records"
    if isinstance(record.value, dict):
        return ascii(f"the first has the keys {', '.join(map(str, list(record.value)[:8]))}"[:200])[1:-1]
    return f"record {record.number}: {record.fault or 'no object'}"
