"""`whet bench`: measure the speed of a recipe, and compare it with other settings or a plain loop."""

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


def bench(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FILE",
            help="text, chat, puzzle, hex, a Python file with recipe() or main(), or FILE.py:function.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings of the recipe, such as global_batch_size=64."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="naive", help="Compare the plan with a plain PyTorch loop: fp32, no workers.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING[=A,B]",
            help="Compare values of global_batch_size, micro_batch, device, precision, workers or threads; repeatable.",
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
    markdown: Annotated[bool, typer.Option("--markdown", help="Also write a page with the chart.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the results.")] = Path("bench"),
    json: Json = False,
) -> None:
    """Measure the speed, memory and variation of real steps.

    \b
    whet bench text
    whet bench text --against naive
    whet bench text --sweep precision --sweep threads --budget 60
    whet bench text --sweep global_batch_size=16,32,64,128 --sweep micro_batch
    whet bench my_recipe.py global_batch_size=64 --markdown
    whet bench train.py:main --against naive

    Each value of a sweep and the value in the plan are timed alternately, on the same batches, in a separate process
    that may crash. The result is written to a folder as JSON with a chart. With --json, it is printed instead.
    """
    from whet.report.bench_report import render_bench

    sweeps = _parse_sweeps(sweep or [])
    if against not in (None, "naive"):
        raise UsageError(
            "the plan can only be compared with a plain loop", got=f"--against {against}", try_="--against naive"
        )
    if out.exists() and not out.is_dir():
        raise UsageError("the results cannot be written there", got=f"--out {out}", try_="--out DIR")
    result = _measure(target, settings or [], config, device, against, sweeps, is_searched=measure, budget=budget)
    if json:
        output.result_json(result.as_json())
    else:
        output.result(render_bench(result))
        for path in _write(result, out, is_page=markdown):
            output.note(f"written: {path}")
    # If nothing was measured, every process failed or ran out of time.
    if not any(row.samples_per_second for sweep_result in result.sweeps for row in sweep_result.rows):
        raise typer.Exit(1)


def _parse_sweeps(words: list[str]) -> "dict[str, list[Scalar]]":
    """Return the settings to sweep, each with the given values. An empty list means the default values."""
    from whet.autotune.sweeps import SWEEPS
    from whet.config.options import ALIASES
    from whet.config.sources import parse_value

    known, sweeps = ("global_batch_size", *SWEEPS), {}
    for word in words:
        given, _, text = word.partition("=")
        name = ALIASES.get(given, given)
        if name not in known:
            close = closest_match(name, known)
            hint = f"--sweep {close}" if close else "--sweep " + " or ".join(known)
            raise UsageError("no such setting to sweep", got=f"--sweep {word}", try_=hint)
        items = [item.strip() for item in text.strip("[]").split(",")]
        sweeps[name] = [parse_value(item, word) for item in items if item]
    return sweeps


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
        device=device,
        sweeps=sweeps,
        is_against_naive=against is not None,
        is_searched=is_searched,
        budget_seconds=budget,
    )
    with output.measuring_progress("bench") as watch:
        return bench(request, log=output.note, on_progress=watch)


def _write(result: "BenchResult", folder: Path, *, is_page: bool) -> list[Path]:
    """Write the result and its chart into a folder, and a Markdown page if `is_page`. Return the paths of the files."""
    from whet.report.bench_report import bench_chart, bench_file_stem, render_bench
    from whet.report.table import markdown_page
    from whet.run import durable
    from whet.run.bench_result import encode_bench

    stem, chart = _unused(folder, bench_file_stem(result)), bench_chart(result)
    files = {".json": encode_bench(result).decode()}
    if chart is not None:
        files[".svg"] = chart
    if is_page:
        page = markdown_page(shlex.join(["whet", *sys.argv[1:]]), render_bench(result))
        files[".md"] = page + (f"\n![Speed and memory of each value]({stem}.svg)\n" if chart else "")
    durable.make_directory(folder)
    for suffix, data in files.items():
        durable.write_file(folder / f"{stem}{suffix}", data=data.encode())
    return [folder / f"{stem}{suffix}" for suffix in files]


def _unused(folder: Path, stem: str) -> str:
    """Return `stem`, or `stem` with a number if that file already exists. Measurements are never overwritten."""
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(name for name in names if not (folder / f"{name}.json").exists())
