"""Pytest plugin: `pytest --virtual-mac m2-air-8gb` runs the tests of any project on a simulated Mac.

Without the option, the plugin loads nothing.
"""

import pytest

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
    from whet.device.virtual_mac.system import answer_as

    try:
        answer_as(install(machine))
    except WhetError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str | None:
    machine = config.getoption(_OPTION)
    return f"virtual Mac: {machine}, simulated on this machine's CPU" if machine else None
