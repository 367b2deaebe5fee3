"""A pytest plugin that runs the tests of any project on a simulated Mac: `pytest --virtual-mac m2-air-8gb`.

Without the option, the plugin does nothing.
"""

import atexit
import platform
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from whet.machine.facts import Machine

_OPTION = "virtual_mac"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("virtual Mac").addoption(
        "--virtual-mac",
        dest=_OPTION,
        metavar="MACHINE",
        default=None,
        help="simulate an Apple GPU (torch's mps device) on this machine's CPU, with the limits of MACHINE, e.g. "
        "m2-air-8gb",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # Install before any conftest.py runs, because torch caches whether MPS is available.
    machine = getattr(early_config.known_args_namespace, _OPTION, None)
    if machine is None:
        return
    from whet.base.errors import WhetError
    from whet.device.virtual_mac import install

    try:
        _mock_platform(install(machine))
    except WhetError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str | None:
    machine = config.getoption(_OPTION)
    return f"virtual Mac: {machine}, simulated on this machine's CPU" if machine else None


def _mock_platform(machine: "Machine") -> None:
    """Make `platform.mac_ver()` and the `sysctl` program report the facts of `machine`.

    Child processes find this `sysctl` too. `sys.platform` stays "linux", because Python and torch really run on Linux.
    """
    from whet.base import env

    version = machine.os.version or "15.0"
    platform.mac_ver = lambda *_args, **_kwargs: (version, ("", "", ""), "arm64")
    folder = Path(tempfile.mkdtemp(prefix="whet-virtual-mac-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = folder / "sysctl"
    program.write_text(_sysctl(machine, shutil.which("sysctl")))
    program.chmod(0o755)
    env.prepend_to_path(folder)


def _sysctl(machine: "Machine", real: str | None) -> str:
    """Return a shell script that prints the known facts of this Mac, and runs the real sysctl for all other names."""
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
