"""Which machines does whet know by name, and what is in a machine file? Plans for any Mac on any computer."""

import json
from importlib import resources
from pathlib import Path

from whet.base.errors import UsageError, nearest
from whet.machine.facts import Machine, Probe

_LARGEST_FILE = 1_000_000


def known_names() -> tuple[str, ...]:
    """The machines that come with whet, sorted."""
    files = resources.files("whet.machine").joinpath("known").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_machine(name_or_file: str | Path) -> Machine:
    """A known machine by its name, or the one in a file written by `whet probe --json`."""
    if str(name_or_file) in known_names():
        file = resources.files("whet.machine").joinpath("known", f"{name_or_file}.json")
        return machine_in(file.read_text(encoding="utf-8"), where=str(name_or_file))
    path = Path(name_or_file)
    return machine_in(_read(path), where=str(path))


def machine_in(text: str, *, where: str) -> Machine:
    """The machine in JSON text: a bare one, or a whole probe of which only the machine is taken."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where} is not JSON", got=str(error)[:200], try_="whet probe --json > machine.json"
        ) from None
    if isinstance(data, dict) and "machine" in data:
        return Probe.from_json(data, where=where).machine
    return Machine.from_json(data, where=where)


def _read(path: Path) -> str:
    """The text of a user's file, or an error that says what is wrong with it."""
    try:
        if not path.exists():
            raise _unknown(str(path))
        if not path.is_file():
            raise UsageError("a machine file must be a plain file", got=str(path), try_=_names())
        if path.stat().st_size > _LARGEST_FILE:
            raise UsageError(
                f"{path} is too large to be a machine file",
                got=f"{path.stat().st_size:,} bytes",
                try_="the output of `whet probe --json`, a few kB",
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text", got="bytes that are not UTF-8", try_="a JSON file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read", got=error.strerror or error, try_=_names()) from None


def _unknown(name: str) -> UsageError:
    meant = nearest(name, known_names())
    hint = f"did you mean {meant!r}? " if meant else ""
    return UsageError("no machine of that name, and no such file", got=name, try_=f"{hint}{_names()}")


def _names() -> str:
    return f"one of {', '.join(known_names())}, or a file from `whet probe --json`"
