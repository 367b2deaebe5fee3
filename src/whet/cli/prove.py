"""whet prove: does an interrupted training really end with the same bits?"""

import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from whet.prove.kills import ProvableTraining
    from whet.recipes.recipe import Recipe
    from whet.run.proof import Proof


def prove(
    what: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE|RUN", help="text, a Python file with recipe(), or a run.")
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as ema=true lr=1e-4.")] = None,
    kills: Annotated[int, typer.Option(min=1, max=10_000, help="Kills at random instants.")] = 20,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**30, help="Decides when; drawn and shown if not given.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Train so many steps; 48, or fewer where steps are slow.")
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="For the kills at disk calls; the rest is left out.")
    ] = 60.0,
    config: Annotated[
        Path | None, typer.Option("--config", "--config-name", metavar="FILE", help="Settings from TOML or YAML.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(metavar="FILE", help="The file of a run whose recipe is yours.")] = None,
    device: Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the whole proof as JSON.")] = False,
) -> None:
    """Kill a training again and again, resume it, and compare every bit.

    \b
    whet prove text
    whet prove my_recipe.py ema=true --kills 100
    whet prove runs/text-001

    A short piece of your training runs twice without a break: if those two differ, it is not deterministic, and nothing
    can be proved. Then it is killed with SIGKILL at random instants, and before every call that changes the disk while
    it resumes, saves and tidies up. Each time it goes on, and its last checkpoint (weights, average, optimizer,
    generators), its losses and its metrics are compared with those of the undisturbed run, bit for bit.

    It takes a minute or two. The verdict goes to proof.json in RUN, or in a new run folder that holds the undisturbed
    piece; the checkpoints of RUN are not touched. Exit code 1: broken, or cannot be proved.
    """
    from whet.api.prove import training_from_args, training_from_run
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.prove.proof import ProofRequest, render_proof, scratch_beside
    from whet.prove.proof import prove as find_out
    from whet.run.folder import next_run_path

    run = Path(what) if Path(what).is_dir() else None
    if run is not None and (words or config):
        raise UsageError("a run has its settings already", got=f"{what} and settings", try_=f"whet prove {what}")
    if run is None and recipe is not None:
        raise UsageError("--recipe belongs to a run", got=f"{what} is no run folder", try_=f"whet prove {recipe}")
    made: Recipe
    training: ProvableTraining
    if run is not None:
        made, training = training_from_run(run, file=recipe, device=device)
    else:
        made, training = training_from_args(what, words or (), file=config, device=device)
    seed = secrets.randbelow(10**6) if seed is None else seed
    options = [*(("--recipe", recipe) if recipe else ()), *(("--config", str(config)) if config else ())]
    options += [*(("--device", device) if device != "auto" else ()), *(("--steps", str(steps)) if steps else ())]
    options += ["--budget", f"{budget:g}"] if budget != 60 else []
    repeat = ["whet", "prove", what, *(words or ()), *options, "--kills", str(kills), "--seed", str(seed)]
    kept = run.absolute() if run else next_run_path(Path("runs"), recipe=f"{made.name}-proof").absolute()
    with scratch_beside(kept) as scratch:
        question = ProofRequest(
            training=training,
            recipe=made.name,
            scratch=scratch,
            repeat=shlex.join(repeat),
            kills=kills,
            seed=seed,
            steps=steps,
            disk_seconds=budget,
            say=console.note,
        )
        found, whole = find_out(question)
        found = _written(found, whole, kept, asked=training.arguments["config"], is_run=run is not None)
    if json:
        console.result_json(found.as_json())
    else:
        console.result("\n".join(render_proof(found)))
    console.note(f"{_short(kept)}/proof.json holds all of it; whet report {_short(kept)} shows the verdict")
    if found.verdict != "proved":
        raise typer.Exit(1)


def _written(found: "Proof", whole: Path, kept: Path, *, asked: dict[str, Any], is_run: bool) -> "Proof":
    """Puts the proof into its run folder: the one that was given, or the undisturbed piece under a name of its own."""
    from whet.api.prove import describe_changes
    from whet.run.folder import open_run
    from whet.run.proof import write_proof

    found = found.model_copy(update={"shortened": describe_changes(asked, open_run(whole).config)})
    write_proof(kept if is_run else whole, found)
    if not is_run:
        whole.rename(kept)
    return found


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
