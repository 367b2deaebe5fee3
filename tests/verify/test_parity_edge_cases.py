"""`whet compare` with unusual models."""

from pathlib import Path

import pytest
import torch
from torch import nn

import whet
from whet.api.verify import load_spec
from whet.base.errors import UsageError
from whet.verify.parity.compare import compare_devices

pytestmark = pytest.mark.torch


class _Writes(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return super().forward(x)


def test_model_that_writes_to_its_inputs_gets_fresh_ones() -> None:
    x = torch.randn(4, 4)
    before = x.clone()
    result = whet.compare(_Writes(4, 4), (x,), devices=["cpu"], steps=5)
    assert result.agrees
    assert result.determinism.is_same
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_half_precision_model_needs_another_device(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match="on the CPU alone"):
        whet.compare(nn.Linear(4, 4).to(dtype), (torch.randn(4, 4, dtype=dtype),), devices=["cpu"])


def test_module_level_model_is_copied(tmp_path: Path) -> None:
    file = tmp_path / "kept.py"
    file.write_text(
        "import torch\nNET = torch.nn.Linear(4, 4)\nX = torch.randn(4, 4)\ndef model():\n"
        "    assert NET.weight.dtype == torch.float32 and NET.weight.grad is None\n    return NET, (X,)\n"
    )
    assert compare_devices(load_spec(str(file)), devices=["cpu"], steps=3).agrees


def test_folder_is_not_a_reproducer_path(tmp_path: Path) -> None:
    folder = tmp_path / "folder.py"
    folder.mkdir()
    with pytest.raises(UsageError, match="cannot be written there"):
        whet.compare(nn.Linear(2, 2), (torch.ones(2, 2),), devices=["cpu"], out=folder)
