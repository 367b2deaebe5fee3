"""whet bench: how fast is a recipe here, with other settings, against a plain loop, against other machines?"""

import shlex
import sys
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.run.bench_result import BenchResult

_PAGES = Path("docs/bench")
_PLACE = Path("bench")


def bench(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FILE",
            help="render_bench, chat, puzzle, hex, a Python file with recipe(), or a result FILE.json.",
        ),
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as global_batch_size=64; or more FILE.json.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="naive", help="Compare the plan with a plain loop: fp32, no workers.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="SETTING", help="device, micro_batch, precision, workers, threads or arch; repeatable."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "--config-name", metavar="FILE", help="Settings from TOML or YAML.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")] = "auto",
    measure: Annotated[
        bool, typer.Option("--measure", help="Search for the fastest plan first, not the rules'.")
    ] = False,
    budget: Annotated[float, typer.Option(metavar="SECONDS", min=5, help="What everything may take.")] = 120.0,
    merge: Annotated[bool, typer.Option("--merge", help="Put results of several machines into one table.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write a page and its picture to docs/bench.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write FILE.json, FILE.svg or FILE.md (with both).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Measure real steps: speed, memory, steadiness.

    \b
    whet bench text
    whet bench text --against naive
    whet bench text --sweep precision --sweep threads --budget 60
    whet bench my_recipe.py global_batch_size=64 --markdown
    whet bench mac.json workstation.json

    Every value is timed in turns with the plan's own, on the same batches, in a process that may die. The result goes
    to bench/ as JSON with a picture, unless --out, --markdown or --json say otherwise.
    """
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.report.bench_report import render_bench

    _refuse_unusable(against, sweep or [], out)
    files = [what, *(words or [])]
    if merge or what.endswith(".json"):
        if against or sweep or measure or markdown:
            raise UsageError(
                "results are only merged", got=" ".join(sys.argv[2:]), try_=f"whet bench {' '.join(files)}"
            )
        _merge(files, out=out, is_json=json)
        return
    result = _measured(what, words or [], config, device, against, sweep or [], is_searched=measure, budget=budget)
    if json:
        console.result_json(result.as_json())
    else:
        console.result(render_bench(result))
    for path in _write(result, out=out, is_page=markdown, is_silent=json):
        console.note(f"written: {path}")
    if not any(row.samples_per_second for found in result.sweeps for row in found.rows):
        raise typer.Exit(1)


def _refuse_unusable(against: str | None, sweeps: list[str], out: Path | None) -> None:
    from whet.autotune.sweeps import SWEEPS
    from whet.base.errors import UsageError, closest_match

    if against not in (None, "naive"):
        raise UsageError("a plan is compared with a plain loop", got=f"--against {against}", try_="--against naive")
    known = (*SWEEPS, "arch")
    for name in sweeps:
        if name not in known:
            meant = closest_match(name, known)
            hint = f"--sweep {meant}" if meant else "--sweep " + " or ".join(known)
            raise UsageError("this cannot be swept", got=f"--sweep {name}", try_=hint)
    if out is not None and out.suffix not in (".json", ".svg", ".md"):
        raise UsageError("the kind of file is not clear", got=str(out), try_="--out FILE.json or FILE.svg or FILE.md")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UsageError("nothing can be written there", got=str(out), try_="a file in a folder that is there")


def _measured(
    what: str,
    words: list[str],
    config: Path | None,
    device: str,
    against: str | None,
    sweeps: list[str],
    *,
    is_searched: bool,
    budget: float,
) -> "BenchResult":
    from whet.api.bench import BenchRequest, bench
    from whet.cli import console
    from whet.config.resolve import resolve_config
    from whet.recipes.recipe import load_recipe

    recipe = load_recipe(what)
    resolved = resolve_config(recipe.Config, words, file=config, can_measure=True)
    recipe.describe(resolved.config)
    console.note(f"measuring real steps in a process of their own, {budget:.0f} s at most ...")
    request = BenchRequest(
        word=what,
        recipe=recipe,
        resolved=resolved,
        words=words,
        config_file=config,
        device=device,
        sweeps=sweeps,
        is_against_naive=against is not None,
        is_searched=is_searched,
        budget_seconds=budget,
    )
    with console.measuring_progress("bench") as watch:
        return bench(request, say=console.note, watch=watch)


def _write(result: "BenchResult", *, out: Path | None, is_page: bool, is_silent: bool) -> list[Path]:
    """Writes what was asked for; where it lies."""
    from whet.report import bench_report
    from whet.report.bench_report import bench_chart
    from whet.run import durable
    from whet.run.bench_result import encode_bench

    picture = bench_chart(result)
    wanted: list[Path] = []
    if is_page:
        stem = _unused(_PAGES, bench_report.bench_file_stem(result))
        wanted += [_PAGES / f"{stem}{suffix}" for suffix in (".md", ".svg", ".json")]
    if out is not None:
        wanted += [out, *([out.with_suffix(suffix) for suffix in (".svg", ".json")] if out.suffix == ".md" else [])]
    if not wanted and not is_silent:
        stem = _unused(_PLACE, bench_report.bench_file_stem(result))
        wanted = [_PLACE / f"{stem}{suffix}" for suffix in (".json", ".svg")]
    written = []
    for path in wanted:
        durable.make_directory(path.parent)
        if path.suffix == ".json":
            data = encode_bench(result)
        elif path.suffix == ".svg":
            if picture is None:
                continue
            data = picture.encode()
        else:
            beside = path.with_suffix(".svg").name if picture else None
            data = bench_report.bench_markdown(result, command=_command(), picture=beside).encode()
        durable.write_file(path, data=data)
        written.append(path)
    return written


def _unused(folder: Path, stem: str) -> str:
    """The name, with a number where earlier results have it: a measurement is not written over."""
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(
        name for name in names if not any((folder / f"{name}{suffix}").exists() for suffix in (".md", ".svg", ".json"))
    )


def _merge(files: list[str], *, out: Path | None, is_json: bool) -> None:
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.report.bench_report import (
        bench_markdown_table,
        escape_bench_markdown,
        merged_notes,
        merged_table,
        plain_table,
    )
    from whet.run import durable
    from whet.run.bench_result import read_bench

    if out is not None and out.suffix != ".md":
        raise UsageError("a merged table is a page", got=str(out), try_="--out FILE.md")
    results = [read_bench(Path(name)) for name in files]
    table, notes = merged_table(results), list(merged_notes(results))
    if is_json:
        console.result_json([dict(zip(table[0], line, strict=True)) for line in table[1:]])
    else:
        console.result("\n".join([*plain_table(table), "", *notes]))
    if out is not None:
        page = [
            "# Machines compared",
            "",
            *bench_markdown_table(table),
            "",
            *(f"- {escape_bench_markdown(note)}" for note in notes),
        ]
        durable.write_file(out, data=("\n".join(page) + "\n").encode())
        console.note(f"written: {out}")


def _command() -> str:
    return shlex.join(["whet", *sys.argv[1:]])
