"""Read conversation files: ShareGPT, Alpaca, OpenAI, OpenAssistant and TRM folders."""

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
    """Convert a list of messages to turns. Role and text are the values of the first key that a message has."""
    if not isinstance(listed, list):
        raise MalformedError("its turns are not a list")
    turns = []
    for number, message in enumerate(listed, 1):
        if type(message) is not dict:
            raise MalformedError(f"turn {number} is not an object")
        role = parse_role(_first_value(message, role_keys), number, role_keys)
        turns.append(Turn(role, parse_text(_first_value(message, text_keys), f"turn {number}")))
    return tuple(turns)


def parse_text(value: Any, where: str) -> str:
    """Return the text of a message, given as a string or a list of text parts."""
    if type(value) is str:
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        other = [str(part.get("type")) for part in value if part.get("type") not in ("text", "input_text", None)]
        if other:
            raise MalformedError(f"{where} contains more than text: {other[0][:40]}")
        return "".join(parse_text(part.get("text"), where) for part in value)
    raise MalformedError(f"{where} has no text")


def _first_value(message: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        if key in message:
            return message[key]
    return None


def parse_role(value: Any, number: int, keys: tuple[str, ...]) -> Role:
    if type(value) is str:
        role = ROLE_NAMES.get(value) or ROLE_NAMES.get(value.strip().lower())
        if role is not None:
            return role
        raise MalformedError(f"turn {number} has an unknown role: {value[:40]!r}")
    raise MalformedError(f"turn {number} has no role ({' or '.join(keys)})")


# --- Alpaca: instruction, input, output -------------------------------------------------------------------------


def fits_alpaca(record: Mapping[str, Any]) -> bool:
    return "instruction" in record and "output" in record


def read_alpaca(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    turns = []
    system = record.get("system")
    if isinstance(system, str) and system.strip():
        turns.append(Turn("system", system))
    for pair in record.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise MalformedError("its history is not a list of pairs")
        turns += [Turn("user", parse_text(pair[0], "history")), Turn("assistant", parse_text(pair[1], "history"))]
    question = parse_text(record.get("instruction"), "instruction")
    more = record.get("input")
    if isinstance(more, str) and more.strip():
        question = f"{question}\n\n{more}"
    elif more is not None and not isinstance(more, str):
        raise MalformedError("input is not text")
    return (*turns, Turn("user", question), Turn("assistant", parse_text(record.get("output"), "output")))


# --- OpenAI: messages -------------------------------------------------------------------------------------------


def fits_openai(record: Mapping[str, Any]) -> bool:
    return "messages" in record


def read_openai(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    return read_turns(record.get("messages"), role_keys=("role",), text_keys=("content",))


# --- OpenAssistant: trees of messages, flat rows of such trees, or lists ------------------------------------------

_MESSAGE_KEYS = {"role_keys": ("role",), "text_keys": ("text", "content")}


def fits_openassistant(record: Mapping[str, Any]) -> bool:
    return is_tree(record) or is_message(record) or _is_list(record)


def is_message(record: Any) -> bool:
    """Return whether a record is a single message, as in the flat dump."""
    return isinstance(record, dict) and "message_id" in record and "parent_id" in record and "text" in record


def is_tree(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a tree of messages."""
    prompt = record.get("prompt")
    return isinstance(prompt, dict) and "replies" in prompt


def read_openassistant(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    if is_tree(record):
        return read_turns(list(_best_path(record["prompt"])), **_MESSAGE_KEYS)
    return read_turns(record.get("messages"), **_MESSAGE_KEYS)


def merge_openassistant(records: Iterable[Record]) -> Iterator[Record]:
    """Merge the messages of a tree, which are adjacent in the flat dump, into one record.

    Yield all other records unchanged.
    """
    rows: list[Record] = []
    for record in records:
        is_row = is_message(record.value)
        if rows and (not is_row or _tree_id(record.value) != _tree_id(rows[0].value)):
            yield _build_tree(rows)
            rows = []
        if is_row:
            rows.append(record)
        else:
            yield record
    if rows:
        yield _build_tree(rows)


def _is_list(record: Mapping[str, Any]) -> bool:
    messages = record.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and (first.get("role") == "prompter" or ("text" in first and "content" not in first))


def _tree_id(row: Mapping[str, Any]) -> Any:
    return row.get("message_tree_id") or row.get("message_id")


def _build_tree(rows: list[Record]) -> Record:
    """Build a tree from its messages. If a parent is missing, the record has an error."""
    replies: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    nodes = [{**row.value, "replies": []} for row in rows]
    for node in nodes:
        replies[node["parent_id"]].append(node)
    for node in nodes:
        node["replies"] = replies.get(node["message_id"], [])
    name = str(_tree_id(rows[0].value))
    known = {node["message_id"] for node in nodes}
    roots = [node for node in nodes if node["parent_id"] not in known]
    if len(roots) != 1 or roots[0]["parent_id"]:
        return Record(rows[0].number, {"id": name}, "its messages do not form a tree with one root")
    return Record(rows[0].number, {"id": name, "prompt": roots[0]})


def _best_path(node: Any) -> Iterator[Any]:
    """Yield the messages from the root to a leaf, following the best-ranked reply that is not deleted."""
    while True:
        if not isinstance(node, dict):
            raise MalformedError("a message is not an object")
        yield node
        replies = [reply for reply in node.get("replies") or () if isinstance(reply, dict) and not reply.get("deleted")]
        if not replies:
            return
        # min() returns the first reply if ranks are missing or equal.
        node = min(replies, key=_rank)


def _rank(reply: Mapping[str, Any]) -> float:
    rank = reply.get("rank")
    return float(rank) if isinstance(rank, int | float) else float("inf")


# --- ShareGPT: conversations of from and value ------------------------------------------------------------------


def fits_sharegpt(record: Mapping[str, Any]) -> bool:
    return "conversations" in record or "conversation" in record


def read_sharegpt(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    listed = record.get("conversations", record.get("conversation"))
    turns = read_turns(listed, role_keys=("from", "role"), text_keys=("value", "content", "text"))
    system = record.get("system")
    if isinstance(system, str) and system.strip() and turns and turns[0].role != "system":
        return (Turn("system", system), *turns)
    return turns


# --- Folders prepared by the chat fork of TinyRecursiveModels ------------------------------------------------------
#
# train/ and test/ contain `all__inputs.npy`: padded rows of token ids, with one conversation per row. tokenizer/
# contains the tokenizer. A turn is enclosed in <|user|> and <|enduser|>, or <|assistant|> and <|endassistant|>. A last
# turn without its end token was truncated and is dropped.

TRM_ROWS = "all__inputs.npy"
_TRM_ROLES = ("user", "assistant")
_TRM_HINT = "the JSON file that it was prepared from"


def is_trm_folder(path: Path) -> bool:
    """Return whether a folder has the files that the chat fork of TinyRecursiveModels writes."""
    return all(
        (path / name).is_file() for name in ("train/dataset.json", f"train/{TRM_ROWS}", "tokenizer/tokenizer.json")
    )


def read_trm_rows(path: Path) -> Iterator[Record]:
    """Yield the conversations of a file of rows, as OpenAI messages."""
    import numpy as np
    from tokenizers import Tokenizer

    folder = path.parent.parent
    try:
        engine = Tokenizer.from_str(
            read_regular_file(folder / "tokenizer" / "tokenizer.json", follows_links=True).decode()
        )
    except WhetError:
        raise
    except Exception as error:  # The tokenizers library raises bare Exception.
        got = f"tokenizer/tokenizer.json: {str(error)[:160]}"
        raise UsageError(f"{folder} is not a folder of conversations", got=got, try_=_TRM_HINT) from None
    starts = {engine.token_to_id(f"<|{role}|>"): role for role in _TRM_ROLES}
    ends = {engine.token_to_id(f"<|end{role}|>") for role in _TRM_ROLES}
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(
            f"{path} is not an array of numbers", got=str(error)[:200], try_="the unchanged file"
        ) from None
    if None in starts or None in ends or rows.ndim != 2 or rows.dtype.kind not in "iu":
        got = f"{rows.ndim} dimensions of {rows.dtype}" if None not in ends else "a tokenizer without <|enduser|>"
        raise UsageError(f"{folder} is not a folder of conversations", got=got, try_=_TRM_HINT)
    for number, row in enumerate(rows, 1):
        messages: list[dict[str, str]] = []
        role, text_ids = "", list[int]()
        for token in row.tolist():
            if token in starts:
                role, text_ids = starts[token], []
            elif token in ends and role:
                messages.append({"role": role, "content": engine.decode(text_ids, skip_special_tokens=False)})
                role = ""
            else:
                text_ids.append(token)
        yield Record(number, {"messages": messages})


# --- All formats ------------------------------------------------------------------------------------------------------

# The number of records that are examined to detect the format.
_NUM_DETECTED = 64


class Format(NamedTuple):
    """The functions to read a file format and convert its records to conversations."""

    name: str
    fits: Callable[[Mapping[str, Any]], bool]
    """Returns whether a record has this format."""
    read: Callable[[Mapping[str, Any]], tuple[Turn, ...]]
    merge: Callable[[Iterable[Record]], Iterator[Record]] = iter
    """Merges the records of one conversation."""
    records: Callable[[Path], Iterator[Record]] = read_records
    """Reads the records of a file."""


# If several formats fit equally well, the first one is used. OpenAssistant precedes OpenAI, whose check is less strict.
FORMATS = {
    item.name: item
    for item in (
        Format("sharegpt", fits_sharegpt, read_sharegpt),
        Format("alpaca", fits_alpaca, read_alpaca),
        Format("openassistant", fits_openassistant, read_openassistant, merge_openassistant),
        Format("openai", fits_openai, read_openai),
    )
}

TRM_FOLDER = Format("trm-folder", fits_openai, read_openai, records=read_trm_rows)
"""Detected by the files of the folder, not by records."""


def detect_format(path: Path) -> Format:
    """Return the format that matches the largest number of the first records."""
    first = list(islice(read_records(path), _NUM_DETECTED))
    objects = [record.value for record in first if isinstance(record.value, dict)]
    fitting = Counter(name for value in objects for name, item in FORMATS.items() if item.fits(value))
    if not fitting:
        raise UsageError(
            f"the records of {path} have no known format",
            got=_describe_first(first),
            try_="conversations (sharegpt), instruction and output (alpaca), messages (openai, openassistant)",
        )
    return max(FORMATS.values(), key=lambda item: fitting[item.name])


def _describe_first(records: Sequence[Record]) -> str:
    """Describe the first record, for the error message if no format fits."""
    record = next((record for record in records if isinstance(record.value, dict)), next(iter(records), None))
    if record is None:
        return "no records"
    if isinstance(record.value, dict):
        return ascii(f"the first has the keys {', '.join(map(str, list(record.value)[:8]))}"[:200])[1:-1]
    return f"record {record.number}: {record.error or 'not an object'}"
