"""The keywords in the signatures and docstrings of `whet.train`, `whet.Session` and `whet.tune`.

Training options are declared in config/options.py, all others in training/keywords.py. This tool writes them between
the markers of each signature, and their meaning after the line "Keywords:" of the docstring. tools/docs.py runs it, and
`make lint` checks the result.
"""

import ast
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from whet.config.options import SessionOptions

SOURCE = Path(__file__).parent.parent / "src/whet"
BEGIN = "# begin generated keywords (tools/keywords.py)"
END = "# end generated keywords"


@dataclass(frozen=True, kw_only=True)
class Keyword:
    """One keyword as source text."""

    name: str
    type: str
    default: str | None
    meaning: str

    @property
    def parameter(self) -> str:
        return f"{self.name}: {self.type}" + ("" if self.default is None else f" = {self.default}") + ","

    @property
    def explanation(self) -> str:
        default = "" if self.default in (None, "None", "()") else f" Default: {self.default}."
        return f"{self.name}: {self.meaning}{default}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file with generated keywords: those that it leaves out, or the only ones that it has besides the options."""

    file: str
    without: Sequence[str] = ()
    only: Sequence[str] | None = None
    has_auto_batch: bool = True

    def keywords(self) -> list[Keyword]:
        own = [word for word in session_keywords() if word.name not in self.without]
        own = own if self.only is None else [word for word in own if word.name in self.only]
        return [*training_keywords(has_auto_batch=self.has_auto_batch), *own]


TARGETS = (
    Target(file="training/session.py", without=("lr_batch",), has_auto_batch=False),
    # `train` and `tune` declare on_event and measure themselves.
    Target(file="training/loop.py", without=("on_event", "measure")),
    Target(file="api/train.py", without=("on_event", "measure")),
    Target(file="training/tune.py", only=("lr_batch", "device", "overrides", "workload")),
)


def keyword_files() -> dict[Path, str]:
    """Return the files with generated keywords and their text."""
    return {SOURCE / target.file: generate(target) for target in TARGETS if (SOURCE / target.file).exists()}


def generate(target: Target) -> str:
    """Return the text of a file with its keywords up to date."""
    path, words = SOURCE / target.file, target.keywords()

    def signature(match: re.Match[str]) -> str:
        indent = match["indent"]
        return "\n".join([f"{indent}{BEGIN}", *(f"{indent}{word.parameter}" for word in words), f"{indent}{END}"])

    def docstring(match: re.Match[str]) -> str:
        indent = match["indent"]
        lines = [line for word in words for line in _wrap(word.explanation, indent=f"{indent}    ")]
        return "\n".join([f"{indent}Keywords:", *lines, f'{indent}"""'])

    text = path.read_text()
    text = re.sub(rf"(?P<indent>[ ]*){re.escape(BEGIN)}\n.*?{END}", signature, text, flags=re.DOTALL)
    text = re.sub(r'(?P<indent>[ ]+)Keywords:\n.*?"""', docstring, text, flags=re.DOTALL)
    # Formatted, so that the comparison does not depend on how long a type is.
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(path), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _wrap(text: str, *, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        120,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def session_keywords() -> list[Keyword]:
    """Return the public fields of SessionKeywords."""
    tree = ast.parse((SOURCE / "training/keywords.py").read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SessionKeywords")
    internal = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTERNAL_NAMES"
    )
    words = []
    for item, following in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        if item.target.id in internal:
            continue
        assert isinstance(following, ast.Expr), f"{item.target.id} has no docstring"
        default = None if item.value is None else ast.unparse(item.value).replace("'", '"')
        words.append(
            Keyword(
                name=item.target.id,
                type=ast.unparse(item.annotation),
                default=default,
                meaning=" ".join(ast.literal_eval(following.value).split()),
            )
        )
    return words


def training_keywords(*, has_auto_batch: bool) -> list[Keyword]:
    """Return the options of a session. Only `train` and `tune` resolve global_batch_size="auto"."""
    words = []
    for name, field in SessionOptions.model_fields.items():
        text = type_text(field.annotation)
        if name == "global_batch_size" and has_auto_batch:
            text = f'{text} | Literal["auto"]'
        default = None if field.is_required() else repr(field.default).replace("'", '"')
        if default == "None" and "None" not in text:
            text = f"{text} | None"
        description = field.description or ""
        words.append(
            Keyword(name=name, type=text, default=default, meaning=f"{description[:1].upper()}{description[1:]}.")
        )
    # Python wants keywords without a default anywhere; readers expect them first.
    return sorted(words, key=lambda word: word.default is not None)


def type_text(annotation: Any) -> str:
    """Return a type as it is written in source code."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(part) for part in get_args(annotation))
    if origin is Annotated:
        return type_text(get_args(annotation)[0])
    if origin is Literal:
        values = ", ".join(f'"{value}"' for value in get_args(annotation))
        return f"Literal[{values}]"
    if origin is Callable:
        *arguments, result = get_args(annotation)
        if arguments == [...]:
            return f"Callable[..., {type_text(result)}]"
        inputs = ", ".join(type_text(part) for part in (arguments[0] if isinstance(arguments[0], list) else arguments))
        return f"Callable[[{inputs}], {type_text(result)}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(type_text(part) for part in get_args(annotation))}]"
    return {type(None): "None", Any: "Any"}.get(annotation) or annotation.__name__
