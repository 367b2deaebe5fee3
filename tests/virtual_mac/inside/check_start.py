"""The checks before the first step on a virtual m2-air-8gb; see test_virtual_start_checks.py: `--virtual-mac`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import whet
from small_gpt import Gpt, leaking_attention, sentences
from small_models import convnet, images
from whet.base.errors import WhetError
from whet.device.open import open_device
from whet.device.virtual_mac import Miscompute, has_strided_weight, simulate
from whet.plan.plan import with_runtime_changes
from whet.plan.setting import MeasuredSetting
from whet.run.events import read_events
from whet.run.folder import open_run


@pytest.fixture(autouse=True, scope="module")
def _opened() -> None:
    """The first one sets what torch's allocator reads in the environment."""
    open_device("mps")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))


def session_of(model: nn.Module, data: Any, run: Path | None, **options: Any) -> whet.Session:
    overrides = {"threads": 1, "micro_batch": 8, **options.pop("overrides", {})}
    return whet.Session(
        model,
        whet.OptimizerChoice(lr=1e-3),
        data,
        global_batch_size=8,
        epochs=9,
        **{"max_steps": 3, "device": "mps", "run": run, "overrides": overrides, **options},
    )


def train_gpt(run: Path | None, *, precision: str | None = None, **options: Any) -> Gpt:
    """Precision as if it had been measured, not requested."""
    torch.manual_seed(0)
    model = Gpt()
    with session_of(model, sentences(64), run, outputs=model.outputs, **options) as session:
        if precision is not None:
            faster = {"precision": MeasuredSetting(value=precision, reason="faster in a trial", evidence={})}
            session.run.use_plan(with_runtime_changes(session.plan, faster))
            session.run.stepper.use_precision(precision, loss_scaling="off")
        for batch in session:
            session.step(model.loss, batch)
    return model


def reported(run: Path) -> str:
    lines = [str(event.get("message")) for event in read_events(open_run(run), kinds=("plan",))]
    (line,) = [line for line in lines if "caffeinate" not in line]
    return line


def setting(run: Path, name: str) -> dict[str, Any]:
    return open_run(run).plan["settings"][name]


def num_steps(run: Path) -> int:
    return len(list(read_events(open_run(run), kinds=("step",))))


def is_half(*inputs: torch.Tensor) -> bool:
    return any(tensor.dtype == torch.bfloat16 for tensor in inputs)


# --- all is well -----------------------------------------------------------------------------------------------------


