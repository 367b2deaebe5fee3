"""Step benches that misbehave on request, opened in child processes by `test_process_bench.py`."""

import os
import signal
import sys
import time
from typing import Any, ClassVar

from whet.autotune.step_bench import LaunchFacts, ProbeFailedError, SettingsAgreement
from whet.base.errors import UsageError
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.plan.workload import Workload

HANGS_SECONDS = 600
"""Far longer than any timeout here."""


class FaultyStepBench:
    plan = make_plan(load_machine("linux-2core"), Workload(recipe="planted", num_parameters=1000, global_batch_size=32))

    about: ClassVar = {"planted": True}
    ends_at = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def clock(self) -> float:
        return time.perf_counter()

    def predicted_bytes(self, settings) -> int | None:
        return None

    def agreement(self, settings, *, seconds) -> SettingsAgreement:
        return SettingsAgreement(
            loss_error=1e-7, gradient_error=1e-6, bound=1e-3, agrees=settings["precision"] == "tf32"
        )

    def prepare(self, settings, *, seconds):
        match settings.get("misdeed"):
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "aborts":
                os.abort()
            case "hangs":
                time.sleep(HANGS_SECONDS)
            case "takes too much":
                self.taken = bytearray(600 * 1024**2)
                time.sleep(HANGS_SECONDS)
            case "out of memory":
                raise ProbeFailedError("MPS backend out of memory", kind="oom")
            case "raises":
                raise ValueError("nonsense")
            case "prints":
                os.write(1, b"a driver that talks on stdout\n")
            case "reads stdin":
                assert sys.stdin.readline() == "", "a question"
            case "forks":
                if os.fork() == 0:
                    time.sleep(HANGS_SECONDS)
                    os._exit(0)
        return Prepared(settings)


class Prepared:
    preparation_seconds = 0.5
    step_seconds = 0.1
    launches = LaunchFacts(is_captured=False, share=0.34, obstacle="the device is busy")

    def __init__(self, settings) -> None:
        self._settings = settings

    def step(self, index: int) -> float:
        if self._settings.get("misdeed") == "dies later" and index == 3:
            os.abort()
        return 0.1 + index

    def check(self, *, seconds: float) -> None:
        pass

    def peak_bytes(self) -> int | None:
        return 7

    def close(self) -> None:
        pass


def open_bench(arguments: dict[str, Any]) -> FaultyStepBench:
    if arguments.get("refused"):
        raise UsageError("no such data", got="nothing", try_="data=FILE")
    if arguments.get("hangs"):
        time.sleep(HANGS_SECONDS)
    if arguments.get("dies"):
        os.abort()
    return FaultyStepBench()
