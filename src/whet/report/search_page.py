"""The report of a search as one HTML file: the verdict, the pictures and the trials; no script, no connection."""

import html

from whet.report.page.html import BEGINNING, policy
from whet.report.page.inline import static_text
from whet.report.search_picture import STYLE, search_pictures
from whet.report.search_text import render_search, verdict
from whet.run.search_result import SearchResult

_OWN = """
main.search { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
main.search pre { white-space: pre-wrap; overflow-wrap: anywhere; }
main.search pre span { display: block; min-height: 1.5em; padding-left: 10ch; text-indent: -10ch; }
"""


def search_page(result: SearchResult) -> str:
    """The whole report."""
    styles = [static_text("page.css"), STYLE + _OWN]
    pictures = [
        part
        for title, picture in search_pictures(result).items()
        for part in (f"<section><h2>{html.escape(title)}</h2>", picture, "</section>")
    ]
    return "\n".join(
        [
            BEGINNING,
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts=[], styles=styles)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(result.name)} - whet</title>",
            *(f"<style>{style}</style>" for style in styles),
            "</head>",
            '<body><main class="search">',
            f"<h1>{html.escape(result.name)}</h1>",
            f"<p><strong>Winner:</strong> {html.escape(verdict(result))}</p>",
            *pictures,
            "<section><h2>Trials</h2>",
            f"<pre>{_lines(render_search(result))}</pre></section>",
            "</main></body>",
            "</html>",
            "",
        ]
    )


def _lines(text: str) -> str:
    """Each by itself: where one is too long for the page its rest stands below its words, not below its label."""
    return "".join(f"<span>{html.escape(line)}</span>" for line in text.splitlines())
