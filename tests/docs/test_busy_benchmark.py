"""benchmarks/busy.py: a slow round is reported, and busy loops end with the measurement."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import busy  # noqa: E402


def verdict(blocks: dict[int, list[float]]) -> str:
    best = busy.Way(name="best", variables={}, blocks={0: [1.0, 1.0, 3.0], 2: [2.0, 2.0, 9.0]})
    tried = busy.Way(name="tried", variables={}, blocks=blocks)
    (line,) = busy._verdicts(tried, [best, tried], [0, 2])
    return line


def test_the_worst_round_counts_beside_busy_loops_and_the_median_without() -> None:
    assert verdict({0: [1.1, 1.1, 9.0], 2: [2.0, 2.2, 2.7]}).endswith("1.10 (0), 1.35 (2)")
    assert verdict({0: [1.1, 1.1, 9.0], 2: [2.0, 2.2, 2.9]}).endswith("1.45 **ABOVE TARGET** (2)")


def test_busy_loops_end() -> None:
    def children() -> set[int]:
        return {process.pid for process in psutil.Process().children()}

    before = children()
    with busy.busy_loops(2):
        assert len(children() - before) == 2
    assert children() <= before


@pytest.mark.slow
def test_smoke_run_of_the_command() -> None:
    options = ["--small", "--workloads", "hex", "--rounds", "1", "--loops", "0", "1", "--seconds", "0.01"]
    done = subprocess.run([sys.executable, BENCHMARKS / "busy.py", *options], capture_output=True, text=True)
    assert "### hex: 1 rounds" in done.stdout, done.stderr
    assert "- whet (follows contention), Python, worst round" in done.stdout
