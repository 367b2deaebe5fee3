"""Sample outputs of programs, and programs that answer with them."""

from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent

FILES = {
    ("sysctl",): "sysctl.txt",
    ("ioreg",): "ioreg.plist",
    ("system_profiler",): "system_profiler.json",
    ("pmset", "-g", "batt"): "pmset-batt.txt",
    ("pmset", "-g"): "pmset.txt",
    ("sw_vers",): "sw_vers.txt",
}


def sample(machine: str, file: str) -> str:
    return (HERE / machine / file).read_text(encoding="utf-8")


def file_of(command: Sequence[str]) -> str | None:
    program = Path(command[0]).name
    return FILES.get((program, *command[1:])) or FILES.get((program,))


def answering(machine: str, *, change: Callable[[str], str | None] = lambda text: text):
    """A `run` that answers like `machine`, with every answer passed through `change`."""

    def run(command: Sequence[str], *, any_exit: bool = False) -> str | None:
        file = file_of(command)
        return change(sample(machine, file)) if file else None

    return run


def silent(command: Sequence[str], *, any_exit: bool = False) -> None:
    """A machine on which no program exists."""
