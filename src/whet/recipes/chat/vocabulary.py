"""Where does a tokenizer come from that is not learned here? A file, a folder, or a name on the hub."""

from pathlib import Path

from whet.base.errors import UsageError, WhetError
from whet.recipes.chat.tokenizer import ChatTokenizer
from whet.recipes.hub import explain_hub_error
from whet.run.disk import read_regular_file

BYTE_PAIRS = "bpe"
"""The word for a byte-level vocabulary learned from the training conversations."""

_FILE = "tokenizer.json"


def find_tokenizer(word: str) -> ChatTokenizer:
    """The tokenizer that a word names; the hub's cache is asked before the hub."""
    path = Path(word).expanduser()
    if path.is_dir():
        path = path / _FILE
        if not path.is_file():
            raise UsageError(f"no tokenizer in {word}", got=f"no {_FILE}", try_="a folder with a fast tokenizer")
    if not path.is_file():
        # A dot alone says nothing: many names on the hub have one (Qwen2.5).
        if path.suffix == ".json" or word.startswith((".", "/", "~")):
            raise UsageError("no such tokenizer", got=word, try_=f"{BYTE_PAIRS}, a {_FILE}, or a name on the hub")
        path = _from_hub(word)
    return ChatTokenizer.from_json(read_regular_file(path, follows_links=True))


def _from_hub(word: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    name, _, revision = word.partition("@")
    reason = Exception()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # Without a network it would tell of each of six tries.
    try:
        for is_local in (True, False):
            try:
                return Path(hf_hub_download(name, _FILE, revision=revision or None, local_files_only=is_local))
            except Exception as error:  # Many kinds: no network, no such name, no leave to read it.
                reason = error
    finally:
        logging.set_verbosity(verbosity)
    what, detail = explain_hub_error(reason)
    raise WhetError(
        f"no file or folder {name} is here, and {what}",
        got=f"{word}, looked up on the hub since it may be a name there: {detail}",
        try_=f"--tokenizer {BYTE_PAIRS}, learned from the data; or a {_FILE}",
    )
