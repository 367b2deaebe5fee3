"""Entry point: run a command, and convert every failure to a three-line message and an exit code."""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from whet.base.errors import UsageError, WhetError, closest_match
from whet.base.process import TerminatedError
from whet.cli import (
    bench,
    chat,
    check,
    compare,
    data,
    doctor,
    export,
    init,
    output,
    plan,
    play,
    predict,
    probe,
    prove,
    report,
    runs,
    search,
    train,
    watch,
)

# Commands in the groups of `whet --help`. Their modules import torch and other large packages inside functions, so that
# --help is fast.
GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Train and use": {
        "train": train.train,
        "search": search.search,
        "init": init.init,
        "data": data.data,
        "data chat": data.data_chat,
        "data hex": data.data_hex,
        "data puzzle": data.data_puzzle,
        "predict": predict.predict,
        "generate": chat.generate,
        "chat": chat.chat,
        "serve": chat.serve,
        "play": play.play,
        "arena": play.arena,
        "export": export.export,
        "import": export.import_weights,
    },
    "Understand and decide": {
        "probe": probe.probe,
        "plan": plan.plan,
        "bench": bench.bench,
    },
    "Trust": {
        "check": check.check,
        "compare": compare.compare,
        "prove": prove.prove,
        "doctor": doctor.doctor,
    },
    "Look": {
        "runs": runs.runs,
        "report": report.report,
        "watch": watch.watch,
        "forward": export.forward,
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

# Command names of other tools, and the equivalent whet command.
_OTHER_VERBS = {
    "tune": "whet search RECIPE lr=1e-5..1e-3:log",
    "sweep": "whet bench RECIPE --sweep global_batch_size=16,32,64 for speed; whet search RECIPE for quality",
    "monitor": "whet watch",
    "benchmark": "whet bench RECIPE",
    "fit": "whet train RECIPE",
    "pretrain": "whet train RECIPE",
    "finetune": "whet train text model=NAME",
    "eval": "whet report RUN, or whet predict RUN FILE",
    "evaluate": "whet report RUN, or whet predict RUN FILE",
}

_EPILOG = "Every command takes --quiet (results and errors only) and --debug (tracebacks of failures)."
# The names in `whet --help` of arguments that take settings.
_SETTINGS = ("KEY=VALUE", "SPACE")
_EXIT_USAGE, _EXIT_INTERRUPTED = 2, 130
# typer does not export the base class of its usage errors, but the public BadParameter derives from it.
_ClickUsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _GroupedHelp(TyperGroup):
    """Lists the commands of `whet --help` in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        column = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                rows = [(name, self.commands[name].get_short_help_str(formatter.width - column)) for name in names]
                formatter.write_dl([(name.ljust(column), text) for name, text in rows])


app = typer.Typer(
    name="whet",
    help="Train your PyTorch model with settings chosen for this machine, and resume it exactly.",
    epilog=_EPILOG,
    cls=_GroupedHelp,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _command in COMMANDS.items():
    app.command(_name, epilog=_EPILOG)(_command)


@app.callback(invoke_without_command=True)
def whet(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from whet import __version__

        output.result(f"whet {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `whet`: run the command in sys.argv and exit with its code."""
    _reserve_standard_streams()
    sys.exit(_flush_streams(run(sys.argv[1:] if arguments is None else arguments)))


def _reserve_standard_streams() -> None:
    """Open /dev/null for closed standard streams. Otherwise, the next opened file would receive their output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def run(arguments: Sequence[str]) -> int:
    """Run the command given by `arguments` and return its exit code."""
    if sys.stdout is None:  # The caller closed stdout (whet train ... >&-). Continue without it.
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    # --quiet and --debug are accepted anywhere on the command line, so typer never sees them.
    switches = {"--quiet", "--debug"}
    args = ["--help" if arg == "-h" else arg for arg in arguments if arg not in switches] or ["--help"]
    # `whet data chat` is one command to typer.
    if " ".join(args[:2]) in COMMANDS:
        args[:2] = [" ".join(args[:2])]
    debug = "--debug" in arguments
    with output.configured(quiet="--quiet" in arguments, debug=debug):
        return _run(args, debug=debug)


def _run(args: list[str], *, debug: bool) -> int:
    try:
        _check_platform()
        return app(args, prog_name="whet", standalone_mode=False) or 0
    except WhetError as error:
        if debug:
            raise
        output.error(error)
        return error.exit_code
    except _ClickUsageError as error:
        output.error(_as_usage_error(error, args))
        return _EXIT_USAGE
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _EXIT_INTERRUPTED
    except TerminatedError as error:
        return error.exit_code
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer converts it to SystemExit.
            return _reader_gone()
        # If user code called sys.exit(), its exit code 0 would wrongly report success.
        from whet.base.origin import user_frames

        if debug or not user_frames(error):
            raise
        output.error(_as_failure(error))
        return 1
    except BrokenPipeError:
        return _reader_gone()
    except Exception as error:
        if debug:
            raise
        output.error(_as_failure(error))
        return 1


def _reader_gone() -> int:
    """Redirect stdout to /dev/null after its reader has closed it (whet plan | head), so that no later flush fails."""
    _discard(sys.stdout)
    return 0


def _flush_streams(code: int) -> int:
    """Flush stdout and stderr, and return the exit code. A failure at interpreter exit could not be reported."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError as error:
        _discard(sys.stdout)
        output.error(_as_failure(error))
        code = code or 1
    if sys.stderr is not None:  # None if closed by the caller.
        try:
            sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)
    return code


