"""Checks of environment variables, sensors, sleep prevention and disk sync."""

import fcntl
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from whet.base import env
from whet.device.environment import FALLBACK, has_fallback
from whet.doctor.check import Check, CheckFinding, DeviceUnderTest, Figure, differs, failed, good, not_applicable
from whet.machine.pressure import read_system_state
from whet.run import durable

_VARIABLES = (
    FALLBACK,
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "PYTORCH_MPS_LOW_WATERMARK_RATIO",
    "PYTORCH_MPS_FAST_MATH",
    "PYTORCH_MPS_PREFER_METAL",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)
# Read the variables at import, because opening the device sets the watermarks.
_AS_STARTED = {name: env.read(name) for name in _VARIABLES}
# Report only numbers and switches. Other values, such as the identifier of a GPU, may be private.
_PLAIN = re.compile(r"[0-9.,]{1,8}")
_SENSORS = ("thermal", "memory_pressure", "swap_used_bytes", "power_source", "low_power_mode", "gpu_busy_percent")


def _is_mac(target: DeviceUnderTest) -> bool:
    return sys.platform == "darwin" and not target.is_virtual


def _variables(target: DeviceUnderTest) -> CheckFinding:
    """Report the environment variables that the user has set, and the effective watermarks."""
    values: dict[str, Figure] = {
        name: value if _PLAIN.fullmatch(value) else "set" for name, value in _AS_STARTED.items() if value is not None
    }
    what = f"you have set {len(values)} of {len(_VARIABLES)}" if values else "you have set none"
    if target.device.kind == "mps":
        values |= {"high_watermark": env.read(_VARIABLES[1]), "low_watermark": env.read(_VARIABLES[2])}
    if target.device.kind == "mps" and has_fallback():
        return differs(f"{FALLBACK} is on: operators may run on the CPU silently", **values)
    return good(what, **values)


def _memory_limit(target: DeviceUnderTest) -> CheckFinding:
    memory = target.device.memory.usage()
    figures: dict[str, Figure] = {"limit_bytes": memory.limit, "allocated_bytes": memory.allocated}
    return failed("the device does not report its memory") if memory.limit is None else good("known", **figures)


def _sensors(target: DeviceUnderTest) -> CheckFinding:
    """Report which sensors of a Mac can be read."""
    system_state = read_system_state()
    values: dict[str, Figure] = {name: getattr(system_state, name) for name in _SENSORS}
    unread = [name.replace("_", " ") for name, value in values.items() if value is None]
    if not _is_mac(target):
        return not_applicable("these are a Mac's sensors", **values)
    if unread:
        return differs(f"could not be read: {', '.join(unread)}", **values)
    return good("all can be read", **values)


def _caffeinate(target: DeviceUnderTest) -> CheckFinding:
    if not _is_mac(target):
        return not_applicable("only a Mac has it")
    return (
        good("there") if shutil.which("caffeinate") else failed("caffeinate is not on the path: a run may fall asleep")
    )


def _disk(_: DeviceUnderTest) -> CheckFinding:
    """Write, sync and read back a file, and report the time."""
    with tempfile.TemporaryDirectory(prefix="whet-doctor-") as folder:
        path = Path(folder, "trial")
        start = time.perf_counter()
        durable.write_file(path, data=bytes(2**20))
        seconds = time.perf_counter() - start
        is_whole = path.read_bytes() == bytes(2**20)
        if sys.platform == "darwin":
            with path.open("r+b") as file:
                try:
                    fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
                except OSError as error:
                    return differs(f"F_FULLFSYNC fails here: {error.strerror}", seconds=seconds)
    if not is_whole:
        return differs("the file that was read back differs from what was written", seconds=seconds)
    return good("a megabyte was written, synced and read back", seconds=seconds)


CHECKS: list[Check] = [
    Check(name="variables", run=_variables, is_quick=True),
    Check(name="memory limit", run=_memory_limit, is_quick=True),
    Check(name="sensors", run=_sensors, is_quick=True),
    Check(name="caffeinate", run=_caffeinate, is_quick=True),
    Check(name="disk sync", run=_disk, is_quick=True),
]
