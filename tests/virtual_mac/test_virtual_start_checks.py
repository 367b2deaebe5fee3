"""The checks before the first step on a virtual Mac, with and without simulated faults."""

import re

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]


def test_checks_before_the_first_step_simulated(run_checks) -> None:
    done = run_checks("tests/virtual_mac/inside/check_start.py")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 14
