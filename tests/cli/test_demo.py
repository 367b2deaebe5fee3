"""The demo of `make demo`: a plan, a kill and a resume, the result, and what to do next."""

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "tools" / "demo.py"

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_the_demo_fits_on_a_screen_and_survives_a_kill(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--device", "cpu"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    # Without a terminal, evaluations and the progress line are lines of their own.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("text  ")]
    assert len(lines) < 40
    shown = [line.split("  ")[0] for line in lines]
    for part in ("machine", "workload", "plan", "time", "ended", "loss", "goal", "test", "exact", "saved", "next"):
        assert shown.count(part) == 1, part
    assert any(line.startswith("$ kill -9 ") for line in lines)
    assert "text: resumes from step 600, bit-exact" in lines
    assert "eigenvalues" in lines[-2]
