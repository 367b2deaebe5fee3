"""`whet report`: report on a run or a search, or compare runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.errors import UsageError
from whet.cli import output
from whet.cli.options import Json

if TYPE_CHECKING:
    from whet.report.comparison import RunComparison
    from whet.report.run_report import RunReport


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run folder or search; several runs are compared.")
    ],
    html: Annotated[bool, typer.Option("--html", help="Write one HTML file: NAME.html, or --out.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for an issue or a README.")] = False,
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write to this file; - is standard output.")
    ] = None,
) -> None:
    """Report on a run or a search, or compare several runs.

    \b
    whet report runs/text-001
    whet report runs/text-001 --html
    whet report runs/text-001 runs/text-002 --markdown --out comparison.md
    """
    from whet.run import durable
    from whet.run.folder import read_header
    from whet.run.search_result import is_search

    formats = [option for option, is_on in (("--html", html), ("--markdown", markdown), ("--json", json)) if is_on]
    if len(formats) > 1:
        raise UsageError("choose one output format", got=" ".join(formats), try_=f"whet report RUN {formats[0]}")
    runs, out = _split_html_file(runs, out=out) if html else (runs, out)
    if len(runs) == 1 and not formats and out is None and (seeds := _seeds_text(runs[0])) is not None:
        output.result(seeds)
        return
    # A folder may be a run, a group of seeds (handled above) or a search.
    is_one_search = len(runs) == 1 and is_search(runs[0].expanduser())
    if is_one_search and html:
        raise UsageError("a search has no HTML report", got=str(runs[0]), try_=f"whet report {runs[0]} --markdown")
    for run in runs if not is_one_search else ():
        _check_no_search(run.expanduser())
        read_header(run.expanduser().absolute())
    # Validate the output path before reading the runs, which may take long.
    if html and out is None:
        out = _default_file(Path(f"{runs[0].absolute().name}.html" if len(runs) == 1 else "comparison.html"))
    if out == Path("-"):
        out = None
    if out is not None:
        out = _check_output(out)
    format_ = formats[0] if formats else ""
    text = _search_text(runs[0].expanduser(), format_=format_) if is_one_search else _runs_text(runs, format_=format_)
    if out is None:
        output.result_json(text) if isinstance(text, dict) else output.result(text.rstrip("\n"))
        return
    durable.write_file(out, data=_encode(text))
    output.note(f"wrote {out}")


def _check_no_search(folder: Path) -> None:
    """Raise UsageError for a search among several runs, or a search without a result."""
    from whet.hpo.search_config import SEARCH_FILE
    from whet.run.folder import RUN_FILE, shell_path
    from whet.run.search_result import is_search

    if not (folder / SEARCH_FILE).is_file() or (folder / RUN_FILE).exists():
        return
    if is_search(folder):
        raise UsageError("a search must be reported alone", got=str(folder), try_=f"whet report {shell_path(folder)}")
    raise UsageError(
        "the search has no result yet",
        got=str(folder),
        try_=f"resume it with the same whet search --name {folder.name}; whet runs {folder} lists its trials",
    )


def _seeds_text(folder: Path) -> str | None:
    """Return the summary of a folder with one run per seed, or None for any other folder."""
    from whet.report.seeds import SEEDS_FILE, read_seeds, render_seeds
    from whet.run.folder import RUN_FILE

    if not (folder / SEEDS_FILE).is_file() or (folder / RUN_FILE).exists():
        return None
    return "\n".join(render_seeds(read_seeds(folder)))


def _split_html_file(runs: list[Path], *, out: Path | None) -> tuple[list[Path], Path | None]:
    """Return the runs and the output file of `--html`.

    Runs are folders, so a last argument that ends in .html is the output file, as in `--html report.html`.
    """
    if out is None and len(runs) > 1 and runs[-1].suffix == ".html" and not runs[-1].is_dir():
        return runs[:-1], runs[-1]
    return runs, out


def _default_file(path: Path) -> Path:
    """Return the default output file. Raise UsageError if it would replace anything but an earlier report."""
    from whet.report.page.html import is_report

    if path.exists() and not is_report(path):
        raise UsageError("the file exists and is not a report", got=path, try_="--out FILE")
    return path


def _check_output(out: Path) -> Path:
    from whet.report.page.html import is_report
    from whet.run import durable
    from whet.run.folder import RUN_FILE

    out = out.expanduser()
    if out.is_dir():
        raise UsageError("--out must be a file", got=f"{out} is a folder", try_=f"--out {out / 'report.html'}")
    if not out.absolute().parent.is_dir():
        raise UsageError("the folder of --out does not exist", got=out.parent, try_=f"mkdir -p {out.parent}")
    if out.exists() and any((folder / RUN_FILE).is_file() for folder in out.resolve().parents) and not is_report(out):
        raise UsageError("the file belongs to a run", got=out, try_=f"--out {out.name}")
    durable.check_writable(out.absolute())
    return out


def _search_text(folder: Path, *, format_: str) -> "str | dict[str, object]":
    from whet.report.search_report import render_search
    from whet.report.table import markdown_page
    from whet.run.search_result import read_search

    result = read_search(folder)
    if format_ == "--json":
        return result.as_json()
    return markdown_page(result.name, render_search(result, max_rows=None)) if format_ else render_search(result)


def _runs_text(runs: list[Path], *, format_: str) -> "str | dict[str, object]":
    from whet.report.comparison import compare_runs, render_comparison
    from whet.report.page.html import report_page
    from whet.report.run_report import summarize
    from whet.report.table import markdown_page
    from whet.report.text import render_text

    reports = [summarize(run) for run in runs]
    if len(reports) > 1:
        comparison = compare_runs(reports)
        title, text = " / ".join(comparison.labels), render_comparison(comparison)
        report: RunReport | RunComparison = comparison
    else:
        report = reports[0]
        is_terminal = not format_
        width, unicode = (output.width(), output.supports_unicode()) if is_terminal else (100, True)
        title, text = report.name, render_text(report, width=width, unicode=unicode)
    if format_ == "--json":
        return report.as_json()
    if format_ == "--html":
        return report_page(report)
    return markdown_page(title, text) if format_ == "--markdown" else text


def _encode(text: "str | dict[str, object]") -> bytes:
    from whet.run import strict_json

    whole = strict_json.encode(text, pretty=True) if isinstance(text, dict) else text
    return (whole.rstrip("\n") + "\n").encode()
