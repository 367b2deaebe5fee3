"""Write results to docs/bench/, one file per benchmark, machine and day."""

import argparse
import datetime as dt
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from whet.device.open import current_machine

BELOW_TARGET = 3
"""Exit code of a complete result below its target; a crashed benchmark has another."""

DOCS = Path(__file__).parent.parent / "docs" / "bench"


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()  # noqa: TID251 - peers are measured as they are
    machine, _ = current_machine()
    chip = machine.chip or platform.machine()
    return f"{chip}, {torch.get_num_threads()} threads" if device == "cpu" else chip


def machine_word(device: str) -> str:
    """Short name of the machine for file names: h200, linux-2core, m3-max."""
    if device == "cpu":
        return f"{platform.system().lower()}-{os.cpu_count()}core"
    return device_name(device).removeprefix("NVIDIA ").removeprefix("Apple ").lower().replace(" ", "-")


def head(title: str, device: str, command: str) -> list[str]:
    """Return the header of a result: title, machine, date, versions and command."""
    return [
        f"# {title}: {machine_word(device)}, {today()}",
        "",
        f"torch {torch.__version__}, {device_name(device)}, Python {platform.python_version()}. Written by",
        f"`{command}`.",
        "",
    ]


def write(name: str, device: str, text: str) -> Path:
    path = DOCS / f"{name}_{machine_word(device)}_{today()}.md"
    path.write_text(text)
    return path


def today() -> dt.date:
    return dt.datetime.now(tz=dt.UTC).date()


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `least`."""

    def read(word: str) -> int:
        if int(word) < least:
            raise argparse.ArgumentTypeError(f"{word} is less than {least}")
        return int(word)

    read.__name__ = "whole number"
    return read
