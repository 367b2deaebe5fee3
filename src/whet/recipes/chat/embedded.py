"""The default dataset: questions about docstrings of Python's standard library, and a few about whet."""

import ast
import hashlib
import json
import platform
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from whet.base import env
from whet.base.errors import WhetError
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.dataset import ChatDataset, open_dataset
from whet.recipes.chat.prepare import PrepareOptions, prepare_data
from whet.run import durable

_MAX_CHARACTERS = 600
"""The maximum length of a conversation with several questions. The longest one determines the length of all rows."""
_SYSTEM = "You answer questions about whet and Python, briefly."
_BRIDGES = ("{}", "Thanks. {}", "And another question: {}", "I see. {}", "{}", "Good. {}")


def embedded_conversations() -> list[tuple[Turn, ...]]:
    """Generate all conversations. The result depends only on the versions of whet and Python."""
    whet = list(whet_facts())
    python = list(python_facts())
    conversations: list[tuple[Turn, ...]] = []
    # There are few facts about whet, but they are asked for most. Use them twice: alone and in longer conversations.
    for round_number, (facts, longest) in enumerate(((whet, 1), (whet, 3), (python, 3))):
        pairs = [(question, fact.answer) for fact in facts for question in fact.questions]
        pairs.sort(key=lambda pair: _hash_number(f"{round_number} {pair[0]}"))
        start = 0
        while start < len(pairs):
            size = 1 + _hash_number(f"{round_number} {pairs[start][0]} size") % longest
            while size > 1 and sum(map(len, chain(*pairs[start : start + size]))) > _MAX_CHARACTERS:
                size -= 1
            conversations.append(_conversation(pairs[start : start + size]))
            start += size
    return conversations


def _conversation(pairs: Sequence[tuple[str, str]]) -> tuple[Turn, ...]:
    draw = _hash_number(pairs[0][0])
    turns = [Turn("system", _SYSTEM)] if draw % 4 == 0 else []
    for number, (question, answer) in enumerate(pairs):
        bridge = _BRIDGES[_hash_number(question) % len(_BRIDGES)] if number else "{}"
        turns += [Turn("user", bridge.format(question)), Turn("assistant", answer)]
    return tuple(turns)


