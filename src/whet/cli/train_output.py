"""What `whet train` prints at its end, and desktop notifications about restarts."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whet.report.run_report import RunReport


def print_summary(path: Path, *, question: str | None, can_play: bool = False, can_speak: bool = False) -> None:
    """The report of a run, then what is next; `question` is one that `whet predict` can answer."""
    from whet.cli import console
    from whet.report.run_report import summarize
    from whet.report.text import render_text

    report = summarize(path)
    console.result(render_text(report, width=console.width(), unicode=console.supports_unicode(), has_settings=False))
    console.note(
        "\n".join(("", f"kept      {path}", *_next(path, question=question, can_play=can_play, can_speak=can_speak)))
    )


def print_stopped(path: Path, *, step: int, why: str, command: list[str]) -> None:
    """How far it came, and the command that goes on."""
    from whet.cli import console
    from whet.report.run_report import summarize

    console.note(f"saved at step {step:,}{why} in {path}{_so_far(summarize(path))}; to go on:\n  {shlex.join(command)}")


@contextlib.contextmanager
def restart_notifier(name: str, *, is_wanted: bool) -> Iterator[Callable[[str], None]]:
    """While entered: says what is told to it, and also notifies, where that is wanted; of a last kill too."""
    from whet.cli import console
    from whet.training.supervisor import KilledError

    if not is_wanted:
        yield console.note
        return

    def say(text: str) -> None:
        console.note(text)
        _notify(f"whet: {name} needs attention", text)

    try:
        yield say
    except KilledError as error:
        _notify(f"whet: {name} failed", f"{error.what}: {error.got}")
        raise


def _notify(title: str, text: str) -> None:
    import sys

    from whet.cli import console
    from whet.machine.desktop import notify

    problem = notify(title, text, terminal=sys.stderr)
    if problem is not None:
        console.note(f"no notification: {problem}")


def _so_far(report: "RunReport") -> str:
    from whet.base.units import format_seconds

    parts = [f"{format_seconds(report.training_seconds)} of training"]
    if report.loss is not None:
        parts.append(f"loss {report.loss:.4g}")
    if report.goal is not None and report.best_goal is not None:
        parts.append(f"best {report.goal} {report.best_goal:.4g} at step {report.best_goal_step:,}")
    return f" ({', '.join(parts)})"


def _next(path: Path, *, question: str | None, can_play: bool, can_speak: bool) -> list[str]:
    run = shlex.quote(str(path))
    commands = [
        (f"whet report {run} --html", "one page with its curves and decisions, to keep or to share"),
        *([(f'whet predict {run} "{question}"', "uses it")] if question else []),
        *([(f"whet play {run}", "a game against it in the browser")] if can_play else []),
        *([(f"whet chat {run}", "talks with it; whet serve does so for other programs")] if can_speak else []),
        (f"whet watch {shlex.quote(str(path.parent))}", "this run and its neighbours in the browser"),
    ]
    width = max(len(command) for command, _ in commands)
    labels = ("next", *[""] * (len(commands) - 1))
    return [f"{label:<10}{command:<{width}}  {words}" for label, (command, words) in zip(labels, commands, strict=True)]
