"""`whet compare` on each available device: correct models pass, and a wrong kernel is detected."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as f

from paths import SUPPORT, ReportCount
from small_models import TokenModel, ragged_tokens
from whet.api.verify import model_spec
from whet.data.batch import MicroBatch
from whet.device import virtual_mac
from whet.device.abstract import AbstractDevice
from whet.doctor.checks.models import ModelTask, convnet_task, transformer_task
from whet.verify.parity import compare
from whet.verify.parity.locate import locate
from whet.verify.parity.training import ReplicaFactory
from whet.verify.trainable import Trainable, TrainableSpec

pytestmark = pytest.mark.torch

WRONG_KERNELS = SUPPORT / "wrong_kernels.py"


def text_like() -> TrainableSpec:
    """Samples of unequal lengths, where tokens count."""

    def make() -> Trainable:
        torch.manual_seed(0)
        model, tokens = TokenModel(), ragged_tokens(16, longest=9, seed=0)

        def micro(size: int) -> MicroBatch:
            return MicroBatch(fields={"tokens": tokens.padded(torch.arange(size), length=9)}, ids=np.arange(size))

        return Trainable(model=model, loss=model.loss, make_batch=micro, batch_size=16)

    return TrainableSpec(name="text-like", make=make)


def of_task(task: ModelTask) -> TrainableSpec:
    def loss(model, x, y):
        return f.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return model_spec(task.model, (task.x, task.y), loss)


SUBJECTS = {
    "text-like": text_like,
    "chat-shaped": lambda: of_task(transformer_task()),
    "conv": lambda: of_task(convnet_task()),
}


@pytest.mark.parametrize("name", ["text-like", "conv", pytest.param("chat-shaped", marks=pytest.mark.slow)])
def test_correct_models_pass(
    device: AbstractDevice, name: str, report_count: ReportCount, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fake device has no name that could be asked for.
    monkeypatch.setattr(compare, "choose_device", lambda _: device)
    result = compare.compare_devices(SUBJECTS[name](), devices=[device.kind], steps=20)
    assert result.agrees, result
    (bf16,) = result.precisions
    assert bf16.agrees, bf16
    errors = ", ".join(f"{row.what} {row.error:.1e} of {row.bound:.1e}" for row in result.rows)
    report_count(f"{name} on {device.kind}: {errors}; bf16 {bf16.gradient_error:.1e} of {bf16.bound:.1e}")


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_no_operator_of_a_correct_model_is_reported(
    device: AbstractDevice, name: str, report_count: ReportCount
) -> None:
    result = locate(ReplicaFactory(SUBJECTS[name]()), device)
    assert result.culprit is None, result
    assert result.num_checked > 20
    report_count(
        f"{name} on {device.kind}: {result.num_checked} calls judged, not judged: {', '.join(result.unknown) or 'none'}"
    )


@pytest.mark.parametrize(("operator", "phase"), [("tanh", "forward"), ("tanh_backward", "backward")])
def test_an_artificially_wrong_kernel_is_found(
    device: AbstractDevice, operator: str, phase: str, tmp_path: Path
) -> None:
    if device.kind in ("cpu", "fake") or virtual_mac.installed():
        pytest.skip("covered by tests/verify and tests/virtual_mac")
    program = tmp_path / "shown.py"
    command = [sys.executable, str(WRONG_KERNELS), operator, str(program), device.kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["agrees"]
    culprit = result["located"]["culprit"]
    assert (culprit["operator"], culprit["phase"]) == (f"aten::{operator}", phase)
    assert list(result["located"]["wrong"]) == [f"aten::{operator}"]
    assert result["exit_code"] == 1, "the reproducer fails with the same fault"
    again = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
