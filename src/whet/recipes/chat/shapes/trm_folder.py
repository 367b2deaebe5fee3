"""A folder that the chat fork of TinyRecursiveModels prepared: rows of token ids, read back into texts.

train/ and test/ hold `all__inputs.npy`, padded rows of one conversation each; tokenizer/ says what the ids mean. A
turn lies between <|user|> and <|enduser|>, or <|assistant|> and <|endassistant|>. A last turn without its end was cut
and is left out.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError, WhetError
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.reading import Record
from whet.recipes.chat.shapes import openai
from whet.run.disk import read_regular_file

ROWS = "all__inputs.npy"
_ROLES = ("user", "assistant")
_SOURCE = "the JSON file that it was made from"


def is_folder(path: Path) -> bool:
    """Whether a folder was prepared so."""
    return all((path / name).is_file() for name in ("train/dataset.json", f"train/{ROWS}", "tokenizer/tokenizer.json"))


def fits(record: Mapping[str, Any]) -> bool:
    """Whether the record was read here."""
    return openai.fits(record)


def read(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Its turns."""
    return openai.read(record)


def records(path: Path) -> Iterator[Record]:
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
        raise UsageError(f"{folder} is no folder of conversations", got=got, try_=_SOURCE) from None
    starts = {engine.token_to_id(f"<|{role}|>"): role for role in _ROLES}
    ends = {engine.token_to_id(f"<|end{role}|>") for role in _ROLES}
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"{path} holds not numbers", got=str(error)[:200], try_="the file as it was written") from None
    if None in starts or None in ends or rows.ndim != 2 or rows.dtype.kind not in "iu":
        got = f"{rows.ndim} dimensions of {rows.dtype}" if None not in ends else "a tokenizer without <|enduser|>"
        raise UsageError(f"{folder} is no folder of conversations", got=got, try_=_SOURCE)
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
