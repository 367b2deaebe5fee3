"""What does Python's library say of itself? The first sentences of docstrings of modules that many use."""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from whet.recipes.chat.embedded.fact import Fact, first_sentences

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
_SHORTEST = 15


def python_facts() -> Iterator[Fact]:
    """In a fixed order; a module that this Python lacks is passed over."""
    root = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        place = root.joinpath(*module.split("."))
        path = next((one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()), None)
        if path is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
        # The C half of a module has its docstrings in Python too, under another file's name.
        public = "os.path" if module == "posixpath" else module
        for suffix in ("concurrent.futures.", "json.", "asyncio."):
            public = suffix.removesuffix(".") if public.startswith(suffix) else public
        if module == public and (told := _told(tree)):
            yield Fact(
                told, (f"What is the module {module}?", f"What is {module} in Python for?", f"What does {module} do?")
            )
        yield from _inside(tree.body, public)


def _inside(body: list[ast.stmt], prefix: str) -> Iterator[Fact]:
    for made in body:
        if not isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or made.name.startswith("_"):
            continue
        name = f"{prefix}.{made.name}"
        if told := _told(made):
            is_class = isinstance(made, ast.ClassDef)
            yield Fact(
                told,
                (f"What is {name}?", f"What is the class {name} for?", f"Explain {name}.")
                if is_class
                else (f"What does {name} do?", f"What is {name} for?", f"Explain {name}."),
            )
        if isinstance(made, ast.ClassDef):
            yield from _inside(made.body, name)


def _told(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
    told = first_sentences(paragraph).removesuffix("For example:").rstrip()
    if told.endswith(":"):
        return ""  # What it announces is left out.
    return told if len(told) >= _SHORTEST and told.isascii() else ""
