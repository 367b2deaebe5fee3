"""`whet compare` on each device that is there: sound models pass, and a wrong kernel is found."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as f

from places import ROOT, Tell
from small_models import TokenModel, ragged_tokens
from whet.data.batch import Micro
from whet.device import virtual_mac
from whet.device.abstract import AbstractDevice
from whet.doctor.cases.models import Task, convnet_task, transformer_task
from whet.recipes.comparing import subject_of
from whet.verify.parity.comparing import compare_subject
from whet.verify.parity.locating import locate
from whet.verify.parity.placing import Bench
from whet.verify.subject import Specimen, Subject

WRONG_KERNELS = ROOT / "tests" / "cpu" / "wrong_kernels.py"


def text_like() -> Subject:
    """Samples of unequal lengths, where tokens count."""

    def make() -> Specimen:
        torch.manual_seed(0)
        model, tokens = TokenModel(), ragged_tokens(16, longest=9, seed=0)

        def micro(size: int) -> Micro:
            return Micro(fields={"tokens": tokens.padded(torch.arange(size), length=9)}, ids=np.arange(size))

        return Specimen(model=model, loss=model.loss, micro=micro, size=16)

    return Subject(name="text-like", make=make)


def of_task(task: Task) -> Subject:
    def loss(model, x, y):
        return f.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return subject_of(task.model, (task.x, task.y), loss)


SUBJECTS = {
    "text-like": text_like,
    "chat-shaped": lambda: of_task(transformer_task()),
    "conv": lambda: of_task(convnet_task()),
}


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_sound_models_pass(device: AbstractDevice, name: str, tell: Tell) -> None:
    found = compare_subject(SUBJECTS[name](), devices=[device.kind], steps=20)
    assert found.agrees, found
    (bf16,) = found.precisions
    assert bf16.agrees, bf16
    errors = ", ".join(f"{row.what} {row.error:.1e} of {row.bound:.1e}" for row in found.rows)
    tell(f"{name} on {device.kind}: {errors}; bf16 {bf16.gradient_error:.1e} of {bf16.bound:.1e}")


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_no_operator_of_a_sound_model_is_blamed(device: AbstractDevice, name: str, tell: Tell) -> None:
    found = locate(Bench(SUBJECTS[name]()), device)
    assert found.culprit is None, found
    assert found.num_judged > 20
    tell(f"{name} on {device.kind}: {found.num_judged} calls judged, not judged: {', '.join(found.unknown) or 'none'}")


@pytest.mark.parametrize(("operator", "phase"), [("tanh", "forward"), ("tanh_backward", "backward")])
def test_an_artificially_wrong_kernel_is_found(
    device: AbstractDevice, operator: str, phase: str, tmp_path: Path
) -> None:
    if device.kind in ("cpu", "fake") or virtual_mac.installed():
        pytest.skip("tests/cpu and tests/virtual_mac do this")
    program = tmp_path / "shown.py"
    command = [sys.executable, str(WRONG_KERNELS), operator, str(program), device.kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["agrees"]
    culprit = found["located"]["culprit"]
    assert (culprit["operator"], culprit["phase"]) == (f"aten::{operator}", phase)
    assert list(found["located"]["wrong"]) == [f"aten::{operator}"]
    assert found["exit_code"] == 1, "the program shows it under the same fault"
    again = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
