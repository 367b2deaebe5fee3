"""`whet bench`: measure the speed of a recipe, and compare settings, a plain loop and machines."""

import shlex
import sys
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.errors import UsageError, closest_match
from whet.cli import output
from whet.cli.options import ConfigFile, Device, Json

if TYPE_CHECKING:
    from whet.plan.setting import Scalar
    from whet.run.bench_result import BenchResult

_PAGES = Path("docs/bench")
_RESULTS = Path("bench")


def bench(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FILE",
            help="text, chat, puzzle, hex, a Python file with recipe() or main(), FILE.py:function, or a FILE.json.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Settings of the recipe, such as global_batch_size=64; or more FILE.json."
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="naive", help="Compare the plan with a plain PyTorch loop: fp32, no workers.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING[=A,B]",
            help="Compare values of global_batch_size, micro_batch, device, precision, workers, threads or arch; "
            "repeatable.",
        ),
    ] = None,
    config: ConfigFile = None,
    device: Device = "auto",
    measure: Annotated[
        bool, typer.Option("--measure", help="Find the fastest plan first instead of using the rules' plan.")
    ] = False,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=5, help="Time limit of the whole measurement.")
    ] = 120.0,
    merge: Annotated[bool, typer.Option("--merge", help="Merge results of several machines into one table.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write a page with a chart to docs/bench.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write FILE.json, FILE.svg or FILE.md (with both).")
    ] = None,
    json: Json = False,
) -> None:
    """Measure real steps: speed, memory, variation.

    \b
    whet bench text
    whet bench text --against naive
    whet bench text --sweep precision --sweep threads --budget 60
    whet bench text --sweep global_batch_size=16,32,64,128 --sweep micro_batch
    whet bench my_recipe.py global_batch_size=64 --markdown
    whet bench train.py:main --against naive
    whet bench mac.json workstation.json

    Every value is timed alternately with the plan's own, on the same batches, in a separate process that may crash. The
    result is written to bench/ as JSON with a chart, unless --out, --markdown or --json is given.
    """
    from whet.report.bench_report import render_bench

    sweeps = _parse_sweeps(sweep or [])
    _validate(against, out)
    files = [target, *(settings or [])]
    if merge or target.endswith(".json"):
        if against or sweep or measure or markdown:
            raise UsageError(
                "merging results takes no measuring options",
                got=" ".join(sys.argv[2:]),
                try_=f"whet bench {' '.join(files)}",
            )
        _merge(files, out=out, is_json=json)
        return
    result = _measure(target, settings or [], config, device, against, sweeps, is_searched=measure, budget=budget)
    if json:
        output.result_json(result.as_json())
    else:
        output.result(render_bench(result))
    for path in _write(result, out=out, is_page=markdown, is_silent=json):
        output.note(f"written: {path}")
    # Nothing could be measured: every process failed or ran out of time.
    if not any(row.samples_per_second for sweep_result in result.sweeps for row in sweep_result.rows):
        raise typer.Exit(1)


def _parse_sweeps(words: list[str]) -> "dict[str, list[Scalar]]":
    """Return the settings to sweep, each with the values that were named."""
    from whet.autotune.sweeps import SWEEPS
    from whet.config.options import ALIASES
    from whet.config.sources import parse_value

    known, sweeps = ("global_batch_size", *SWEEPS, "arch"), {}
    for word in words:
        given, _, text = word.partition("=")
        name = ALIASES.get(given, given)
        if name not in known:
            close = closest_match(name, known)
            hint = f"--sweep {close}" if close else "--sweep " + " or ".join(known)
            raise UsageError("no such setting to sweep", got=f"--sweep {word}", try_=hint)
        if text and name == "arch":
            raise UsageError("the sizes of a recipe are its presets", got=f"--sweep {word}", try_="--sweep arch")
        items = [item.strip() for item in text.strip("[]").split(",")]
        sweeps[name] = [parse_value(item, word) for item in items if item]
    return sweeps


def _validate(against: str | None, out: Path | None) -> None:
    if against not in (None, "naive"):
        raise UsageError(
            "the plan can only be compared with a plain loop", got=f"--against {against}", try_="--against naive"
        )
    if out is not None and out.suffix not in (".json", ".svg", ".md"):
        raise UsageError("unknown file type", got=str(out), try_="--out FILE.json or FILE.svg or FILE.md")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UsageError("the file cannot be written there", got=str(out), try_="a file in an existing folder")


