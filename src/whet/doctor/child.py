"""The process in which checks run: it says what each found, one JSON line for each, on stdout.

A check that raises is a finding. A check that aborts the process, or hangs, is left to the one who started us.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.doctor.case import Case, Finding, Place, failed, first_line

if TYPE_CHECKING:
    from whet.device.abstract import AbstractDevice

MARK = "whet-doctor "


def main(words: Sequence[str] | None = None) -> None:
    """Says which cases a table has, opens the device, and runs the cases in their order."""
    given = _parser().parse_args(words)
    # Whatever torch or a driver prints goes to stderr: stdout belongs to the answers.
    answers = os.dup(1)
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        os.write(answers, (MARK + json.dumps(answer) + "\n").encode())

    cases = [case for case in read_table(given.table) if case.is_quick or not given.only_quick]
    say(cases=[describe(case) for case in cases])
    try:
        place = _open(given.device, given.virtual_mac)
    except Exception as error:
        say(refused=first_line(error))
        return
    say(ready=True)
    for case in cases[given.first :]:
        start = time.perf_counter()
        found = try_case(case, place)
        seconds = time.perf_counter() - start
        # How far stderr has grown says which case a complaint of the driver belongs to.
        say(end=case.name, seconds=seconds, finding=found.as_json(), stderr_bytes=os.fstat(2).st_size)
    sys.stderr.flush()
    # Without the usual way out: a driver that was upset may hang there.
    os._exit(0)


def read_table(table: str) -> list[Case]:
    """The cases at "module:attribute"."""
    module, _, attribute = table.partition(":")
    return list(getattr(importlib.import_module(module), attribute))


def describe(case: Case) -> dict[str, Any]:
    """What the one who started us needs to know about a case."""
    return {
        "name": case.name,
        "limit_seconds": case.limit_seconds,
        "is_quick": case.is_quick,
        "issue": case.issue,
    }


def try_case(case: Case, place: Place) -> Finding:
    """What a case finds; an exception is a finding too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = case.run(place)
            place.device.sync()
            return found
    except Exception as error:
        with contextlib.suppress(Exception):
            place.device.empty_cache()
        return failed(first_line(error), outcome="raised")


def _open(name: str, virtual_mac: Path | None) -> Place:
    from whet.device.environment import before_first_allocation

    before_first_allocation()
    if virtual_mac is not None:
        from whet.device.virtual_mac.installing import install

        install(str(virtual_mac))
    from whet.device.open import open_device

    device: AbstractDevice = open_device(name).device
    device.use_precision("fp32")
    return Place(device=device, name=name, is_virtual=virtual_mac is not None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="whet.doctor.child")
    parser.add_argument("table")
    parser.add_argument("--first", type=int, default=0, help="which case to begin with, counted from 0")
    parser.add_argument("--only-quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--virtual-mac", type=Path)
    return parser


if __name__ == "__main__":
    main()
