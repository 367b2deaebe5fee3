"""Tests without the marker `torch` can be collected where torch cannot be imported."""

import os
import subprocess
import sys

from paths import ROOT, SUPPORT


def test_unmarked_tests_need_no_torch() -> None:
    path = os.pathsep.join(map(str, (SUPPORT / "broken_torch", ROOT / "src")))
    environment = {**os.environ, "PYTHONPATH": path, "WHET_TEST_WITHOUT_TORCH": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "tests/plan/test_plan.py" in done.stdout
    assert "tests/training/test_session.py" not in done.stdout
