"""The default dataset: docstring paragraphs of six installed libraries, labeled by library.

Real text that is present wherever torch and transformers are installed. Files are read in place: nothing is downloaded, imported
or shipped. The texts depend on the installed versions only, never on a run's seed, so runs with different seeds share a test split.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whet.base import env
from whet.base.errors import WhetError
from whet.recipes.text.config import EMBEDDED_ROWS_PER_CLASS
from whet.recipes.text.corpus import Corpus, Examples, split
from whet.run import durable

LIBRARIES = ("stdlib", "torch", "transformers", "numpy", "sympy", "networkx")
MIN_LENGTH, MAX_LENGTH = 30, 400
_ALGORITHM = 2
"""Raise it whenever the same installed files would give other rows."""
_FIRST_PER_FILE = 25
"""A few long files would otherwise fill a class."""

_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "_vendor", "ensurepip", "__pycache__"),
    *("include", "lib", "bin", "share"),
}
_LIBRARY_NAMES = re.compile(
    r"(?:py)?torch|transformers?|numpy|sympy|networkx|hugging ?face|\b(?:np|nx|hf|cpython)\b",
    re.IGNORECASE,
)
_READ_AHEAD = 16
_NOT_PROSE = re.compile(r"^\s*[-=]{3,}|>>>|\.\. ", re.MULTILINE)
"""An underlined heading, an example or a directive."""


def read_docstrings(*, rows_per_class: int = EMBEDDED_ROWS_PER_CLASS) -> Corpus:
    """The embedded corpus: as many rows of each library, read in seconds and kept for the next time."""
    cache = env.home() / "text" / f"docstrings-{_key(rows_per_class)}.json"
    examples = _read_cache(cache)
    if examples is None:
        examples = _collect(rows_per_class)
        _write_cache(cache, examples=examples)
    return split(examples, classes=LIBRARIES)


def remove_library_names(text: str) -> str:
    """The text without the names that would give its library away.

    >>> hide_names("See `torch.nn.Linear` or np.dot from NumPy.")
    'See `.nn.Linear` or .dot from .'
    """
    return " ".join(_LIBRARY_NAMES.sub("", text).split())


# --- reading ---------------------------------------------------------------------------------------------------------


def _collect(rows_per_class: int) -> Examples:
    seen: set[str] = set()
    texts: list[str] = []
    labels: list[int] = []
    for label, library in enumerate(LIBRARIES):
        found = _read_library(library, seen=seen, enough=rows_per_class)
        texts += found
        labels += [label] * len(found)
    return Examples(texts=tuple(texts), labels=tuple(labels))


def _read_library(library: str, *, seen: set[str], enough: int) -> list[str]:
    """`enough` paragraphs that are new to `seen`, which grows by them."""
    found: list[str] = []
    for paragraph in _candidates(_files(_root(library))):
        text = remove_library_names(paragraph)
        essence = re.sub(r"[\W\d_]+", "", text).casefold()
        if MIN_LENGTH <= len(text) <= MAX_LENGTH and essence not in seen:
            seen.add(essence)
            found.append(text)
            if len(found) == enough:
                return found
    raise WhetError(
        f"the installed {library} has too few docstrings to learn from",
        got=f"{len(found)} of {enough} paragraphs",
        try_="data=FILE with texts and labels of yours",
    )


def _candidates(files: list[Path]) -> Iterator[str]:
    """First paragraphs, a few of every file; then, where a library is small, the others and the second ones."""
    others: list[str] = []
    second: list[str] = []
    for source in _read_ahead(files):
        paragraphs = [re.split(r"\n\s*\n", text, maxsplit=2) for text in _docstrings(source)]
        yield from (parts[0] for parts in paragraphs[:_FIRST_PER_FILE])
        others += [parts[0] for parts in paragraphs[_FIRST_PER_FILE:]]
        second += [parts[1] for parts in paragraphs if len(parts) > 1 and not _NOT_PROSE.search(parts[1])]
    yield from others
    yield from second


def _root(library: str) -> Path:
    if library == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(library)  # Looks for a top-level package without importing it.
    if spec is None or spec.origin is None:
        # Fewer classes instead would make another task of it, with another accuracy, without anyone asking.
        raise WhetError(
            f"the embedded texts need {library}, which is not installed",
            got=f"no package {library!r} (classes: {', '.join(LIBRARIES)})",
            try_="pip install 'whet[text]', or data=FILE with texts and labels of yours",
        )
    return Path(spec.origin).parent


def _files(root: Path) -> list[Path]:
    """The library's own Python files in a fixed order that is spread over all of it."""
    found: list[str] = []
    for folder, names_below, names in os.walk(root):
        names_below[:] = [name for name in names_below if name not in _SKIPPED_FOLDERS]
        here = Path(folder).relative_to(root)
        found += [(here / name).as_posix() for name in names if name.endswith(".py")]
    return [root / name for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())]


def _read_ahead(files: list[Path]) -> Iterator[bytes]:
    """The contents of the files in order; the next ones are fetched meanwhile, since a cold disk takes its time."""
    with ThreadPoolExecutor(_READ_AHEAD) as pool:
        waiting = deque(pool.submit(_content, path) for path in files[:_READ_AHEAD])
        for following in (*files[_READ_AHEAD:], *[None] * len(waiting)):
            yield waiting.popleft().result()
            if following is not None:
                waiting.append(pool.submit(_content, following))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # One unreadable file of thousands: the next one serves as well.


def _docstrings(source: bytes) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The libraries' own: invalid escapes in old files.
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # As with one that cannot be read.
    nodes: deque[ast.AST] = deque([tree])
    while nodes:
        node = nodes.popleft()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
            # Only what is defined directly inside: expressions hold no docstrings and are most of a tree.
            nodes.extend(node.body)


# --- keeping ---------------------------------------------------------------------------------------------------------


def _key(rows_per_class: int) -> str:
    """Changes whenever another version of a library, of Python or of this file could give other rows."""
    versions = {library: _version(library) for library in LIBRARIES}
    facts = json.dumps([_ALGORITHM, rows_per_class, versions], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _version(library: str) -> str:
    if library == "stdlib":
        return platform.python_version()
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _read_cache(path: Path) -> Examples | None:
    """What was kept, or None when it is missing or not what was written."""
    try:
        kept = json.loads(path.read_bytes())
        rows = kept["rows"]
        if kept["sha256"] != _checksum(rows):
            return None
        return Examples(texts=tuple(text for text, _ in rows), labels=tuple(label for _, label in rows))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(path: Path, *, examples: Examples) -> None:
    rows = [list(row) for row in zip(examples.texts, examples.labels, strict=True)]
    try:
        durable.make_directory(path.parent)
        durable.write_file(path, data=json.dumps({"sha256": _checksum(rows), "rows": rows}).encode())
    except WhetError:
        return  # A home that cannot be written costs a few seconds at the next start, not the run.


def _checksum(rows: list[list[object]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
