"""What `whet train` prints: events and the closing summary."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.units import format_seconds
from whet.cli import output

if TYPE_CHECKING:
    from whet.recipes.recipe import Recipe
    from whet.report.run_report import RunReport
    from whet.training.callbacks.event_log import EventHandler
    from whet.training.callbacks.progress import ProgressLine


def event_printer(line: "ProgressLine", path: Path) -> "EventHandler":
    """Return a function that prints the events of a run, and passes its step on to the supervising process."""
    from whet.training.supervisor import report_to_parent

    def show(kind: str, fields: dict[str, Any]) -> None:
        if kind in ("start", "resume", "step"):
            report_to_parent(path, step=fields["step"])
        if output.quiet or output.rank:
            return
        if kind == "end":
            # The command prints its own summary, which says why the run ended.
            line.close()
        else:
            line(kind, fields)

    return show


def print_stopped(path: Path, *, step: int, why: str, command: list[str]) -> None:
    """Print the progress of a stopped run, and the command that resumes it."""
    from whet.report.run_report import summarize

    progress = _progress(summarize(path))
    output.note(f"{why}; saved at step {step:,} in {path}{progress}; to resume:\n  {shlex.join(command)}")


def _progress(report: "RunReport") -> str:
    parts = [f"{format_seconds(report.training_seconds)} of training"]
    if report.loss is not None:
        parts.append(f"loss {report.loss:.4g}")
    if report.goal is not None and report.best_goal is not None:
        parts.append(f"best {report.goal} {report.best_goal:.4g} at step {report.best_goal_step:,}")
    return f" ({', '.join(parts)})"


def print_summary(path: Path, recipe: "Recipe") -> None:
    """Print how a run ended, its results, and commands that use it."""
    from whet.report.run_report import summarize
    from whet.report.text import render_summary

    output.result(render_summary(summarize(path), width=output.width()))
    output.note("\n".join(("", *_next_commands(path, recipe))))


def _next_commands(path: Path, recipe: "Recipe") -> list[str]:
    from whet.run.folder import shell_path

    run = shell_path(path)
    commands = [(f"whet report {run}", "curves, time, settings; --html for a page to keep or share")]
    commands += _use_commands(path, run, recipe)
    commands.append((f"whet watch {shell_path(path.parent)}", "this run and others in the same folder, in the browser"))
    width = max(len(command) for command, _ in commands)
    labels = ("next", *[""] * (len(commands) - 1))
    return [f"{label:<10}{command:<{width}}  {text}" for label, (command, text) in zip(labels, commands, strict=True)]


def _use_commands(path: Path, run: str, recipe: "Recipe") -> Iterator[tuple[str, str]]:
    """Yield commands that use the model. They accept built-in recipes by name only."""
    from whet.recipes.recipe import BUILT_IN
    from whet.run.folder import open_run

    if recipe.name not in BUILT_IN:
        return
    question = recipe.example_input(open_run(path).metadata)
    if question:
        yield f'whet predict {run} "{question}"', "use the model"
    if recipe.supports("play_match"):
        yield f"whet play {run}", "play against it in the browser"
    if recipe.supports("load_generator"):
        yield f"whet chat {run}", "chat with it; whet serve offers it to other programs"
