"""Load known machines and machine files."""

import json
from importlib import resources
from pathlib import Path

from whet.base.errors import UsageError, closest_match
from whet.machine.composed import change_machine, is_chip_name, mac_names, named_mac, nearest_machine
from whet.machine.facts import Machine, ProbeResult

# A machine file is a few kilobytes long. The limit rejects a wrong file before it is read into memory.
_MAX_FILE_BYTES = 1_000_000


def example_machine_names() -> tuple[str, ...]:
    """Return the sorted names of the machines with a file. Each kind of machine has one or two."""
    files = resources.files("whet.machine").joinpath("known").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def known_machine_names() -> tuple[str, ...]:
    """Return the sorted names of all machines that come with whet."""
    return tuple(sorted({*example_machine_names(), *mac_names()}))


def load_machine(name_or_file: str | Path) -> Machine:
    """Load a known machine by name, compose one from a chip and its memory, or read a file of `whet probe --json`.

    >>> load_machine("m1-pro,memory=16").accelerator("mps").num_cores
    16
    >>> load_machine("m4-max-36gb,torch=2.14").torch.version
    '2.14'
    """
    # Names take precedence: a file in the working folder must not hide a known machine.
    name, *options = str(name_or_file).split(",")
    if name in example_machine_names():
        file = resources.files("whet.machine").joinpath("known", f"{name}.json")
        machine = parse_machine(file.read_text(encoding="utf-8"), where=name)
        return change_machine(machine, options)
    if name in mac_names() or is_chip_name(name):
        return named_mac(name, options)
    path = Path(name_or_file)
    return parse_machine(_read_machine_file(path), where=str(path))


def nearest_line(machine: Machine) -> list[str]:
    """Return a line that names the known machine nearest to this Mac, or no lines for other machines."""
    nearest = nearest_machine(machine, [load_machine(name) for name in known_machine_names()])
    return [] if nearest is None else [f"nearest   --machine {nearest[0].name}: {nearest[1]}"]


def parse_machine(text: str, *, where: str) -> Machine:
    """Parse a machine from the JSON of a machine or of a whole probe."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where} is not JSON", got=str(error)[:200], try_="whet probe --json > machine.json"
        ) from None
    # `whet probe --json` also prints the current system state. A plan for another machine ignores it.
    if isinstance(data, dict) and "machine" in data:
        return ProbeResult.from_json(data, where=where).machine
    return Machine.from_json(data, where=where)


def _read_machine_file(path: Path) -> str:
    """Read a machine file. Raise UsageError if it cannot be read."""
    try:
        if not path.exists():
            raise _unknown_machine(str(path))
        if not path.is_file():
            raise UsageError("a machine file must be a plain file", got=str(path), try_=_name_hint())
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UsageError(
                f"{path} is too large to be a machine file",
                got=f"{path.stat().st_size:,} bytes",
                try_="the output of `whet probe --json`, a few kB",
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text", got="bytes that are not UTF-8", try_="a JSON file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read", got=error.strerror or error, try_=_name_hint()) from None


def _unknown_machine(name: str) -> UsageError:
    meant = closest_match(name.partition(",")[0], known_machine_names())
    hint = f"did you mean {meant!r}? " if meant else ""
    return UsageError("no machine of that name, and no such file", got=name, try_=f"{hint}{_name_hint()}")


def _name_hint() -> str:
    names = ", ".join(known_machine_names())
    return f"one of {names}; a chip with its memory, m4-pro,memory=24; or a file from `whet probe --json`"
