"""whet report: what a run did, or how several differ; as text, one HTML file, Markdown or JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.report.comparison import RunComparison
    from whet.report.run_report import RunReport


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared; or a search.")
    ],
    html: Annotated[bool, typer.Option("--html", help="Write one HTML file, NAME.html or as --out says.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print as Markdown, for an issue or a README.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write to this file; - is standard output.")
    ] = None,
) -> None:
    """What a run did, and how to go on; several runs are compared.

    \b
    whet report runs/text-001
    whet report runs/text-001 --html
    whet report runs/text-001 runs/text-002 --markdown --out comparison.md
    """
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.run import durable
    from whet.run.folder import read_header
    from whet.run.search_result import is_search

    chosen = [word for word, is_on in (("--html", html), ("--markdown", markdown), ("--json", json)) if is_on]
    if len(chosen) > 1:
        raise UsageError("a report has one form at a time", got=" ".join(chosen), try_=f"whet report RUN {chosen[0]}")
    runs, out = _file_among(runs, out=out) if html else (runs, out)
    if len(runs) == 1 and not chosen and out is None and (seeds := _seeds(runs[0])) is not None:
        console.result(seeds)
        return
    is_of_search = len(runs) == 1 and is_search(runs[0].expanduser())
    for run in runs if not is_of_search else ():
        _refuse_unfinished_search(run.expanduser())
        read_header(run.expanduser().absolute())
    if html and out is None:
        out = _own_file(Path(f"{runs[0].absolute().name}.html" if len(runs) == 1 else "comparison.html"))
    if out == Path("-"):
        out = None
    if out is not None:
        out = _writable(out)
    text: str | dict[str, object]
    if is_of_search:
        text = _of_search(runs[0].expanduser(), form=chosen[0] if chosen else "")
    else:
        text = _html(runs) if html else _markdown(runs) if markdown else _json(runs) if json else _text(runs)
    if out is None:
        console.result_json(text) if isinstance(text, dict) else console.result(text.rstrip("\n"))
        return
    durable.write_file(out, data=_as_bytes(text))
    console.note(f"wrote {out}")


def _refuse_unfinished_search(folder: Path) -> None:
    from whet.base.errors import UsageError
    from whet.hpo.search_config import SEARCH_FILE
    from whet.run.folder import RUN_FILE
    from whet.run.search_result import is_search

    if not (folder / SEARCH_FILE).is_file() or (folder / RUN_FILE).exists():
        return
    if is_search(folder):
        raise UsageError("searches are reported one by one", got=str(folder), try_=f"whet report {folder}")
    raise UsageError(
        "the search has no result yet",
        got=str(folder),
        try_=f"the same whet search with --name {folder.name} goes on; whet runs {folder} lists its trials",
    )


def _seeds(folder: Path) -> str | None:
    """Of a folder with one run for each seed: what they say together."""
    from whet.report.seeds import SEEDS_FILE, read_seeds, render_seeds
    from whet.run.folder import RUN_FILE

    if not (folder / SEEDS_FILE).is_file() or (folder / RUN_FILE).exists():
        return None
    return "\n".join(render_seeds(read_seeds(folder)))


def _file_among(runs: list[Path], *, out: Path | None) -> tuple[list[Path], Path | None]:
    """`--html report.html`: a run is a folder, so a last word that ends in .html names the file."""
    if out is None and len(runs) > 1 and runs[-1].suffix == ".html" and not runs[-1].is_dir():
        return runs[:-1], runs[-1]
    return runs, out


def _own_file(path: Path) -> Path:
    """The file that is written when none was named: it may replace a report, and nothing else."""
    from whet.base.errors import UsageError
    from whet.report.page.html import is_report

    if path.exists() and not is_report(path):
        raise UsageError("a file of that name is there, and no report", got=path, try_="--out FILE")
    return path


def _writable(out: Path) -> Path:
    from whet.base.errors import UsageError
    from whet.report.page.html import is_report
    from whet.run import durable
    from whet.run.folder import RUN_FILE

    out = out.expanduser()
    if out.is_dir():
        raise UsageError("the report is a file", got=f"{out} is a folder", try_=f"--out {out / 'report.html'}")
    if not out.absolute().parent.is_dir():
        raise UsageError("no such folder for the report", got=out.parent, try_=f"mkdir -p {out.parent}")
    if out.exists() and any((folder / RUN_FILE).is_file() for folder in out.resolve().parents) and not is_report(out):
        raise UsageError("that file belongs to a run", got=out, try_=f"--out {out.name}")
    durable.check_writable(out.absolute())
    return out


def _of_search(folder: Path, *, form: str) -> "str | dict[str, object]":
    from whet.report.search_report import render_search, search_markdown, search_page
    from whet.run.search_result import read_search

    result = read_search(folder)
    if form == "--json":
        return result.as_json()
    return {"--html": search_page, "--markdown": search_markdown}.get(form, render_search)(result)


def _read(runs: list[Path]) -> "RunReport | RunComparison":
    from whet.report.comparison import compare_runs
    from whet.report.run_report import summarize

    reports = [summarize(run) for run in runs]
    return reports[0] if len(reports) == 1 else compare_runs(reports)


def _html(runs: list[Path]) -> str:
    from whet.report.page.html import report_page

    return report_page(_read(runs))


def _markdown(runs: list[Path]) -> str:
    from whet.report.markdown import comparison_markdown, run_markdown
    from whet.report.run_report import RunReport

    found = _read(runs)
    return run_markdown(found) if isinstance(found, RunReport) else comparison_markdown(found)


def _json(runs: list[Path]) -> "dict[str, object]":
    return _read(runs).as_json()


def _text(runs: list[Path]) -> str:
    from whet.cli import console
    from whet.report.comparison import render_comparison
    from whet.report.run_report import RunReport
    from whet.report.text import render_text

    found = _read(runs)
    if isinstance(found, RunReport):
        return render_text(found, width=console.width(), unicode=console.supports_unicode())
    return render_comparison(found)


def _as_bytes(text: "str | dict[str, object]") -> bytes:
    from whet.run import strict_json

    whole = strict_json.encode(text, pretty=True) if isinstance(text, dict) else text
    return (whole.rstrip("\n") + "\n").encode()