def _measure(
    target: str,
    settings: list[str],
    config: Path | None,
    device: str,
    against: str | None,
    sweeps: "dict[str, list[Scalar]]",
    *,
    is_searched: bool,
    budget: float,
) -> "BenchResult":
    from whet.api.bench import BenchRequest, bench
    from whet.api.target import ScriptTraining, load_training
    from whet.config.resolve import resolve_config

    with output.user_output_to_stderr():
        training = load_training(target)
    resolved = None
    if isinstance(training, ScriptTraining):
        if settings or config:
            got = " ".join(settings) or str(config)
            raise UsageError("only a recipe has options", got=got, try_=f"whet bench {target}")
    else:
        resolved = resolve_config(training.Config, settings, file=config, can_measure=True)
        training.describe(resolved.config)
    output.note(f"measuring real steps in a separate process, at most {budget:.0f} s ...")
    request = BenchRequest(
        what=target,
        training=training,
        resolved=resolved,
        args=settings,
        config_file=config,
        device=device,
        sweeps=sweeps,
        is_against_naive=against is not None,
        is_searched=is_searched,
        budget_seconds=budget,
    )
    with output.measuring_progress("bench") as watch:
        return bench(request, log=output.note, on_progress=watch)


def _write(result: "BenchResult", *, out: Path | None, is_page: bool, is_silent: bool) -> list[Path]:
    """Write the requested files and return their paths."""
    from whet.report import bench_report
    from whet.report.bench_report import bench_chart
    from whet.run import durable
    from whet.run.bench_result import encode_bench

    chart = bench_chart(result)
    paths: list[Path] = []
    if is_page:
        stem = _unused(_PAGES, bench_report.bench_file_stem(result))
        paths += [_PAGES / f"{stem}{suffix}" for suffix in (".md", ".svg", ".json")]
    if out is not None:
        paths += [out, *([out.with_suffix(suffix) for suffix in (".svg", ".json")] if out.suffix == ".md" else [])]
    if not paths and not is_silent:
        stem = _unused(_RESULTS, bench_report.bench_file_stem(result))
        paths = [_RESULTS / f"{stem}{suffix}" for suffix in (".json", ".svg")]
    written = []
    for path in paths:
        durable.make_directory(path.parent)
        if path.suffix == ".json":
            data = encode_bench(result)
        elif path.suffix == ".svg":
            if chart is None:
                continue
            data = chart.encode()
        else:
            chart_name = path.with_suffix(".svg").name if chart else None
            data = bench_report.bench_markdown(result, command=_command(), picture=chart_name).encode()
        durable.write_file(path, data=data)
        written.append(path)
    return written


def _unused(folder: Path, stem: str) -> str:
    """Return the name, with a number if it exists: measurements are never overwritten."""
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(
        name for name in names if not any((folder / f"{name}{suffix}").exists() for suffix in (".md", ".svg", ".json"))
    )


def _merge(files: list[str], *, out: Path | None, is_json: bool) -> None:
    from whet.report.bench_report import (
        markdown_cells,
        merged_notes,
        merged_table,
    )
    from whet.report.table import align_columns, escape_markdown
    from whet.run import durable
    from whet.run.bench_result import read_bench

    if out is not None and out.suffix != ".md":
        raise UsageError("a merged table is written as Markdown", got=str(out), try_="--out FILE.md")
    results = [read_bench(Path(name)) for name in files]
    table, notes = merged_table(results), list(merged_notes(results))
    if is_json:
        output.result_json([dict(zip(table[0], line, strict=True)) for line in table[1:]])
    else:
        output.result("\n".join([*align_columns(table), "", *notes]))
    if out is not None:
        page = [
            "# Machines compared",
            "",
            markdown_cells(table),
            "",
            *(f"- {escape_markdown(note)}" for note in notes),
        ]
        durable.write_file(out, data=("\n".join(page) + "\n").encode())
        output.note(f"written: {out}")


def _command() -> str:
    return shlex.join(["whet", *sys.argv[1:]])
