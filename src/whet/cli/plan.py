"""`whet plan`: show how a workload would be executed on a machine, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.errors import UsageError
from whet.cli import output
from whet.cli.options import ConfigFile, Device, Settings

if TYPE_CHECKING:
    from whet.plan.plan import Plan

# Fraction of the budget for finding a global batch size (global_batch_size=auto).
_BATCH_SHARE = 1 / 3


def plan(
    target: Annotated[
        str,
        typer.Argument(metavar="RECIPE|FILE|RUN", help="text, train.py:main, a recipe's file, or a run folder."),
    ],
    settings: Settings = None,
    config: ConfigFile = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|CHIP,memory=GB|FILE", help="Plan for another machine; no torch needed.")
    ] = None,
    device: Device = "auto",
    why: Annotated[
        str | None,
        typer.Option(metavar="SETTING", help="Explain one setting: its rule, evidence and how to override it."),
    ] = None,
    nproc: Annotated[
        int, typer.Option(min=1, max=1024, help="Plan for this many processes, as in whet train --nproc.")
    ] = 1,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time real steps on this machine and use the fastest settings.")
    ] = False,
    budget: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Time limit of the measurement.")] = 60.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print value, reason, source and evidence of each setting as JSON.")
    ] = False,
) -> None:
    """Show how a workload would run on a machine, and why.

    \b
    whet plan text
    whet plan text global_batch_size=256 --machine m2-air-8gb
    whet plan text --why micro_batch
    whet plan text --machine h200 --nproc 8
    whet plan train.py:main --machine m2-air-8gb
    whet plan text --measure
    whet plan text global_batch_size=auto --measure
    whet plan runs/text-001
    """
    from whet.distributed.ranks import check_not_mps
    from whet.plan.estimate import estimate_speed
    from whet.plan.render import explain_setting, plan_lines

    check_not_mps(nproc, device=device, is_mac=False, command=f"whet train {target}")
    made = _saved_plan(target, settings, config, machine)
    if made is not None and (measure or nproc > 1):
        option = "--measure" if measure else f"--nproc {nproc}"
        raise UsageError("a run already has its plan", got=f"{target} and {option}", try_=f"{option} with a recipe")
    if measure and nproc > 1:
        raise UsageError(
            "steps of several processes cannot be measured", got=f"--measure --nproc {nproc}", try_="one of the two"
        )
    if measure and machine is not None:
        raise UsageError("only this machine can be measured", got=f"--machine {machine}", try_="--measure alone")
    # Do not estimate the duration of an existing run, which `whet report` shows, or of a measured plan.
    is_estimated, note = not made and not measure, ""
    if measure:
        made, note = _measured_plan(target, settings, config, device, budget=budget)
    made = made or _new_plan(target, settings, config, machine, device, nproc)
    check_not_mps(nproc, device=device, is_mac=made.device == "mps", command=f"whet train {target}")
    estimate = estimate_speed(made) if is_estimated else None
    if is_estimated:
        note = "\n" + (estimate.line if estimate else "no estimate of the duration: the device is not in the tables")
        if machine is None:
            note += "; add --measure"
    if json:
        output.result_json({**made.as_json(), **({"estimate": estimate.as_json()} if estimate else {})})
    elif why is not None:
        output.result(explain_setting(made, why, width=output.width()))
    else:
        output.result("\n".join(plan_lines(made, width=output.width())))
        if note:
            output.note(note)


def _saved_plan(target: str, settings: list[str] | None, config: Path | None, machine: str | None) -> "Plan | None":
    """Return the plan of a run folder, or None if `target` is not a folder."""
    from whet.plan.plan import read_plan
    from whet.run.folder import open_run

    if not Path(target).is_dir():
        return None
    if settings or config or machine:
        raise UsageError("a run already has its plan", got=f"{target} and settings", try_=f"whet plan {target}")
    run = open_run(Path(target))
    plan = read_plan(run.plan, where=f"{target}/plan.json")
    # The plan of a run that was trained from Python does not contain the name of its script.
    workload = plan.workload.model_copy(update={"recipe": run.header.title})
    return plan.model_copy(update={"workload": workload})


def _new_plan(
    target: str, settings: list[str] | None, config: Path | None, machine: str | None, device: str, nproc: int
) -> "Plan":
    from whet.api.target import ScriptTraining, load_training, measured_workload
    from whet.config.resolve import resolve_config
    from whet.machine.known import load_machine
    from whet.machine.probe import probe
    from whet.plan.plan import make_plan

    training = load_training(target)
    notes: tuple[str, ...] = ()
    if isinstance(training, ScriptTraining):
        _check_no_settings(target, settings, config)
        described, own = measured_workload(training), training.config.overrides
    else:
        resolved = resolve_config(training.Config, settings or (), file=config)
        described, own = training.describe(resolved.config), resolved.overrides
        notes = training.assumptions(resolved.config)
    workload = described.model_copy(update={"world_size": nproc, "local_size": nproc})
    for line in notes:
        output.note(f"note: {line}")
    overrides = own if device == "auto" else {"device": device, **own}
    if machine is not None:
        return make_plan(load_machine(machine), workload, overrides=overrides)
    probed = probe()
    return make_plan(probed.machine, workload, overrides=overrides, system_state=probed.system_state)


def _check_no_settings(target: str, settings: list[str] | None, config: Path | None) -> None:
    """Raise UsageError if settings are given for a script, which has its settings in its code."""
    if settings or config:
        raise UsageError(
            "a script has its settings in its code",
            got=" ".join([target, *(settings or [f"--config {config}"])]),
            try_=f"overrides={{...}} in {target.partition(':')[0]}",
        )


def _measured_plan(
    target: str, settings: list[str] | None, config: Path | None, device: str, *, budget: float
) -> tuple["Plan", str]:
    """Measure real steps. Return the fastest plan, and a line that estimates the duration of the run."""
    from whet.api.autotune import find_batch_size, function_bench, recipe_bench
    from whet.api.target import ScriptTraining, load_training
    from whet.autotune import cache
    from whet.autotune.result import finish_estimate
    from whet.autotune.search import search
    from whet.config.resolve import resolve_config
    from whet.plan.plan import with_auto_batch

    training, resolved = load_training(target), None
    if isinstance(training, ScriptTraining):
        _check_no_settings(target, settings, config)
        opened = function_bench(training, device=device)
    else:
        resolved = resolve_config(training.Config, settings or (), file=config, can_measure=True)
        training.describe(resolved.config)
        opened = recipe_bench(target, resolved, device=device)
    output.note(f"measuring real steps in a separate process, at most {budget:.0f} s ...")
    batch, remaining = None, budget
    with opened as bench, output.measuring_progress("plan") as watch:
        if resolved is not None and resolved.is_batch_open:
            batch = find_batch_size(bench, resolved, budget_seconds=_BATCH_SHARE * budget, on_progress=watch)
            remaining -= batch.spent_seconds
        result = search(bench.plan, bench, budget_seconds=remaining, on_progress=watch)
    if result.trials:
        cache.save(bench.about, result)
    for line in (*(batch.lines if batch else ()), *result.summary):
        output.note(line)
    made = with_auto_batch(result.applied_to(bench.plan), batch)
    return made, "\n" + finish_estimate(made, result)