def test_the_report_and_that_the_training_has_the_same_bits(tmp_path: Path) -> None:
    checked, unchecked = train_gpt(tmp_path / "on"), train_gpt(tmp_path / "off", overrides={"verify": "off"})
    assert reported(tmp_path / "on").startswith("verified: loss and 30 gradients agree with the CPU (")
    assert "); causal; the same bits twice  (" in reported(tmp_path / "on")
    assert reported(tmp_path / "off") == "not verified: verify=off"
    for ours, theirs in zip(checked.state_dict().values(), unchecked.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    train_gpt(tmp_path / "again")
    assert reported(tmp_path / "again").startswith("verified before: loss and 30 gradients agree with the CPU")


def test_after_a_move_it_is_always_verified(tmp_path: Path) -> None:
    train_gpt(None)
    train_gpt(tmp_path / "moved", device="cpu", max_steps=2)
    train_gpt(tmp_path / "moved", max_steps=4)
    lines = [str(event.get("message")) for event in read_events(open_run(tmp_path / "moved"), kinds=("plan",))]
    assert any(line.startswith("moved from cpu to mps; verified: loss and 30 gradients") for line in lines), lines


def test_a_loss_with_tensors_of_its_own_is_not_compared_and_trains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, weights = convnet(), torch.ones(4, device="mps")
    with session_of(model, images(32, seed=0), tmp_path / "run") as session:
        for batch in session:
            session.step(lambda m: functional.cross_entropy(model(m.x), m.y, weight=weights), batch)
    assert reported(tmp_path / "run").startswith("not compared with the CPU: ")
    assert num_steps(tmp_path / "run") == 3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_agrees_where_nothing_is_wrong(tmp_path: Path, precision: str) -> None:
    train_gpt(tmp_path / "run", overrides={"precision": precision})
    assert reported(tmp_path / "run").startswith("verified: loss and 30 gradients agree with the CPU")


# --- the ladder ------------------------------------------------------------------------------------------------------


def train_convnet(run: Path, **overrides: str) -> nn.Module:
    """With weights in another layout, as a custom loop may choose."""
    torch.manual_seed(0)
    model = convnet()
    with session_of(model, images(32, seed=0), run, overrides=overrides) as session:
        model.to(memory_format=torch.channels_last)
        assert not model[3].weight.is_contiguous()
        for batch in session:
            session.step(lambda m: functional.cross_entropy(model(m.x), m.y), batch)
    return model


def test_strided_weights_become_contiguous_where_that_helps_simulated(tmp_path: Path) -> None:
    assert not train_convnet(tmp_path / "right")[3].weight.is_contiguous()
    assert reported(tmp_path / "right").startswith("verified")
    with simulate(Miscompute("convolution", relative_error=0.2, when=has_strided_weight)):
        model = train_convnet(tmp_path / "wrong", verify="always")
    assert model[3].weight.is_contiguous()
    assert "differs from the CPU's" in reported(tmp_path / "wrong")
    assert "; weights are contiguous now: loss and 8 gradients agree" in reported(tmp_path / "wrong")
    assert num_steps(tmp_path / "wrong") == 3


def test_half_precision_that_was_not_requested_becomes_fp32_simulated(tmp_path: Path) -> None:
    with simulate(Miscompute("addmm", relative_error=0.5, when=is_half)):
        cured = train_gpt(tmp_path / "run", precision="bf16")
    assert "differs" in reported(tmp_path / "run")
    assert "; fp32 instead of bf16: loss and 30 gradients agree" in reported(tmp_path / "run")
    result = setting(tmp_path / "run", "precision")
    assert (result["value"], result["source"]) == ("fp32", "measured")
    assert result["reason"] == "bf16 was wrong here before the first step"
    for ours, theirs in zip(cured.state_dict().values(), train_gpt(None).state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_override_is_kept_and_the_run_stops_simulated(tmp_path: Path) -> None:
    wrong = simulate(Miscompute("addmm", relative_error=0.5, when=is_half))
    with wrong, pytest.raises(WhetError, match="the model computes different results on this device") as caught:
        train_gpt(tmp_path / "run", overrides={"precision": "bf16"})
    assert "precision=fp32 instead of the precision=bf16 that you asked for" in str(caught.value)
    assert num_steps(tmp_path / "run") == 0


def test_a_leak_in_half_precision_gets_a_mask_simulated(tmp_path: Path) -> None:
    with leaking_attention(torch.bfloat16):
        train_gpt(tmp_path / "asked", overrides={"precision": "bf16"})
        train_gpt(tmp_path / "measured", precision="bf16")
    for name in ("asked", "measured"):
        assert "the output at position 5 changes by" in reported(tmp_path / name)
        assert "causal attention has an explicit mask now: loss and 30 gradients agree" in reported(tmp_path / name)
        assert setting(tmp_path / name, "causal_mask")["value"] == "explicit"
        assert setting(tmp_path / name, "precision")["value"] == "bf16"


@pytest.mark.parametrize("operator", ["mm", "addmm", "native_layer_norm_backward", "embedding_dense_backward"])
def test_a_fault_without_a_fallback_stops_the_run_with_its_name_simulated(tmp_path: Path, operator: str) -> None:
    wrong = simulate(Miscompute(operator, relative_error=0.1))
    with wrong, pytest.raises(WhetError, match="the model computes different results on this device") as caught:
        train_gpt(tmp_path / "run")
    assert "differs" in str(caught.value)
    assert "whet compare finds the operator" in str(caught.value)
    if operator == "embedding_dense_backward":
        assert "the gradient of embed.weight differs from the CPU's by" in str(caught.value)
    assert num_steps(tmp_path / "run") == 0


def test_a_changed_precision_is_reported_with_its_step_on_resume_simulated(tmp_path: Path) -> None:
    train_gpt(tmp_path / "run", precision="bf16", max_steps=2, overrides={"verify": "off"})
    with simulate(Miscompute("addmm", relative_error=0.5, when=is_half)):
        train_gpt(tmp_path / "run", precision="bf16", max_steps=4)
    report = whet.summarize(tmp_path / "run")
    assert report.inexact_since == 2
    assert "fp32 instead of bf16" in (report.inexact_reason or "")
