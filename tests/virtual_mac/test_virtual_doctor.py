"""The doctor on the virtual Mac (simulated): no findings without faults, and planted bugs are detected."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from virtual_process import INSTALL

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

Start = Callable[..., subprocess.CompletedProcess[str]]
WRONG = Path(__file__).parent / "inside" / "wrong_operators.py"


@pytest.fixture
def verdicts(python: Start) -> dict[str, dict[str, str]]:
    done = python(f"import runpy; runpy.run_path({str(WRONG)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_simulated_bugs_are_found_by_the_checks_that_are_about_them(verdicts: dict[str, dict[str, str]]) -> None:
    assert len(verdicts) >= 14
    for fault, verdict in verdicts.items():
        assert verdict == {"without": "good", "with": "differs"}, fault


@pytest.mark.slow
def test_a_simulated_mac_passes_every_check(python: Start, tmp_path: Path) -> None:
    code = INSTALL + "from whet.cli.main import main; main()"
    done = python(code, "doctor", "--budget", "100", "--json", "doctor.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIMULATED" in done.stdout
    result = json.loads((tmp_path / "doctor.json").read_text())
    assert result["is_virtual"] is True
    assert result["machine"]["name"] == "m2-air-8gb (virtual)"
    verdicts = {(check["group"], check["name"]): check["verdict"] for check in result["checks"]}
    assert verdicts["operators", "ctc_loss"] == "not applicable", "MPS lacks it in torch's own list"
    assert verdicts["resume", "interrupted and resumed"] == "good"
    assert sys.executable not in done.stdout