def _discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, including what it has buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# --- failures ---------------------------------------------------------------------------------------------------------


def _as_failure(error: BaseException) -> WhetError:
    """Convert an unexpected exception to a WhetError. It is attributed to user code if the traceback contains any."""
    from whet.base.origin import code_origin, failure_frames, frame_name, user_frames

    frames, own_frames = traceback.extract_tb(error.__traceback__), user_frames(error)
    notes = "; ".join(getattr(error, "__notes__", ()))
    got = f"{type(error).__name__}: {error}" + (f"; {notes}" if notes else "")
    traceback_hint = "add --debug to see the traceback"
    if "does not have a deterministic implementation" in got:
        what = "an operator has no deterministic implementation"
        return WhetError(what, got=got.partition(",")[0], try_="deterministic=off, or another operator")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WhetError("the disk is full", got=str(error), try_="free some space, or write elsewhere")
    if own_frames:
        inner = failure_frames(error)[1]
        where = frame_name(own_frames[-1]) + (f"; raised at {frame_name(inner)}" if inner else "")
        return WhetError("your code raised an exception", got=f"{got} ({where})", try_=traceback_hint)
    if frames and code_origin(frames[-1].filename) not in ("whet", "recipe"):
        return WhetError("a library raised an exception", got=got, try_=traceback_hint)
    return WhetError("internal error", got=got, try_=traceback_hint)


def _as_usage_error(error: Exception, args: Sequence[str]) -> UsageError:
    """Convert a usage error of typer. Use the names of parameters in the help."""
    command = next((arg for arg in args if not arg.startswith("-")), "")
    if command not in COMMANDS:
        close = closest_match(command, COMMANDS)
        hint = _OTHER_VERBS.get(command) or (f"whet {close}" if close else "whet --help")
        from whet.recipes.recipe import BUILT_IN

        targets = [arg for arg in args if arg in BUILT_IN or arg.endswith(".py")]
        hint = hint.replace("RECIPE", targets[0]) if targets else hint
        return UsageError("no such command", got=command or " ".join(args), try_=hint)
    what = str(error)[:1].lower() + str(error)[1:].rstrip(".")
    setting = _setting_without_dashes(error, args)
    if setting is not None:
        return UsageError(what, got="whet " + " ".join(args), try_=f"{setting} (settings have no dashes)")
    parameter = getattr(error, "param", None)
    if parameter is not None:
        options = [name for name in parameter.opts if name.startswith("-")][:1]
        name = parameter.metavar or parameter.name
        if str(error).startswith("Missing parameter"):
            what = " ".join([*options, name, "is missing"])
        elif isinstance(error, typer.BadParameter):
            what = f"{options[0] if options else name}: {what}"
    return UsageError(what, got="whet " + " ".join(args), try_=f"whet {command} --help")


def _setting_without_dashes(error: Exception, args: Sequence[str]) -> str | None:
    """Return the setting, as KEY=VALUE, that was probably meant by an option that does not exist, or None."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    takes_settings = context is not None and any(p.metavar in _SETTINGS for p in context.command.params)
    if option is None or not takes_settings:
        return None
    from whet.config.options import ALIASES, CommonConfig
    from whet.config.resolve import known_keys
    from whet.recipes.recipe import BUILT_IN, load_factory

    recipe = next((arg for arg in args if arg in BUILT_IN), None)
    # Importing a user's file could run anything, so only the common keys are known then.
    known = known_keys(load_factory(recipe)().Config if recipe else CommonConfig)
    key = option.lstrip("-").replace("-", "_")
    key = ALIASES.get(key, key)
    if key not in known:
        return None
    index = next(i for i, arg in enumerate(args) if arg.partition("=")[0] == option)
    _, has_value, value = args[index].partition("=")
    if not has_value:
        value = next((arg for arg in args[index + 1 : index + 2] if not arg.startswith("--")), "...")
    return f"{key}={value}"


def _check_platform() -> None:
    if sys.platform == "win32":
        raise WhetError("whet runs on macOS and Linux", got="Windows", try_="WSL, where whet can use CUDA")
