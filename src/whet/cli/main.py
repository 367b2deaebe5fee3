"""The entry point: finds the verb, and turns every failure into three lines and an exit code."""

import errno
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import typer

from whet.base.errors import UsageError, WhetError, closest_match
from whet.base.process import TerminatedError
from whet.cli import (
    arena,
    bench,
    chat,
    check,
    compare,
    console,
    data,
    data_chat,
    data_hex,
    doctor,
    export,
    forward,
    generate,
    import_weights,
    init,
    plan,
    play,
    predict,
    probe,
    prove,
    report,
    runs,
    search,
    serve,
    train,
    watch,
)

VERBS: dict[str, Callable[..., None]] = {
    "probe": probe.probe,
    "plan": plan.plan,
    "train": train.train,
    "bench": bench.bench,
    "arena": arena.arena,
    "data": data.data,
    "data chat": data_chat.data_chat,
    "data hex": data_hex.data_hex,
    "predict": predict.predict,
    "generate": generate.generate,
    "chat": chat.chat,
    "serve": serve.serve,
    "play": play.play,
    "runs": runs.runs,
    "watch": watch.watch,
    "report": report.report,
    "export": export.export,
    "forward": forward.forward,
    "init": init.init,
    "import": import_weights.import_file,
    "check": check.check,
    "doctor": doctor.doctor,
    "prove": prove.prove,
    "search": search.search,
    "compare": compare.compare,
}

_EPILOG = "Everywhere: --quiet prints results and errors only, --debug shows the traceback of a failure."
_INTERRUPTED, _USAGE = 130, 2
_PACKAGE_ROOT = str(Path(__file__).parent.parent)
# typer keeps its usage errors private; the public BadParameter is one of them.
_ClickUsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="whet",
    help="Trains your PyTorch model as fast as this machine allows, without changing what is trained.",
    epilog=_EPILOG,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _verb in VERBS.items():
    app.command(_name, epilog=_EPILOG)(_verb)


@app.callback(invoke_without_command=True)
def whet(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from whet import __version__

        console.result(f"whet {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    _reserve_standard_streams()
    sys.exit(_flush_streams(run(sys.argv[1:] if arguments is None else arguments)))


def _reserve_standard_streams() -> None:
    """A closed one would be given to the next file that is opened, and messages would be written into that."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def run(arguments: Sequence[str]) -> int:
    """Runs one command; its exit code."""
    if sys.stdout is None:  # Closed by the caller (whet train ... >&-): there is work to do all the same.
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    switches = {"--quiet", "--debug"}
    words = ["--help" if word == "-h" else word for word in arguments if word not in switches] or ["--help"]
    if " ".join(words[:2]) in VERBS:
        words[:2] = [" ".join(words[:2])]
    debug = "--debug" in arguments
    with console.configured(quiet="--quiet" in arguments, debug=debug):
        return _run(words, debug=debug)


def _run(words: list[str], *, debug: bool) -> int:
    try:
        _check_platform()
        return app(words, standalone_mode=False) or 0
    except WhetError as error:
        if debug:
            raise
        console.error(error)
        return error.exit_code
    except _ClickUsageError as error:
        console.error(_as_usage_error(error, words))
        return _USAGE
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except TerminatedError as error:
        return error.exit_code
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # What typer makes of one.
            return _reader_gone()
        # Of yours: an exit code of 0 would say that all went well.
        if debug or not _your_frames(error):
            raise
        console.error(_as_failure(error))
        return 1
    except BrokenPipeError:
        return _reader_gone()
    except Exception as error:
        if debug:
            raise
        console.error(_as_failure(error))
        return 1


def _reader_gone() -> int:
    """The reader went away (whet plan | head): a flush at exit would fail again."""
    _drop(sys.stdout)
    return 0


def _flush_streams(code: int) -> int:
    """What is still held back is written, and the exit code: at the interpreter's end a failure could not be told."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop(sys.stdout)
    except OSError as error:
        _drop(sys.stdout)
        console.error(_as_failure(error))
        code = code or 1
    if sys.stderr is not None:  # Closed by the caller.
        try:
            sys.stderr.flush()
        except OSError:
            _drop(sys.stderr)
    return code


def _drop(stream: TextIO) -> None:
    """What it holds, and all that comes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _as_failure(error: BaseException) -> WhetError:
    """What went wrong that nobody foresaw: in the user's own file if the traceback passes through one, else in ours."""
    frames, yours = traceback.extract_tb(error.__traceback__), _your_frames(error)
    got = f"{type(error).__name__}: {error}"
    if "does not have a deterministic implementation" in got:
        what = "an operator has no deterministic form"
        return WhetError(what, got=got.partition(",")[0], try_="deterministic=off, or another operator")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WhetError("the disk is full", got=str(error), try_="make room, or write elsewhere")
    if yours:
        where = f"{Path(yours[-1].filename).name}:{yours[-1].lineno} in {yours[-1].name}()"
        return WhetError("your code failed", got=f"{got} ({where})", try_="--debug shows the whole way there")
    if frames and not frames[-1].filename.startswith(_PACKAGE_ROOT):
        return WhetError("a library refused what it was asked to do", got=got, try_="--debug shows the whole way there")
    return WhetError("this should not have happened", got=got, try_="--debug shows where")


def _your_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines on the way to it that are neither ours nor a library's."""
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE_ROOT, "<")) and not _is_library(frame.filename)
    ]


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith(sysconfig.get_path("stdlib"))


def _as_usage_error(error: Exception, words: Sequence[str]) -> UsageError:
    verb = next((word for word in words if not word.startswith("-")), "")
    if verb not in VERBS:
        meant = closest_match(verb, VERBS)
        return UsageError(
            "no such command", got=verb or " ".join(words), try_=f"whet {meant}" if meant else "whet --help"
        )
    what = _missing(error) or _of_which(error) + str(error)[:1].lower() + str(error)[1:].rstrip(".")
    return UsageError(what, got="whet " + " ".join(words), try_=f"whet {verb} --help")


def _missing(error: Exception) -> str | None:
    """A missing word as the help names it, not as the source does; None for other errors."""
    parameter = getattr(error, "param", None)
    if parameter is None or not str(error).startswith("Missing parameter"):
        return None
    names = [name for name in parameter.opts if name.startswith("-")][:1]
    return " ".join([*names, parameter.metavar or parameter.name, "is missing"])


def _of_which(error: Exception) -> str:
    """The option or word whose value is wrong: the reason alone does not name it."""
    parameter = getattr(error, "param", None)
    if parameter is None or not isinstance(error, typer.BadParameter):
        return ""
    names = [name for name in parameter.opts if name.startswith("-")][:1]
    return f"{names[0] if names else parameter.metavar or parameter.name}: "


def _check_platform() -> None:
    if sys.platform == "win32":
        raise WhetError("whet runs on macOS and Linux", got="Windows", try_="WSL, where whet sees the GPU through CUDA")
