"""Answer as a Mac what test suites ask of the system: `platform.mac_ver()` and the program `sysctl`.

Only the pytest plugin uses this. `sys.platform` stays "linux", because Python and torch really run there.
"""

import atexit
import platform
import shlex
import shutil
import tempfile
from pathlib import Path

from whet.base import env
from whet.machine.facts import Machine


def answer_as(machine: Machine) -> None:
    """Answer as `machine` in this process and its children, until the process ends."""
    version = machine.os.version or "15.0"
    platform.mac_ver = lambda *_args, **_kwargs: (version, ("", "", ""), "arm64")
    folder = Path(tempfile.mkdtemp(prefix="whet-virtual-mac-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = folder / "sysctl"
    program.write_text(_sysctl(machine, shutil.which("sysctl")))
    program.chmod(0o755)
    env.prepend_to_path(folder)


def _sysctl(machine: Machine, real: str | None) -> str:
    """A shell program that answers what whet knows of this Mac, and asks the system's own sysctl otherwise."""
    facts = {
        "hw.memsize": machine.memory_bytes,
        "hw.model": machine.model,
        "machdep.cpu.brand_string": machine.chip,
        "hw.physicalcpu": machine.cpu.physical_cores,
        "hw.perflevel0.physicalcpu": machine.cpu.fast_cores,
        "hw.perflevel1.physicalcpu": machine.cpu.slow_cores,
        "hw.optional.arm64": 1,
    }
    cases = "".join(
        f'  "-n {name}") echo {shlex.quote(str(value))}; exit;;\n'
        f'  "{name}") echo {shlex.quote(f"{name}: {value}")}; exit;;\n'
        for name, value in facts.items()
        if value is not None
    )
    otherwise = f'exec {shlex.quote(real)} "$@"' if real else "exit 1"
    return f'#!/bin/sh\ncase "$*" in\n{cases}esac\n{otherwise}\n'
