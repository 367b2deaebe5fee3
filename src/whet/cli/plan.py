"""whet plan: how a workload would be executed on a machine, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.plan.plan import Plan

_BATCH_SHARE = 1 / 3
"""Of the budget, for finding a global batch that is left open."""


def plan(
    what: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE|RUN", help="text, a Python file with recipe(), or a run.")
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as lr=1e-4 arch.layers=4.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "--config-name", metavar="FILE", help="Settings from TOML or YAML.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Plan for another machine; no torch needed.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")] = "auto",
    why: Annotated[
        str | None, typer.Option(metavar="SETTING", help="Explain one setting: evidence, rule, override.")
    ] = None,
    nproc: Annotated[
        int, typer.Option(min=1, max=1024, help="For so many processes on the machine, as whet train --nproc.")
    ] = 1,
    measure: Annotated[bool, typer.Option("--measure", help="Time real steps here, and take what is fastest.")] = False,
    budget: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="What measuring may take.")] = 60.0,
    json: Annotated[
        bool, typer.Option("--json", help="As JSON: value, reason, source and evidence of each setting.")
    ] = False,
) -> None:
    """How a workload would run on a machine, and why.

    \b
    whet plan text
    whet plan text global_batch_size=256 --machine m2-air-8gb
    whet plan text --why micro_batch
    whet plan text --machine h200 --nproc 8
    whet plan text --measure
    whet plan text global_batch_size=auto --measure
    whet plan runs/text-001
    """
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.plan.render import explain_setting, plan_lines

    made = _saved_plan(what, words, config, machine)
    if made is not None and measure:
        raise UsageError("a run has its plan already", got=f"{what} and --measure", try_="--measure with a recipe")
    if measure and nproc > 1:
        raise UsageError(
            "steps of several processes are not measured", got=f"--measure --nproc {nproc}", try_="one of the two"
        )
    if made is not None and nproc > 1:
        raise UsageError("a run has its plan already", got=f"{what} and --nproc {nproc}", try_="--nproc with a recipe")
    if measure and machine is not None:
        raise UsageError("only this machine can be measured", got=f"--machine {machine}", try_="--measure alone")
    # A run that has its plan is told about by `whet report`.
    finish = "" if made else "\nno estimate of the time: nothing has been measured; --measure does"
    if measure:
        made, finish = _measured_plan(what, words, config, device, budget=budget)
    made = made or _new_plan(what, words, config, machine, device, nproc)
    if json:
        console.result_json(made.as_json())
    elif why is not None:
        console.result(explain_setting(made, why))
    else:
        console.result("\n".join(plan_lines(made, width=console.width())))
        if finish:
            console.note(finish)


def _saved_plan(what: str, words: list[str] | None, config: Path | None, machine: str | None) -> "Plan | None":
    """The plan of a run folder; None when `what` is no folder."""
    from whet.base.errors import UsageError
    from whet.plan.plan import read_plan
    from whet.run.folder import open_run

    if not Path(what).is_dir():
        return None
    if words or config or machine:
        raise UsageError("a run already has its plan", got=f"{what} and settings", try_=f"whet plan {what}")
    return read_plan(open_run(Path(what)).plan, where=f"{what}/plan.json")


def _new_plan(
    what: str, words: list[str] | None, config: Path | None, machine: str | None, device: str, nproc: int
) -> "Plan":
    from whet.cli import console
    from whet.config.resolve import resolve_config
    from whet.machine.known import load_machine
    from whet.machine.probe import probe
    from whet.plan.plan import make_plan
    from whet.recipes.recipe import load_recipe

    recipe = load_recipe(what)
    resolved = resolve_config(recipe.Config, words or (), file=config)
    several = {"world_size": nproc, "local_size": nproc}
    workload = recipe.describe(resolved.config).model_copy(update=several)
    for line in recipe.assumptions(resolved.config):
        console.note(f"note: {line}")
    overrides = resolved.overrides if device == "auto" else {"device": device, **resolved.overrides}
    if machine is not None:
        return make_plan(load_machine(machine), workload, overrides=overrides)
    found = probe()
    return make_plan(found.machine, workload, overrides=overrides, conditions=found.conditions)


def _measured_plan(
    what: str, words: list[str] | None, config: Path | None, device: str, *, budget: float
) -> tuple["Plan", str]:
    """The plan after a search, and what it means for the run in words."""
    from whet.api.autotune import find_batch_size, recipe_bench
    from whet.autotune import cache
    from whet.autotune.result import finish_estimate
    from whet.autotune.search import search
    from whet.cli import console
    from whet.config.resolve import resolve_config
    from whet.plan.plan import with_auto_batch
    from whet.recipes.recipe import load_recipe

    recipe = load_recipe(what)
    resolved = resolve_config(recipe.Config, words or (), file=config, can_measure=True)
    recipe.describe(resolved.config)
    console.note(f"measuring real steps in a process of their own, {budget:.0f} s at most ...")
    chosen, left = None, budget
    with recipe_bench(what, resolved, device=device) as rig, console.measuring_progress("plan") as watch:
        if resolved.is_batch_open:
            chosen = find_batch_size(rig, resolved, budget_seconds=_BATCH_SHARE * budget, watch=watch)
            left -= chosen.spent_seconds
        found = search(rig.plan, rig, budget_seconds=left, watch=watch)
    if found.trials:
        cache.remember(rig.about, found)
    for line in (*(chosen.lines if chosen else ()), *found.words):
        console.note(line)
    made = with_auto_batch(found.applied_to(rig.plan), chosen)
    return made, "\n" + finish_estimate(made, found)
