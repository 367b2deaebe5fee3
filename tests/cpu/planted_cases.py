"""Checks that misbehave on purpose, for the tests of the doctor."""

import getpass
import os
import platform
import sys
import time
from pathlib import Path

from whet.doctor.case import Case, Finding, Place, good

SECRET = (
    f"{getpass.getuser()} on {platform.node()} reads {Path.home()}/venv/lib/secret.so and /Users/anna/thesis/data.csv"
)


def fine(_: Place) -> Finding:
    return good("fine", error=float("nan"), speed=1 / 3)


def raises(_: Place) -> Finding:
    raise RuntimeError(f"{SECRET}\nand a second line")


def aborts(_: Place) -> Finding:
    print(f"failed assertion `commandBuffer != nil' at {Path.home()}/x/y.mm", file=sys.stderr, flush=True)
    os.abort()


def hangs(_: Place) -> Finding:
    time.sleep(600)
    return good("never")


def complains(_: Place) -> Finding:
    """As Metal does when the GPU runs out of memory: a line on stderr, and the program goes on."""
    print("Error: command buffer exited with error status.", file=sys.stderr, flush=True)
    return good("all is well, it thinks")


CASES = [
    Case(name="fine", run=fine, is_quick=True, issue=1),
    Case(name="raises", run=raises, is_quick=True),
    Case(name="complains", run=complains),
    Case(name="aborts", run=aborts),
    Case(name="hangs", run=hangs, limit_seconds=1.0),
    Case(name="fine again", run=fine),
]
SLOW = [
    Case(name="fine", run=fine),
    Case(name="hangs", run=hangs, limit_seconds=600),
    Case(name="behind", run=fine),
]
