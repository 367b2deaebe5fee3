"""The checks before the first step on every device: they verify the model and do not change the training."""

from pathlib import Path

import pytest
import torch
from torch import nn

import whet
from small_gpt import Gpt, sentences
from whet.device.abstract import AbstractDevice

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))


def train(device: AbstractDevice, model: nn.Module, **options) -> list[str]:
    """Train a few steps and return the messages about the plan."""
    logged: list[str] = []
    whet.train(
        model,
        sentences(64),
        loss=model.loss,
        optimizer=whet.OptimizerChoice(lr=1e-3),
        global_batch_size=8,
        max_steps=3,
        device=device.kind,
        outputs=model.outputs,
        on_event=lambda kind, fields: logged.append(str(fields["message"])) if kind == "plan" else None,
        **{"overrides": {"threads": 1}, **options},
    )
    return [line for line in logged if "verified" in line]


@pytest.mark.parametrize("precision", ["auto", "fp32", "tf32", "bf16", "fp16"])
def test_a_small_gpt_is_verified_in_every_precision(device: AbstractDevice, precision: str) -> None:
    if device.kind == "fake" or (device.kind == "cpu" and precision == "fp16"):
        pytest.skip("not a device to train on, or half precision that no plan chooses there")
    torch.manual_seed(0)
    overrides = {"threads": 1} if precision == "auto" else {"threads": 1, "precision": precision}
    (line,) = train(device, Gpt(), overrides=overrides)
    assert line.startswith("verified: ")
    assert "; causal" in line or "verified: causal" in line
    if device.kind != "cpu":
        assert "loss and 30 gradients agree with the CPU" in line
    print(f"{device.kind} {precision}: {line}")


def test_a_verified_training_has_the_same_bits(device: AbstractDevice) -> None:
    if device.kind == "fake":
        pytest.skip("not a device to train on")
    models = []
    torch.use_deterministic_algorithms(True)
    try:
        for verify in ("always", "off"):
            torch.manual_seed(0)
            models.append(Gpt())
            train(device, models[-1], overrides={"threads": 1, "verify": verify})
    finally:
        torch.use_deterministic_algorithms(False)
    for ours, theirs in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
