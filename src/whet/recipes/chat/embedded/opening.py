"""Where do the embedded conversations lie, prepared? In whet's home, made at the first use."""

import hashlib
import json
import platform
import tempfile
from pathlib import Path

from whet.base import env
from whet.base.errors import WhetError
from whet.recipes.chat.builder import Options, build
from whet.recipes.chat.dataset import ChatDataset, open_dataset
from whet.recipes.chat.embedded.composing import conversations
from whet.run import durable

OPTIONS = Options(format="openai", vocab_size=4096, max_length=512, train_split=0.96, max_bad=0)


_PACKAGE = Path(__file__).parents[3]
_MADE_FROM = ("cli", "config", "plan/rules", "recipes/chat")
"""Where the conversations come from, besides Python's library."""


def open_embedded() -> ChatDataset:
    """The prepared conversations; made again for another whet or Python, or where they are damaged."""
    folder = env.home() / "chat" / f"embedded-{_key()}"
    try:
        return open_dataset(folder, verify=True)
    except (WhetError, OSError):
        return _make(folder)


def _key() -> str:
    """Changes whenever another Python or another source of ours could give other bytes."""
    digest = hashlib.sha256(platform.python_version().encode())
    for part in _MADE_FROM:
        for path in sorted((_PACKAGE / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _make(folder: Path) -> ChatDataset:
    lines = "".join(
        json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n"
        for turns in conversations()
    )
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "embedded.jsonl"
        file.write_text(lines, encoding="utf-8")
        try:
            if folder.exists():
                durable.remove(folder)
            # One by one: a training may fork later, and threads do not survive that.
            build(file, folder, OPTIONS, told=lambda _what, _done, _total: None, in_threads=False)
        except WhetError:
            # Another process may have made it meanwhile; a home that cannot be written costs a folder elsewhere.
            if not folder.exists():
                folder = Path(tempfile.mkdtemp(prefix="whet-chat-")) / folder.name
                build(file, folder, OPTIONS, told=lambda _what, _done, _total: None, in_threads=False)
    return open_dataset(folder)
