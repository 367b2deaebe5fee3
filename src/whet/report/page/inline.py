"""How do modules that import each other become one script? Each is a function that gives what it exports.

The modules keep to two forms, one line each: `import { a, b } from "./x.js";` and `export` before a function, class or
const. Anything else is refused, so that what is put into a page is what runs on the live one.
"""

import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"

_IMPORT = re.compile(r'^import \{ (\w+(?:, \w+)*) \} from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


@cache
def one_script(entry: str) -> str:
    """The module and all it imports, those first that others need."""
    order: list[str] = []
    _visit(entry, order, above=())
    return '"use strict";\nconst modules = {};\n' + "".join(_wrapped(name) for name in order)


def static_text(name: str) -> str:
    """A file of the front end."""
    return (STATIC / name).read_text(encoding="utf-8")


def _visit(name: str, order: list[str], *, above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"modules that import each other: {' -> '.join((*above, name))}")
    if name in order:
        return
    for _, needed in _IMPORT.findall(static_text(name)):
        _visit(needed, order, above=(*above, name))
    order.append(name)


def _wrapped(name: str) -> str:
    source = static_text(name)
    exported = ", ".join(_EXPORT.findall(source))
    body = _EXPORT.sub("", _IMPORT.sub(r'const { \1 } = modules["\2"];', source))
    left = _LEFT.search(body)
    if left is not None:
        raise ValueError(f"{name} has a line that cannot be put into a page: {left[0]}")
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n'
