"""Faults on request, all simulated: their effects, their effects on a training, and the examples of docs/apple.md."""

import re
import signal

import pytest

from paths import ROOT
from virtual_process import INSTALL

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

EXAMPLE = re.compile(r"^\| [^|]+ \| `(simulate\(.*\))` \|", re.MULTILINE)


def examples() -> list[str]:
    return EXAMPLE.findall((ROOT / "docs" / "apple.md").read_text())


def test_checks_of_simulated_faults(run_checks) -> None:
    checks = "tests/virtual_mac/inside/check_faults.py"
    done = run_checks(checks)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 18


def test_a_process_that_takes_too_much_is_killed_as_macos_does_simulated(python) -> None:
    code = INSTALL + (
        "import torch\n"
        "virtual_mac.simulate(virtual_mac.KilledByPressure(share=0.01))\n"
        "held = [torch.ones(2**18, device='mps') for _ in range(80)]\n"
        "print('alive with 80 MiB of 82', flush=True)\n"
        "held += [torch.ones(2**18, device='mps') for _ in range(3)]\n"
        "print('too far')\n"
    )
    done = python(code)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "alive with 80 MiB of 82\n"


def test_a_simulated_miscompute_is_met_in_the_threads_of_autograd(python) -> None:
    code = INSTALL + (
        "import torch\n"
        "from torch import nn\n"
        "asked = []\n"
        "def when(*inputs):\n"
        "    asked.append([tuple(x.shape) for x in inputs])\n"
        "    return True\n"
        "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to('mps')\n"
        "with virtual_mac.simulate(virtual_mac.Miscompute('threshold_backward', when=when)):\n"
        "    for _ in range(50): model(torch.ones(2, 4, device='mps')).sum().backward()\n"
        "print(len(asked), asked[0])\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "50 [(2, 8), (2, 8)]\n"


def test_the_page_shows_every_simulated_fault() -> None:
    shown = " ".join(examples())
    for name in (
        "HeldMemory",
        "GraphCache",
        "DriverGrowth",
        "GpuFailure",
        "Miscompute",
        "Heat",
        "SystemState",
        "KilledByPressure",
    ):
        assert f"{name}(" in shown


@pytest.mark.parametrize("example", examples())
def test_the_examples_of_the_page_run_simulated(python, example: str) -> None:
    code = INSTALL + (
        "import torch\n"
        "from whet.machine.facts import SystemState\n"
        "globals().update({name: getattr(virtual_mac, name) for name in dir(virtual_mac)})\n"
        f"with {example}:\n"
        "    x = torch.ones(4, 4, device='mps')\n"
        "    for _ in range(3): x = x @ x\n"
        "    torch.mps.synchronize()\n"
        "print('done')\n"
    )
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
