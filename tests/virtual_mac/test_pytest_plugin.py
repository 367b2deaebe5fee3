"""`pytest --virtual-mac`: tests of another project run on it, and it costs nothing when it is not requested."""

import tomllib
from pathlib import Path

import pytest

from paths import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

PLAIN_PROJECT = """
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

DEVICE = torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 16, 2))

    def forward(self, x):
        return self.head(self.features(x))


def make_loader():
    x = torch.randn(128, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (x.mean((1, 2, 3)) > 0).long()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True)


@pytest.mark.parametrize("half", [None, torch.float16])
def test_training_on_mps(half, tmp_path):
    assert DEVICE.type == "mps"
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("mps", enabled=half is not None)
    losses = []
    for epoch in range(12):
        for x, y in make_loader():
            x, y = x.to(DEVICE), y.to(DEVICE)
            with torch.autocast("mps", dtype=half or torch.float16, enabled=half is not None):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    torch.mps.synchronize()
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert torch.mps.current_allocated_memory() > 0
    torch.save(model.state_dict(), tmp_path / "model.pt")
    Net().load_state_dict(torch.load(tmp_path / "model.pt", map_location="cpu"))


def test_float64_is_caught():
    with pytest.raises(TypeError, match="doesn't support float64"):
        torch.zeros(3, dtype=torch.float64).to(DEVICE)


def test_questions_about_the_system():
    assert int(subprocess.check_output(["sysctl", "-n", "hw.memsize"])) == 8 * 2**30
    said = subprocess.check_output(["sysctl", "machdep.cpu.brand_string"], text=True)
    assert said.startswith("machdep.cpu.brand_string: Apple M2")
    assert float(".".join(platform.mac_ver()[0].split(".")[:2])) >= 14
    assert sys.platform == "linux"


def test_too_large_a_batch():
    with pytest.raises(RuntimeError, match="MPS backend out of memory"):
        [torch.empty(2**28, device=DEVICE) for _ in range(20)]
"""


def test_another_projects_training_loop_for_mps_passes(run_pytest, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import torch\nHAS_MPS = torch.backends.mps.is_available()\nassert HAS_MPS\n")
    (tmp_path / "test_project.py").write_text(PLAIN_PROJECT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    done = run_pytest("--virtual-mac", "m2-air-8gb", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
    assert "virtual Mac: m2-air-8gb, simulated on this machine's CPU" in done.stdout


def test_without_the_option_no_torch_and_no_whet_beyond_the_plugin(run_pytest, tmp_path: Path) -> None:
    (tmp_path / "test_quiet.py").write_text(
        "import sys\n\n\ndef test_quiet():\n"
        "    assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "    assert 'whet.device.virtual_mac.plugin' in sys.modules\n"
        "    assert 'whet.device.virtual_mac.installation' not in sys.modules\n"
    )
    done = run_pytest("-q", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_machine_is_a_usage_error(run_pytest, tmp_path: Path) -> None:
    done = run_pytest("--virtual-mac", "m2-air-8bg", cwd=tmp_path)
    assert done.returncode == 4
    assert "did you mean 'm2-air-8gb'?" in done.stderr


def test_the_promises_of_every_device_hold(run_checks) -> None:
    # Set here as whet's device would set them, since no test may change the environment.
    watermarks = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "1.0", "PYTORCH_MPS_LOW_WATERMARK_RATIO": "0.9"}
    # The tests that take a device; others have "mps" in their names and need no device.
    chosen = ("tests/device", "-k", "mps", "-m", "gpu and not slow")
    done = run_checks(*chosen, **watermarks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.rpartition(" passed")[0].rpartition("\n")[2]) >= 25


def test_the_project_declares_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"virtual-mac": "whet.device.virtual_mac.plugin"}
