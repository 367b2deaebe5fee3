"""Every operator in PyTorch's own database: the virtual Mac computes what the CPU computes, or refuses as MPS does."""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from amounts import IS_GATE, amount
from paths import ReportCount
from virtual_process import environment
from warm_python import WarmPython

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

DATABASE = Path(__file__).parent / "inside" / "operator_database.py"
KNOWN = {
    "bincount": "MPS adds weights in float32 where the CPU takes float64; torch's own tests on Macs expect the same",
    "tensor_split": "torch asks for the indices on the CPU, whatever the device: a Mac refuses this too",
    "sparse.mm.reduce": "a CSR tensor, which the virtual Mac has not; MPS has no kernel for this either",
}
"""Operators that are neither equal nor refused with a text of MPS, and why."""
if Version(version("torch")) >= Version("2.15"):
    KNOWN["ldexp"] = "for integer exponents torch looks for a kernel of MPS, which the macOS wheel of 2.15 has not"

Judge = Callable[..., dict[str, str]]


@pytest.fixture
def judge(home: Path, _built: None, tmp_path: Path, warm_python: WarmPython) -> Judge:
    def run(names: str, *wrong: str) -> dict[str, str]:
        done = warm_python.run(DATABASE, names, *wrong, cwd=tmp_path, env=environment(home), timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_each_operator_is_equal_to_the_cpu_or_refused_as_mps_does(judge: Judge, report_count: ReportCount) -> None:
    """A fifth of each kind in the gate, and all in `make test-all`."""
    verdicts = judge(",".join(["fifth", *KNOWN]) if IS_GATE else "all")
    equal = [name for name, verdict in verdicts.items() if verdict == "equal"]
    refused = [name for name, verdict in verdicts.items() if verdict.startswith("refused: ")]
    others = {name: verdict for name, verdict in verdicts.items() if name not in {*equal, *refused}}
    unexplained = {name: verdict for name, verdict in others.items() if name not in KNOWN}
    assert not unexplained
    assert set(others) == set(KNOWN), "an operator that works now needs no excuse"
    # A device that refuses everything would pass the other checks.
    assert len(equal) >= amount(120, 600)
    assert len(verdicts) >= amount(130, 640)
    report_count(
        f"operators: {len(verdicts)} checked, {len(equal)} equal, {len(refused)} refused as MPS does, "
        f"{len(others)} other ({', '.join(sorted(others))})",
    )


def test_a_planted_miscompute_is_found_in_values_and_in_gradients(judge: Judge) -> None:
    result = judge("mm,einsum,add,tanh,sigmoid,nn.functional.conv2d", "mm", "tanh_backward", "convolution")
    assert {name: verdict.partition(":")[0] for name, verdict in result.items()} == {
        "mm": "wrong",
        "einsum": "equal",  # through bmm
        "add": "equal",
        "tanh": "wrong",  # its gradient only
        "sigmoid": "equal",
        "nn.functional.conv2d": "wrong",
    }
