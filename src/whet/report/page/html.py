"""Render the HTML report of a run as a self-contained file. (The live page is `static/watch.html`.)

The page contains run data only as JSON, in a block that browsers do not execute. Scripts insert the data as text. The
content security policy allows only the page's own scripts and styles, by their hashes, and no connections.
"""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from whet.base.errors import WhetError
from whet.base.units import valid_utf8
from whet.report.comparison import RunComparison
from whet.report.run_report import RunReport
from whet.run import strict_json
from whet.run.disk import open_regular_file

DOCUMENT_START = '<!doctype html>\n<html lang="en" data-made-by="whet report">'
STATIC_FOLDER = Path(__file__).parent / "static"
UPLOT_SCRIPT, UPLOT_STYLE = "uPlot.iife.min.js", "uPlot.min.css"
# Maximum characters of one text. A log may contain lines of 16 MB.
MAX_TEXT = 4000
_MAX_ITEMS = 20_000
_MAX_TITLE = 200
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"

# The modules use only this form of import and this form of export, each on one line.
_IMPORT = re.compile(r'^import \{ (\w+(?:, \w+)*) \} from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_UNSUPPORTED = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def report_page(report: RunReport | RunComparison) -> str:
    """Return the whole report as one HTML file."""
    styles = [static_text(UPLOT_STYLE), static_text("page.css")]
    scripts = [static_text(UPLOT_SCRIPT), bundle_script("report.js")]
    name = report.name if isinstance(report, RunReport) else " / ".join(report.labels)
    title = shorten(name, most=_MAX_TITLE)
    return "\n".join(
        [
            DOCUMENT_START,
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{content_policy(scripts=scripts, styles=styles)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{html.escape(title)} - whet</title>",
            *(f"<style>{style}</style>" for style in styles),
            "</head>",
            "<body>",
            '<div id="bar" class="bar"></div>',
            '<main id="page"><noscript>This report needs JavaScript, but no network.</noscript></main>',
            f'<script type="application/json" id="data">{embedded_json(report)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


def content_policy(*, scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return a content security policy that allows only these scripts and styles."""
    return "; ".join(
        [
            "default-src 'none'",
            "script-src " + " ".join(_hash(script) for script in scripts),
            "style-src " + " ".join(_hash(style) for style in styles),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def embedded_json(report: RunReport | RunComparison) -> str:
    """Return the report as JSON, escaped so that no name or log of a run can end the surrounding script block."""
    text = strict_json.encode_compact(shorten(report.for_page().as_json()))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def shorten(value: Any, *, most: int = MAX_TEXT) -> Any:
    """Return a JSON value with long texts and lists truncated, and lone surrogates replaced."""
    if isinstance(value, str):
        return _shorten_text(value, most)
    if isinstance(value, dict):
        items = list(value.items())[:_MAX_ITEMS]
        return {_shorten_text(name, most): shorten(item, most=most) for name, item in items}
    if isinstance(value, list):
        return [shorten(item, most=most) for item in value[:_MAX_ITEMS]]
    return value


def is_report(path: Path) -> bool:
    """Return whether a file begins like a report of whet, so that a new report may replace it."""
    try:
        with open_regular_file(path) as file:
            start = file.read(len(DOCUMENT_START))
    except (OSError, WhetError):
        return False
    return start == DOCUMENT_START.encode()


def static_text(name: str) -> str:
    """Return the text of a front-end file."""
    return (STATIC_FOLDER / name).read_text(encoding="utf-8")


@cache
def bundle_script(entry: str) -> str:
    """Return a JavaScript module and all its imports as one script.

    Each module becomes a function that returns its exports. Other import or export syntax raises ValueError, so that
    the script does the same as the modules of the live page.
    """
    order: list[str] = []
    _collect_modules(entry, order, above=())
    return '"use strict";\nconst modules = {};\n' + "".join(_wrap_module(name) for name in order)


def _collect_modules(name: str, order: list[str], *, above: tuple[str, ...]) -> None:
    """Append a module and its imports, dependencies first."""
    if name in above:
        raise ValueError(f"import cycle: {' -> '.join((*above, name))}")
    if name in order:
        return
    for _, needed in _IMPORT.findall(static_text(name)):
        _collect_modules(needed, order, above=(*above, name))
    order.append(name)


def _wrap_module(name: str) -> str:
    source = static_text(name)
    exported = ", ".join(_EXPORT.findall(source))
    body = _EXPORT.sub("", _IMPORT.sub(r'const { \1 } = modules["\2"];', source))
    unsupported = _UNSUPPORTED.search(body)
    if unsupported is not None:
        raise ValueError(f"unsupported import or export in {name}: {unsupported[0]}")
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n'


def _shorten_text(text: str, most: int) -> str:
    clean = valid_utf8(text)
    return clean if len(clean) <= most else clean[: most - 1] + _ELLIPSIS


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
