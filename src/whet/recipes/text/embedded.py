"""The default dataset: docstring paragraphs of six installed libraries, labeled by library.

This is real text that is available wherever torch and transformers are installed. The source files are read in place:
nothing is downloaded, imported or shipped. The texts depend only on the installed versions, not on the seed of a run,
so runs with different seeds have the same test split.
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
from whet.base.extras import install_hint
from whet.recipes.text.config import EMBEDDED_ROWS_PER_CLASS
from whet.recipes.text.corpus import Corpus, Examples, split
from whet.run import durable

LIBRARIES = ("stdlib", "torch", "transformers", "numpy", "sympy", "networkx")
MIN_LENGTH, MAX_LENGTH = 30, 400
_ALGORITHM = 2
"""Increment this number whenever the same installed files would produce different rows."""
_MAX_PER_FILE = 25
"""The number of paragraphs first taken from each file. Without this limit, a few long files would fill a class."""
_READ_AHEAD = 16

_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "_vendor", "ensurepip", "__pycache__"),
    *("include", "lib", "bin", "share"),
}
_LIBRARY_NAMES = re.compile(
    r"(?:py)?torch|transformers?|numpy|sympy|networkx|hugging ?face|\b(?:np|nx|hf|cpython)\b",
    re.IGNORECASE,
)
_NOT_PROSE = re.compile(r"^\s*[-=]{3,}|>>>|\.\. ", re.MULTILINE)
"""Matches an underlined heading, an example or a directive."""


def read_docstrings(*, rows_per_class: int = EMBEDDED_ROWS_PER_CLASS) -> Corpus:
    """Read the embedded corpus, with the same number of rows for each library. The result is cached on disk."""
    cache = env.home() / "text" / f"docstrings-{_cache_key(rows_per_class)}.json"
    examples = _read_cache(cache)
    if examples is None:
        examples = _collect(rows_per_class)
        _write_cache(cache, examples=examples)
    return split(examples, classes=LIBRARIES)


def check_libraries() -> None:
    """Raise WhetError if a library whose docstrings are read is missing."""
    for library in LIBRARIES:
        _root(library)


def remove_library_names(text: str) -> str:
    """Remove the names that would reveal a text's library.

    >>> remove_library_names("See `torch.nn.Linear` or np.dot from NumPy.")
    'See `.nn.Linear` or .dot from .'
    """
    return " ".join(_LIBRARY_NAMES.sub("", text).split())


# --- extraction -------------------------------------------------------------------------------------------------------


def _collect(rows_per_class: int) -> Examples:
    check_libraries()
    seen: set[str] = set()
    texts: list[str] = []
    labels: list[int] = []
    # Share `seen` between libraries: a paragraph that occurs in two libraries has no clear label.
    for label, library in enumerate(LIBRARIES):
        paragraphs = _read_library(library, seen=seen, enough=rows_per_class)
        texts += paragraphs
        labels += [label] * len(paragraphs)
    return Examples(texts=tuple(texts), labels=tuple(labels))


def _read_library(library: str, *, seen: set[str], enough: int) -> list[str]:
    """Return `enough` paragraphs that are not in `seen`, and add them to `seen`."""
    texts: list[str] = []
    for paragraph in _paragraphs(_files(_root(library))):
        text = remove_library_names(paragraph)
        # Compare letters only, so that near-identical paragraphs of two libraries count once.
        letters = re.sub(r"[\W\d_]+", "", text).casefold()
        if MIN_LENGTH <= len(text) <= MAX_LENGTH and letters not in seen:
            seen.add(letters)
            texts.append(text)
            if len(texts) == enough:
                return texts
    raise WhetError(
        f"the installed {library} has too few docstrings to train on",
        got=f"{len(texts)} of {enough} paragraphs",
        try_="data=FILE with your own texts and labels",
    )


def _paragraphs(files: list[Path]) -> Iterator[str]:
    """Yield the first paragraphs of docstrings, limited per file; then the remaining ones; then second paragraphs."""
    remaining: list[str] = []
    second: list[str] = []
    for source in _read_ahead(files):
        docstrings = [re.split(r"\n\s*\n", text, maxsplit=2) for text in _docstrings(source)]
        yield from (parts[0] for parts in docstrings[:_MAX_PER_FILE])
        remaining += [parts[0] for parts in docstrings[_MAX_PER_FILE:]]
        second += [parts[1] for parts in docstrings if len(parts) > 1 and not _NOT_PROSE.search(parts[1])]
    yield from remaining
    yield from second


def _root(library: str) -> Path:
    if library == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(library)  # find_spec locates a top-level package without importing it.
    if spec is None or spec.origin is None:
        # Do not skip the library: with five classes, this would be a different task with a different accuracy.
        raise WhetError(
            f"the embedded texts need {library}, which is not installed",
            got=f"no package {library!r} (classes: {', '.join(LIBRARIES)})",
            try_=f"{install_hint('text')}, or data=FILE with your own texts and labels",
        )
    return Path(spec.origin).parent


def _files(root: Path) -> list[Path]:
    """Return the Python files of the library, ordered by a hash of their names: any prefix is a random sample."""
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        # Assign in place: os.walk then skips these folders.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    return [root / name for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())]


def _read_ahead(files: list[Path]) -> Iterator[bytes]:
    """Yield the contents of the files in order. Threads read ahead, because uncached files are slow to read."""
    with ThreadPoolExecutor(_READ_AHEAD) as pool:
        pending = deque(pool.submit(_content, path) for path in files[:_READ_AHEAD])
        for following in (*files[_READ_AHEAD:], *[None] * len(pending)):
            yield pending.popleft().result()
            if following is not None:
                pending.append(pool.submit(_content, following))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # Skip unreadable files; there are thousands of others.


def _docstrings(source: bytes) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ignore warnings about invalid escapes in old files.
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    nodes: deque[ast.AST] = deque([tree])
    while nodes:
        node = nodes.popleft()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
            # Descend only into the bodies of definitions: expressions are most of a tree and contain no docstrings.
            nodes.extend(node.body)


# --- cache ------------------------------------------------------------------------------------------------------------


def _cache_key(rows_per_class: int) -> str:
    """Return a key that changes with everything that can change the rows: library versions and _ALGORITHM."""
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
    """Return the cached rows, or None if the file is missing or damaged."""
    try:
        cached = json.loads(path.read_bytes())
        rows = cached["rows"]
        if cached["sha256"] != _checksum(rows):
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
        return  # Without a writable home, the next start takes a few seconds longer.


def _checksum(rows: list[list[object]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
