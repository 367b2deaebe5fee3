"""`whet compare` on the virtual Mac (simulated): a wrong operator is named and reproduced by a program."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from amounts import IS_GATE, amount
from paths import SUPPORT, ReportCount

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

Start = Callable[..., subprocess.CompletedProcess[str]]
WRONG = Path(__file__).parent / "inside" / "wrong_in_training.py"
SEEN_AS = {"index_select": "embedding"}
"""The kernel, and the operator that a model asks for when it runs."""
BACKWARD = ("_backward", "_backward_data", "sum")


@pytest.fixture
def run_faults(python: Start, tmp_path: Path) -> Callable[..., dict[str, dict]]:
    def run(*words: str) -> dict[str, dict]:
        code = f"import sys, runpy; sys.argv[0] = {str(WRONG)!r}; runpy.run_path({str(WRONG)!r}, run_name='__main__')"
        done = python(code, tmp_path, *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_every_simulated_wrong_operator_is_named_and_reproduced(run_faults, report_count: ReportCount) -> None:
    """A part of the operators in the gate, and all in `make test-all`."""
    actual = run_faults("some factors" if IS_GATE else "factor")
    faults = {name: actual[name] for name in actual if " " in name}
    for name in ("reader", "seer"):
        assert actual[name]["agrees"], f"{name} is sound: {actual[name]}"
    for fault, result in faults.items():
        operator = fault.split()[1]
        assert not result["agrees"], fault
        assert result["named"] == f"aten::{SEEN_AS.get(operator, operator)}", (fault, result)
        assert result["all"] == [result["named"]], f"{fault}: nothing else is blamed"
        assert (result["with_fault"], result["without_fault"]) == (1, 0), (fault, result)
        phase = "update" if operator == "_fused_adamw_" else "backward" if operator.endswith(BACKWARD) else "forward"
        assert result["phase"] == phase, fault
    assert len(faults) >= amount(13, 40)
    assert faults["reader tanh_backward"]["module"] == "head.1"
    assert faults["reader native_layer_norm_backward"]["module"] == "norm"
    assert faults["reader gelu_backward"]["line"].startswith("wrong_in_training.py:")
    assert faults["seer convolution_backward"]["module"] == "4", "the last convolution comes first backwards"
    num_backward = sum(result["phase"] == "backward" for result in faults.values())
    report_count(
        f"{len(faults)} simulated wrong operators named and reproduced, {num_backward} of them in the backward pass"
    )


def test_simulated_faults_that_depend_on_layout_size_or_place_are_reproduced(
    run_faults, report_count: ReportCount
) -> None:
    """What makes the kernel wrong must be in the program: strides, many terms, a small error, one call of several."""
    actual = run_faults("condition")
    faults = {name: actual[name] for name in actual if " " in name}
    assert len(faults) == 6
    for fault, result in faults.items():
        assert result["named"] == result["expected"], (fault, result)
        assert (result["with_fault"], result["without_fault"]) == (1, 0), (fault, result)
    assert faults["reader later step"]["step"] > 1
    report_count(f"{len(faults)} conditional simulated faults named and reproduced")


@pytest.mark.parametrize(
    ("models", "clean", "wrong"), [(4, 1, 1), pytest.param(10, 5, 10, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_errors_of_one_percent_are_found_in_models_that_draw_simulated(
    python: Start, tmp_path: Path, report_count: ReportCount, models: int, clean: int, wrong: int
) -> None:
    program = WRONG.with_name("wrong_with_draws.py")
    code = f"import sys, runpy; sys.path.append({str(SUPPORT)!r}); sys.argv[0] = {str(program)!r}; "
    done = python(code + f"runpy.run_path({str(program)!r}, run_name='__main__')", str(models), str(clean), str(wrong))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results["clean"]) == models * clean
    assert [name for name, result in results["clean"].items() if result["verdict"] != "agrees"] == []
    # Some model has fewer operators.
    assert 0.9 * models * wrong <= len(results["wrong"]) <= models * wrong
    for name, result in results["wrong"].items():
        kernel = name.partition(": ")[2]
        assert (result["verdict"], result["named"]) == ("differs", f"aten::{SEEN_AS.get(kernel, kernel)}"), name
    report_count(
        f"{len(results['wrong'])} simulated errors of 1 % found in {models} models that draw, "
        f"no false alarm in {len(results['clean'])} runs"
    )


def test_the_command_reports_a_simulated_fault_in_lines(python: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n"
        "            x = torch.tanh(layer(x))\n"
        "        return x\n"
        "def model():\n"
        "    torch.manual_seed(0)\n"
        "    return Net(), (torch.randn(8, 6),)\n"
    )
    install = "from whet.device import virtual_mac; virtual_mac.install('m2-air-8gb')\n"
    fault = "virtual_mac.simulate(virtual_mac.Miscompute('tanh_backward'))\n"
    run = "from whet.cli.main import main; main()"
    words = ("compare", "mine.py", "--devices", "cpu,mps", "--steps", "3")
    sound = python(install + run, *words)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "SIMULATED" in sound.stdout
    assert sound.stdout.endswith("everything agrees\n")
    wrong = python(install + fault + run, *words)
    assert wrong.returncode == 1
    assert "first wrong operator: aten::tanh_backward in the model itself (mine.py:9), backward" in wrong.stdout
    assert "reproduce: python whet_compare_repro.py" in wrong.stdout
    as_json = python(install + fault + run, *words, "--json")
    assert as_json.returncode == 1
    logged = json.loads(as_json.stdout)
    assert (logged["agrees"], logged["is_virtual"]) == (False, True)
    assert logged["located"]["culprit"]["operator"] == "aten::tanh_backward"
