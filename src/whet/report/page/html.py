"""How does a view become one file that holds everything? (The live page is `static/watch.html`.)

What comes from a run is in the page as JSON alone, in a block that no browser runs; the scripts put it into the page as
text. The policy of the page allows exactly these scripts and styles, by their hashes, and no connection at all.
"""

import base64
import hashlib
import html
from collections.abc import Sequence
from pathlib import Path

from whet.base.errors import WhetError
from whet.report.comparing import CompareView
from whet.report.page.inline import one_script, static_text
from whet.report.view import RunView
from whet.report.watch.shorten import shorten
from whet.run import strict_json
from whet.run.plain_file import open_plain

BEGINNING = '<!doctype html>\n<html lang="en" data-made-by="whet report">'
_LONGEST_TITLE = 200
UPLOT_SCRIPT, UPLOT_STYLE = "uPlot.iife.min.js", "uPlot.min.css"


def report_page(view: RunView | CompareView) -> str:
    """The whole report as one HTML file."""
    styles = [static_text(UPLOT_STYLE), static_text("page.css")]
    scripts = [static_text(UPLOT_SCRIPT), one_script("report.js")]
    title = shorten(view.name if isinstance(view, RunView) else " / ".join(view.labels), most=_LONGEST_TITLE)
    return "\n".join(
        [
            BEGINNING,
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts=scripts, styles=styles)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{html.escape(title)} - whet</title>",
            *(f"<style>{style}</style>" for style in styles),
            "</head>",
            "<body>",
            '<div id="bar" class="bar"></div>',
            '<main id="page"><noscript>This report is drawn by JavaScript, without a network.</noscript></main>',
            f'<script type="application/json" id="data">{inert_json(view)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


def policy(*, scripts: Sequence[str], styles: Sequence[str]) -> str:
    """What the page may do: run these scripts, use these styles, and nothing else."""
    return "; ".join(
        [
            "default-src 'none'",
            "script-src " + " ".join(_hash(script) for script in scripts),
            "style-src " + " ".join(_hash(style) for style in styles),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def inert_json(view: RunView | CompareView) -> str:
    """The view as JSON that cannot end the block it stands in, whatever a run is called or logs."""
    text = strict_json.compact(shorten(view.as_json()))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def is_report(path: Path) -> bool:
    """Whether a file begins as our reports do, so that a newer one may take its place."""
    try:
        with open_plain(path) as file:
            start = file.read(len(BEGINNING))
    except (OSError, WhetError):
        return False
    return start == BEGINNING.encode()
