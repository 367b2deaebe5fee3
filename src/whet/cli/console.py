"""Terminal output: results on stdout, notes and errors on stderr."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from whet.base.errors import LostRankError, WhetError
from whet.base.units import format_percent, printable

if TYPE_CHECKING:
    from whet.autotune.step_bench import ProgressCallback

quiet = False
"""Set by the entry point: notes are left out."""

debug = False
"""Set by the entry point: failures show where they come from."""

_RANK_ZERO_GRACE_SECONDS = 4.0

rank = 0
"""Set once by a training of several processes: only the first one has the screen."""


@contextmanager
def configured(*, quiet: bool, debug: bool) -> Iterator[None]:
    """While entered, one command has the screen; afterwards it is as before, for who calls several in one process."""
    here = globals()
    before = {name: here[name] for name in ("quiet", "debug", "rank")}
    here.update(quiet=quiet, debug=debug, rank=0)
    try:
        yield
    finally:
        here.update(before)


def global_flags() -> list[str]:
    """The switches that hold everywhere, as this process was given them."""
    return [word for word, is_on in (("--quiet", quiet), ("--debug", debug)) if is_on]


def result(text: str) -> None:
    """What was asked for."""
    if not rank:
        print(printable(text))


def stream(text: str) -> None:
    """A bit of what was asked for, as it comes: the line goes on."""
    print(printable(text), end="", flush=True)


def result_json(value: Any) -> None:
    """What was asked for, for a program to read."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def line_json(value: Any) -> None:
    """The same on one line, for a program that reads while we go on."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def user_output_to_stderr() -> AbstractContextManager[object]:
    """While your code runs: what it prints is no part of the result, which a program may read."""
    return redirect_stdout(sys.stderr)


def note(text: str) -> None:
    """What is good to know beside the result."""
    if not quiet and not rank:
        _to_stderr(text)


@contextmanager
def measuring_progress(name: str) -> "Iterator[ProgressCallback | None]":
    """Who is told how far a measurement is: a line that is redrawn on a terminal, plain lines elsewhere, or nobody."""
    if quiet:
        yield None
        return
    from whet.training.callbacks.progress import ProgressLine

    line = ProgressLine(name)
    try:
        yield lambda progress: line("measuring", dict(progress.as_event()))
    finally:
        line.close()


@contextmanager
def progress(name: str) -> "Iterator[Callable[[str, int, int | None], None]]":
    """Who is told what is being done, how much of it, and of how much: shown in place on a terminal, or in lines."""
    if quiet:
        yield lambda _what, _done, _total: None
        return
    from whet.training.callbacks.progress import ProgressLine

    line = ProgressLine(name)

    def show(what: str, done: int, total: int | None) -> None:
        through = f" {done:,}" + (f" of {total:,} ({format_percent(done / total)})" if total else "") if done else ""
        line("measuring", {"words": what + through})

    try:
        yield show
    finally:
        line.close()


def error(problem: WhetError) -> None:
    """A failure in three lines. What every process of a training finds wrong is said by the first one alone."""
    if not rank:
        _to_stderr(f"error: {problem}")
    elif not isinstance(problem, LostRankError):
        # Has the first one failed too, it says so, and the launcher ends this one now. Else nobody but us knows why:
        # a file, say, that is missing on this machine alone.
        time.sleep(_RANK_ZERO_GRACE_SECONDS)
        _to_stderr(f"error: rank {rank}: {problem}")


def rank_lost(line: str) -> None:
    """That another process of a training is gone; said by the one that has found out."""
    _to_stderr(line)


def _to_stderr(text: str) -> None:
    """On standard error, as far as it is there: a full disk behind it must end no training."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(printable(text), file=sys.stderr)


def width() -> int:
    """Columns of the terminal, or a wide page when the output is not one."""
    return shutil.get_terminal_size((120, 40)).columns if sys.stdout.isatty() else 120


def supports_unicode() -> bool:
    """Whether braille curves and arrows can be printed."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the last one is free.

    >>> print(table(("setting", "value"), [("device", "mps"), ("micro_batch", "16")]))
    setting      value
    device       mps
    micro_batch  16
    """
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
