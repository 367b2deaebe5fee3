"""Generate docs/api.md: the names of `import whet`, from the signatures and docstrings in their source."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import whet

SOURCE = Path(whet.__file__).parent
GROUPS = {
    "Train": ("train", "Session", "TrainResult", "OptimizerChoice", "tune"),
    "After training": ("load", "open_run", "summarize"),
    "Callbacks": ("Callback", "Action", "State", "Outcome"),
    "Plan": ("probe", "make_plan", "Plan"),
    "Trust": ("check", "compare"),
    "Search": ("search",),
    "Recipes and batches": ("Recipe", "GlobalBatch", "MicroBatch"),
    "Errors": ("WhetError",),
}
_HEAD = """# Python API

Everything that `import whet` offers. Arguments after `*` are given by name. `help(whet.train)` prints the same.

"""
_SECTION = re.compile(r"^(Args|Keywords|Returns|Yields|Raises):$", re.MULTILINE)
_FIELD = re.compile(r"^    (?:    )?(\*{0,2}\w+): (.*(?:\n(?:    )+ {4,}\S.*)*)", re.MULTILINE)


def api_page() -> str:
    """Return the page. A public name that is in no group is an error."""
    listed = [name for names in GROUPS.values() for name in names]
    public = [name for name in whet.__all__ if name != "__version__"]
    if sorted(listed) != sorted(public):
        raise SystemExit(f"error: not every public name is listed once\n  got: {set(listed) ^ set(public)}")
    text = _HEAD
    for group, names in GROUPS.items():
        text += f"## {group}\n\n" + "".join(_entry(name) for name in names)
    return text.rstrip() + "\n"


def _entry(name: str) -> str:
    module = SOURCE.parent / (whet._PUBLIC[name].replace(".", "/") + ".py")
    path = module if module.exists() else module.with_suffix("") / "__init__.py"
    nodes = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name]
    node = nodes[-1]
    if isinstance(node, ast.ClassDef):
        return _class_entry(node)
    # Of overloads, the first has the keywords and the last the docstring.
    assert isinstance(node, ast.FunctionDef)
    first = nodes[0]
    assert isinstance(first, ast.FunctionDef)
    return f"### whet.{name}\n\n```python\n{_signature(first, f'whet.{name}')}\n```\n\n{_prose(_doc(node))}\n"


def _class_entry(node: ast.ClassDef) -> str:
    text = f"### whet.{node.name}\n\n"
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    init = [method for method in methods if method.name == "__init__"]
    if init:
        text += f"```python\n{_signature(init[0], f'whet.{node.name}')}\n```\n\n"
    elif _is_dataclass(node):
        text += f"```python\n{_call(f'whet.{node.name}', _dataclass_arguments(node))}\n```\n\n"
    text += _prose(_doc(node)) + "\n" + _fields(node)
    for method in methods:
        if method.name.startswith("_") or not _doc(method):
            continue
        decorators = [ast.unparse(item) for item in method.decorator_list]
        name = method.name if "property" in decorators else _signature(method, method.name)
        text += f"#### {node.name}.{method.name}\n\n```python\n{name}\n```\n\n{_prose(_doc(method))}\n"
    return text


def _is_dataclass(node: ast.ClassDef) -> bool:
    """Return whether users make values of the class by its fields, and not by its constants (`Action.SAVE`)."""
    has_constants = any(f"ClassVar['{node.name}']" in ast.unparse(item) for item in node.body)
    return not has_constants and any("dataclass" in ast.unparse(item) for item in node.decorator_list)


def _dataclass_arguments(node: ast.ClassDef) -> list[str]:
    """Return the fields of a dataclass as the arguments of its constructor."""
    words = ["*"] if any("kw_only=True" in ast.unparse(item) for item in node.decorator_list) else []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or ast.unparse(item.annotation).startswith("ClassVar"):
            continue
        name, default = ast.unparse(item.target), ast.unparse(item.value) if item.value else None
        if default is not None and "init=False" in default:
            continue
        factory = re.search(r"default_factory=(\w+)", default or "")
        default = f"{factory[1]}()" if factory else default
        words.append(name if default is None else f"{name}={default}")
    return words


def _fields(node: ast.ClassDef) -> str:
    """Return a table of the annotated attributes that have a docstring below them."""
    rows = []
    for item, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            about = " ".join(str(after.value.value).split())
            rows.append(f"| `{ast.unparse(item.target)}` | {_linked(about)} |")
    return "| attribute | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n\n" if rows else ""


def _doc(node: ast.FunctionDef | ast.ClassDef) -> str:
    return ast.get_docstring(node) or ""


def _signature(node: ast.FunctionDef, name: str) -> str:
    """Return a call with names and defaults, without types: those are long, and the table explains each argument."""
    return _call(name, list(_arguments(node.args)))


def _call(name: str, words: list[str]) -> str:
    call = f"{name}({', '.join(words)})"
    if len(call) <= 100:
        return call
    lines = textwrap.wrap(", ".join(words) + ",", 92)
    return f"{name}(\n" + "".join(f"    {line}\n" for line in lines) + ")"


def _arguments(args: ast.arguments) -> Iterator[str]:
    defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip(args.args, defaults, strict=True):
        if arg.arg not in ("self", "cls"):
            yield arg.arg if default is None else f"{arg.arg}={ast.unparse(default)}"
    if args.vararg:
        yield f"*{args.vararg.arg}"
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield arg.arg if default is None else f"{arg.arg}={ast.unparse(default)}"
    if args.kwarg and args.kwarg.arg != "unknown":
        yield f"**{args.kwarg.arg}"


def _prose(doc: str) -> str:
    """Return a docstring as Markdown: sections of arguments as tables, examples as code."""
    parts = _SECTION.split(doc)
    text = _examples(parts[0])
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Args", "Keywords"):
            end = re.search(r"^\S", body, re.MULTILINE)
            rows, rest = (body[: end.start()], body[end.start() :]) if end else (body, "")
            cells = [f"| `{name}` | {_linked(' '.join(about.split()))} |" for name, about in _FIELD.findall(rows)]
            heading = "argument" if title == "Args" else "keyword"
            text += f"| {heading} | meaning |\n| --- | --- |\n" + "\n".join(cells) + "\n\n" + _examples(rest)
        else:
            text += f"{title}: {_linked(' '.join(body.split()))}\n\n"
    return text


def _examples(text: str) -> str:
    """Return paragraphs of text and blocks of examples and indented code."""
    result = ""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if paragraph.lstrip().startswith(">>>"):
            code = re.sub(r"  # doctest: \+\w+", "", textwrap.dedent(paragraph))
            result += f"```pycon\n{code}\n```\n\n"
        elif paragraph.startswith("    "):
            result += f"```python\n{textwrap.dedent(paragraph)}\n```\n\n"
        elif paragraph:
            result += f"{_linked(paragraph)}\n\n"
    return result


def _linked(text: str) -> str:
    """Link the pages that a docstring names, and keep a cell of a table in one piece."""
    text = re.sub(r"docs/([\w-]+)\.md", r"[\1.md](\1.md)", text)
    text = re.sub(r"docs/rules(?!/)", "[rules](rules/README.md)", text)
    return text.replace("|", "\\|")
