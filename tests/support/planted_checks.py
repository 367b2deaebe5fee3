"""Checks that misbehave on purpose, for the tests of the doctor."""

import getpass
import os
import platform
import sys
import time
from pathlib import Path

from whet.doctor.check import Check, CheckFinding, DeviceUnderTest, good

SECRET = (
    f"{getpass.getuser()} on {platform.node()} reads {Path.home()}/venv/lib/secret.so and /Users/anna/thesis/data.csv, "
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, C02XL0GYJGH5, anna@home.example, /Volumes/My disk/thesis/x.pt"
)


def fine(_: DeviceUnderTest) -> CheckFinding:
    return good("fine", error=float("nan"), speed=1 / 3)


def raises(_: DeviceUnderTest) -> CheckFinding:
    raise RuntimeError(f"{SECRET}\nand a second line")


def aborts(_: DeviceUnderTest) -> CheckFinding:
    print(f"failed assertion `commandBuffer != nil' at {Path.home()}/x/y.mm", file=sys.stderr, flush=True)
    os.abort()


def hangs(_: DeviceUnderTest) -> CheckFinding:
    time.sleep(600)
    return good("never")


def complains(_: DeviceUnderTest) -> CheckFinding:
    """As Metal does when the GPU runs out of memory: a line on stderr, and the program goes on."""
    print("Error: command buffer exited with error status.", file=sys.stderr, flush=True)
    return good("all is well, it thinks")


def is_stopped(_: DeviceUnderTest) -> CheckFinding:
    """As macOS does with work that the display waits for."""
    complains(_)
    print(
        "\tImpacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)", file=sys.stderr
    )
    return good("all is well, it thinks")


CASES = [
    Check(name="fine", run=fine, is_quick=True, issue=1),
    Check(name="raises", run=raises, is_quick=True),
    Check(name="complains", run=complains),
    Check(name="is stopped", run=is_stopped),
    Check(name="aborts", run=aborts),
    Check(name="hangs", run=hangs, limit_seconds=1.0),
    Check(name="fine again", run=fine),
]
SLOW = [
    Check(name="fine", run=fine),
    Check(name="hangs", run=hangs, limit_seconds=600),
    Check(name="behind", run=fine),
]
