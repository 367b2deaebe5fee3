"""`whet prove`: prove that an interrupted training run ends with the same bits as an uninterrupted one."""

import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.base.errors import UsageError
from whet.base.units import format_bytes, format_seconds
from whet.cli import output
from whet.cli.options import ConfigFile, Device, Json, RecipeFile, Settings

if TYPE_CHECKING:
    from whet.run.proof import KillCounts, Proof

# Names of state that a resume did not restore; more are only counted.
_MAX_NAMES = 8


def prove(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FILE|RUN", help="text, a Python file with recipe() or main(), FILE.py:function, or a run."
        ),
    ],
    settings: Settings = None,
    kills: Annotated[int, typer.Option(min=1, max=10_000, help="Number of kills at random times.")] = 20,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**30, help="Seed of the kill times. Default: random, and printed.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Steps to train. Default: 48, or fewer if steps are slow.")
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Time limit of the kills at disk operations.")
    ] = 60.0,
    config: ConfigFile = None,
    recipe: RecipeFile = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Kill a run repeatedly, resume it, and compare every bit.

    \b
    whet prove text
    whet prove my_recipe.py ema=true --kills 100
    whet prove train.py:main
    whet prove runs/text-001

    A function such as main() takes no arguments and calls whet.train or whet.Session. Its `run` is redirected.

    A short part of your training run is first executed twice without interruption. If the two runs differ, training is not
    deterministic, and nothing can be proved. Then training is killed with SIGKILL at random times, and before every
    disk operation while it resumes, saves and cleans up, and is resumed after each kill. At the end, the last
    checkpoint (weights, EMA, optimizer, random generators), losses and metrics are compared bit for bit with those of
    the uninterrupted run.

    This takes a minute or two. The result is written to proof.json in RUN, or in a new run folder with the
    uninterrupted run. The checkpoints of RUN are not changed. The exit code is 1 if a difference was found or nothing
    can be proved.
    """
    from whet.api.prove import training_from_args, training_from_run
    from whet.prove.proof import ProofRequest, scratch_directory
    from whet.prove.proof import prove as prove_training
    from whet.run.folder import next_run_path, shell_path

    run = Path(target) if Path(target).is_dir() else None
    if run is not None and (settings or config):
        raise UsageError("a run already has its settings", got=f"{target} and settings", try_=f"whet prove {target}")
    if run is None and recipe is not None:
        raise UsageError("--recipe needs a run", got=f"{target} is not a run folder", try_=f"whet prove {recipe}")
    with output.user_output_to_stderr():
        name, training = (
            training_from_run(run, file=recipe, device=device)
            if run is not None
            else training_from_args(target, settings or (), file=config, device=device)
        )
    # A random seed is part of the printed command that repeats the proof.
    seed = secrets.randbelow(10**6) if seed is None else seed
    options = [*(("--recipe", recipe) if recipe else ()), *(("--config", str(config)) if config else ())]
    options += [*(("--device", device) if device != "auto" else ()), *(("--steps", str(steps)) if steps else ())]
    options += ["--budget", f"{budget:g}"] if budget != 60 else []
    repeat = ["whet", "prove", target, *(settings or ()), *options, "--kills", str(kills), "--seed", str(seed)]
    folder = run.absolute() if run else next_run_path(Path("runs"), recipe=f"{name}-proof").absolute()
    with scratch_directory(folder) as scratch:
        request = ProofRequest(
            training=training,
            recipe=name,
            scratch=scratch,
            repeat=shlex.join(repeat),
            kills=kills,
            seed=seed,
            steps=steps,
            disk_seconds=budget,
            log=output.note,
        )
        proof, uninterrupted = prove_training(request)
        proof = _write(proof, uninterrupted, folder, config=training.arguments["config"], is_run=run is not None)
    if json:
        output.result_json(proof.as_json())
    else:
        output.result("\n".join(render_proof(proof)))
    shown = shell_path(folder)
    output.note(f"{shown}/proof.json has all details; whet report {shown} shows the verdict")
    if proof.verdict != "proved":
        raise typer.Exit(1)


def _write(proof: "Proof", uninterrupted: Path, folder: Path, *, config: dict[str, Any], is_run: bool) -> "Proof":
    """Write the proof into `folder` if it is a run, else into the uninterrupted run, which is moved to `folder`.

    Return the completed proof.
    """
    from whet.api.prove import describe_changes
    from whet.run import durable
    from whet.run.folder import open_run
    from whet.run.proof import write_proof

    proof = proof.model_copy(update={"shortened": describe_changes(config, open_run(uninterrupted).config)})
    write_proof(folder if is_run else uninterrupted, proof)
    if not is_run:
        durable.move(uninterrupted, folder)
    return proof


# --- Text ------------------------------------------------------------------------------------------------------------


def render_proof(proof: "Proof") -> list[str]:
    """Return a proof as lines of text: first the verdict, then the evidence."""
    reason = "killed, resumed, and every bit is equal" if proof.verdict == "proved" else proof.reason or ""
    lines = [_line(proof.verdict, f"{proof.recipe}: {reason}")]
    if proof.difference is not None:
        where = f"; after {proof.difference.kills}" if proof.difference.kills else ""
        lines.append(_line("differs", proof.difference.what + where))
        if names := proof.difference.not_restored:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            how = 'session.register("name", object), or register={"name": object}'
            lines.append(_line("not restored", f"{', '.join(names[:_MAX_NAMES])}{more}; {how} saves an object"))
    training = f"{proof.steps} steps on {proof.device}"
    lines.append(_line("training", training + "".join(f"; {change}" for change in proof.shortened)))
    lines.append(_line("at random", _render_counts(proof.at_random)))
    calls = f"{proof.disk_calls} calls of a resume, a save and its cleanup"
    lines.append(_line("disk calls", f"{calls}; {_render_counts(proof.at_disk_calls)}"))
    compared = proof.compared
    left_out = f"; left out: {', '.join(compared.left_out)}" if compared.left_out else ""
    lines.append(
        _line(
            "compared",
            f"{compared.runs} interrupted runs with an uninterrupted one: {compared.tensors} tensors "
            f"({format_bytes(compared.bytes)}), {compared.losses} losses, {compared.metrics} metrics and all facts"
            f"{left_out}",
        )
    )
    lines.append(_line("processes", proof.launch))
    lines.append(_line("repeat", f"{proof.repeat} ({format_seconds(proof.seconds)})"))
    return lines


def _render_counts(counts: "KillCounts") -> str:
    return (
        f"{counts.kills} kills, {counts.inside_save} inside a save; {counts.processes} processes, "
        f"{counts.resumed} resumed; {counts.leftovers} leftovers, {counts.torn} torn"
    )


def _line(label: str, text: str) -> str:
    return f"{label:<18}{text}"
