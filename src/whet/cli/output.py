"""Terminal output: results on stdout, notes and errors on stderr."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from whet.base.errors import LostRankError, WhetError
from whet.base.units import format_percent, printable, printable_line
from whet.report.table import align_columns

if TYPE_CHECKING:
    from whet.autotune.step_bench import ProgressCallback

# Set by --quiet, which suppresses notes.
quiet = False

# Set by --debug, which shows the tracebacks of failures.
debug = False

# The rank of this process in distributed training. Only rank 0 prints.
rank = 0

_RANK_ZERO_GRACE_SECONDS = 4.0


@contextmanager
def configured(*, quiet: bool, debug: bool) -> Iterator[None]:
    """Set the global flags (quiet, debug) for one command.

    Restore them on exit, because a process may run several commands.
    """
    module = globals()
    before = {name: module[name] for name in ("quiet", "debug", "rank")}
    module.update(quiet=quiet, debug=debug, rank=0)
    try:
        yield
    finally:
        module.update(before)


def global_flags() -> list[str]:
    """Return --quiet and --debug if they are set, for the command line of a child process."""
    return [word for word, is_on in (("--quiet", quiet), ("--debug", debug)) if is_on]


def result(text: str) -> None:
    if not rank:
        print(printable(text))


def stream(text: str) -> None:
    """Print part of a result and flush, without a line break."""
    print(printable(text), end="", flush=True)


def result_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def line_json(value: Any) -> None:
    """Print JSON on one line and flush, so that a reader gets it before the command ends."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def link(running: Any, *, as_json: bool, note_text: str, **fields: Any) -> None:
    """Print the link of a running server and a note, or JSON."""
    if as_json:
        line_json({"url": running.url, "link": running.link(), "pid": running.pid, **fields})
    else:
        result(running.link())
        note(note_text)
    sys.stdout.flush()


def user_output_to_stderr() -> AbstractContextManager[object]:
    """Redirect stdout to stderr while user code runs, so that a program that reads stdout gets only the result."""
    return redirect_stdout(sys.stderr)


def note(text: str) -> None:
    """Print a note to stderr, unless --quiet."""
    if not quiet and not rank:
        _to_stderr(text)


def error(problem: WhetError) -> None:
    """Print an error in three lines. If all ranks fail the same way, only rank 0 prints it."""
    if not rank:
        _to_stderr(f"error: {problem}")
    elif not isinstance(problem, LostRankError):
        # If rank 0 failed too, the launcher ends this process during the wait. Otherwise, only this rank has the
        # problem, such as a file that is missing on its machine.
        time.sleep(_RANK_ZERO_GRACE_SECONDS)
        _to_stderr(f"error: rank {rank}: {problem}")


def failed_request(problem: BaseException) -> None:
    """Print a note about an exception in a server's request handler."""
    import traceback

    shown = "".join(traceback.format_exception(problem)) if debug else f"{type(problem).__name__}: {problem}"
    note(f"a request failed: {shown}")


def rank_lost(line: str) -> None:
    """Print that a rank is lost, on whichever rank detects it."""
    _to_stderr(line)


def _to_stderr(text: str) -> None:
    # A closed stderr, or a full disk that it is redirected to, must not end a training run.
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(printable(text), file=sys.stderr)


@contextmanager
def measuring_progress(name: str) -> "Iterator[ProgressCallback | None]":
    """Yield a function that shows the progress of a measurement, or None with --quiet."""
    if quiet:
        yield None
        return
    with _progress_line(name) as line:
        yield lambda progress: line("measuring", dict(progress.as_event()))


@contextmanager
def progress(name: str) -> "Iterator[Callable[[str, int, int | None], None]]":
    """Yield a function (what, done, total) that shows progress, in place on a terminal, otherwise as lines."""
    if quiet:
        yield lambda _what, _done, _total: None
        return

    def show(what: str, done: int, total: int | None) -> None:
        count = f" {done:,}" + (f" of {total:,} ({format_percent(done / total)})" if total else "") if done else ""
        line("measuring", {"message": what + count})

    with _progress_line(name) as line:
        yield show


@contextmanager
def _progress_line(name: str) -> Iterator[Any]:
    from whet.training.callbacks.progress_line import ProgressLine

    line = ProgressLine(name)
    try:
        yield line
    finally:
        line.close()


def width() -> int:
    """Return the width of the terminal in columns, or 120 if stdout is not a terminal."""
    return shutil.get_terminal_size((120, 40)).columns if sys.stdout.isatty() else 120


def supports_unicode() -> bool:
    """Return whether stdout can print braille curves and arrows."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns to their widest cell.

    >>> print(table(("setting", "value"), [("device", "mps"), ("micro_batch", "16")]))
    setting      value
    device       mps
    micro_batch  16
    """
    return "\n".join(align_columns([header, *([printable_line(cell) for cell in row] for row in rows)]))
