"""whet plan: how a workload would be executed on a machine, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.plan.plan import Plan


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
    json: Annotated[
        bool, typer.Option("--json", help="As JSON: value, reason, source and evidence of each setting.")
    ] = False,
) -> None:
    """How a workload would run on a machine, and why.

    \b
    whet plan text
    whet plan text global_batch_size=256 --machine m2-air-8gb
    whet plan text --why micro_batch
    whet plan runs/text-001
    """
    from whet.cli import screen
    from whet.plan.explain import explain
    from whet.plan.words import plan_lines

    made = _saved_plan(what, words, config, machine) or _new_plan(what, words, config, machine, device)
    if json:
        screen.result_json(made.as_json())
    elif why is not None:
        screen.result(explain(made, why))
    else:
        screen.result("\n".join(plan_lines(made, width=screen.width())))
        screen.note("\nno estimate of the time: nothing has been measured")


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


def _new_plan(what: str, words: list[str] | None, config: Path | None, machine: str | None, device: str) -> "Plan":
    from whet.config.resolve import resolve
    from whet.machine.known import load_machine
    from whet.machine.probe import probe
    from whet.plan.plan import make_plan
    from whet.recipes.recipe import load_recipe

    recipe = load_recipe(what)
    resolved = resolve(recipe.Config, words or (), file=config)
    workload = recipe.describe(resolved.config)
    wishes = resolved.wishes if device == "auto" else {"device": device, **resolved.wishes}
    if machine is not None:
        return make_plan(load_machine(machine), workload, wishes=wishes)
    found = probe()
    return make_plan(found.machine, workload, wishes=wishes, conditions=found.conditions)