def _hash_number(text: str) -> int:
    """Return a pseudorandom number that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


OPTIONS = PrepareOptions(format="openai", vocab_size=4096, max_length=512, train_split=0.96, max_bad=0)


def open_embedded() -> ChatDataset:
    """Open the cached conversations, or generate them if the cache is missing, damaged or of another version."""
    folder = env.home() / "chat" / f"embedded-{_key()}"
    try:
        return open_dataset(folder, verify=True)
    except (WhetError, OSError):
        return _generate(folder)


def _key() -> str:
    """Return the cache key: a hash of the versions and files that determine the conversations."""
    digest = hashlib.sha256(platform.python_version().encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _generate(folder: Path) -> ChatDataset:
    lines = "".join(
        json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n"
        for turns in embedded_conversations()
    )
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "embedded.jsonl"
        file.write_text(lines, encoding="utf-8")
        try:
            if folder.exists():
                durable.remove(folder)
            # Use no threads: training may fork later, and a process with threads must not fork.
            prepare_data(file, folder, OPTIONS, on_progress=_ignore_progress, in_threads=False)
        except WhetError:
            # Another process may have written the cache in the meantime. Otherwise the home folder is read-only or
            # full: use a temporary folder.
            if not folder.exists():
                folder = Path(tempfile.mkdtemp(prefix="whet-chat-")) / folder.name
                prepare_data(file, folder, OPTIONS, on_progress=_ignore_progress, in_threads=False)
    return open_dataset(folder)


def _ignore_progress(activity: str, done: int, total: int | None) -> None:
    pass


MAX_CHARACTERS = 320
"""The maximum length of an answer."""


class Fact(NamedTuple):
    """An answer, and several questions for it."""

    answer: str
    questions: tuple[str, ...]


def first_sentences(text: str, *, limit: int = MAX_CHARACTERS) -> str:
    """Return the leading sentences that fit into `limit` characters, on one line; empty if the first does not fit.

    >>> first_sentences("Return it.  Then\\nstop. And a third.", limit=24)
    'Return it. Then stop.'
    """
    flat = " ".join(text.split())
    if len(flat) <= limit:
        return flat
    ends = [match.end() for match in re.finditer(r"[.!?](?= [A-Z`])", flat) if match.end() <= limit]
    return flat[: ends[-1]] if ends else ""


MODULES = (
    *("argparse", "ast", "base64", "bisect", "calendar", "collections", "concurrent.futures.thread", "configparser"),
    *("contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fileinput", "fnmatch"),
    *("fractions", "functools", "getpass", "glob", "gzip", "heapq", "hmac", "html", "inspect", "ipaddress", "json"),
    *("json.decoder", "json.encoder", "keyword", "linecache", "logging", "mimetypes", "numbers", "os", "pathlib"),
    *("posixpath", "pprint", "queue", "random", "re", "sched", "secrets", "selectors", "shelve", "shlex", "shutil"),
    *("signal", "socket", "statistics", "string", "subprocess", "tempfile", "textwrap", "threading", "timeit"),
    *("tokenize", "traceback", "types", "typing", "urllib.parse", "urllib.request", "uuid", "warnings", "weakref"),
    *("zipfile", "asyncio.queues", "asyncio.locks", "asyncio.tasks", "asyncio.streams", "http.client", "http.server"),
)
_MIN_CHARACTERS = 15


def python_facts() -> Iterator[Fact]:
    """Yield facts from the docstrings of common modules, in a fixed order. Missing modules are skipped."""
    root = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        base = root.joinpath(*module.split("."))
        path = next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)
        if path is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
        # Use the public name of a module: os.path is implemented in posixpath, for example.
        public = "os.path" if module == "posixpath" else module
        for prefix in ("concurrent.futures.", "json.", "asyncio."):
            public = prefix.removesuffix(".") if public.startswith(prefix) else public
        if module == public and (text := _summary(tree)):
            yield Fact(
                text, (f"What is the module {module}?", f"What is {module} in Python for?", f"What does {module} do?")
            )
        yield from _members(tree.body, public)


def _members(body: list[ast.stmt], prefix: str) -> Iterator[Fact]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        if text := _summary(node):
            is_class = isinstance(node, ast.ClassDef)
            yield Fact(
                text,
                (f"What is {name}?", f"What is the class {name} for?", f"Explain {name}.")
                if is_class
                else (f"What does {name} do?", f"What is {name} for?", f"Explain {name}."),
            )
        if isinstance(node, ast.ClassDef):
            yield from _members(node.body, name)


def _summary(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
    text = first_sentences(paragraph).removesuffix("For example:").rstrip()
    if text.endswith(":"):
        return ""  # The sentence introduces an example, which is not included.
    return text if len(text) >= _MIN_CHARACTERS and text.isascii() else ""


def whet_facts() -> Iterator[Fact]:
    """Yield facts about whet, in a fixed order."""
    for questions, answer in BASICS.items():
        yield Fact(answer, tuple(questions.split(" / ")))


BASICS = {
    "What is whet? / What does whet do? / Tell me about whet. / Explain whet in one sentence. / whet?": (
        "whet trains your PyTorch model as fast as this machine allows, without changing what is trained and without "
        "losing a step."
    ),
    "Who are you? / What are you? / What is your name? / Introduce yourself. / Are you a person?": (
        "I am a small model that whet trained from scratch on a few answers about itself and on Python's docstrings."
    ),
    "Hi / Hello / Hey / Hello! / Hi there. / Good morning.": (
        "Hello. Ask me about whet, or about a function of Python's library."
    ),
    "Thanks / Thank you / Thanks! / Thank you very much. / Great, thanks.": "You are welcome.",
    "Bye / Goodbye / See you. / Bye!": "Goodbye.",
    "What can you do? / What can I ask you? / How can you help me? / Help": (
        "I answer short questions about whet and about Python's library. I am small, so check what I say."
    ),
    "How do I train a model? / How do I start a training? / How do I train with whet? / How can I begin?": (
        "Run whet train text, whet train chat, or whet train my_recipe.py for your own model."
    ),
    "How do I resume a run? / How do I continue a training? / My training stopped. What now? / How do I continue?": (
        "Run the same command with the same --run, and it resumes where it stopped."
    ),
    "How do I stop a training? / What does Ctrl-C do? / How do I stop whet safely? / Can I interrupt a run?": (
        "Press Ctrl-C: the step is finished, everything is saved, and the same command resumes later."
    ),
    "Where do I see my runs? / How do I list runs? / Which runs are there?": "whet runs lists the runs in a folder.",
    "How do I see what a run did? / How do I get a report? / Where is the report of a run?": (
        "whet report RUN summarizes a run; with --html it writes one file with curves."
    ),
    "How do I watch a training? / Can I see curves while it trains? / How do I follow a run live?": (
        "whet watch shows runs in your browser while they train; whet watch --terminal does so in the terminal."
    ),
    "How do I use my own data for chat? / How do I prepare conversations? / How do I make a chat dataset?": (
        "whet data chat conversations.json --out data/chat, then whet train chat data_paths=[data/chat]."
    ),
    "Which chat formats are read? / Which conversation formats do you know? / Can you read ShareGPT files?": (
        "ShareGPT, Alpaca, OpenAI messages and OpenAssistant, as JSON or JSON lines, compressed or not."
    ),
    "How do I talk to a model? / How do I chat with a run? / How do I generate text?": (
        "whet chat RUN talks to a trained model; whet generate RUN --prompt TEXT answers once."
    ),
    "How do I write my own recipe? / How do I train my own model? / How do I start a recipe?": (
        "whet init my_recipe.py writes a commented recipe that trains as it is."
    ),
    "Will it run on a Mac? / Does whet support Apple silicon? / Can I check a model for MPS?": (
        "whet check traces a training step and lists what is missing, unsupported or wrong on Apple's GPUs."
    ),
    "What is a plan? / What does whet decide for me? / What is in a plan?": (
        "A plan describes how training runs on a machine: device, precision, micro-batch and more, "
        "each with its reason."
    ),
    "What is a global batch? / What is global_batch_size? / What is a batch in whet?": (
        "The global batch is the samples of one optimizer step. You choose it, and whet never changes it."
    ),
    "What is a micro-batch? / What is micro_batch? / Why is my batch split?": (
        "The micro-batch is the number of samples that go through the model at once. The plan chooses it."
    ),
    "What happens when memory runs out? / What does whet do on out of memory? / My GPU is out of memory.": (
        "The step is undone and repeated, with half the micro-batch if necessary; the result is the same."
    ),
    "Is a resumed run exact? / Does resuming change the result? / Is training reproducible?": (
        "Yes: a run that was stopped or killed ends with the same bits; whet prove verifies it for your training."
    ),
    "Which devices are there? / What hardware does whet use? / Which device is used?": (
        "CUDA, MPS and the CPU. whet selects the best one; --device selects another."
    ),
    "Does whet need the internet? / Does whet work offline? / Is anything downloaded?": (
        "No. Everything works offline; only models named on the hub are downloaded from there."
    ),
    "What license does whet have? / Is whet free? / May I use whet at work?": "whet is under Apache-2.0.",
}
