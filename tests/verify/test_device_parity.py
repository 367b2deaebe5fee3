"""Comparison of a device with the CPU: agreement, planted errors, and restoring the model."""

import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fake_device import FakeDevice
from small_gpt import Gpt, micro_of
from small_models import convnet, images
from whet.data.batch import MicroBatch
from whet.device.cpu import CpuDevice
from whet.verify import isolation
from whet.verify.draws import RecordedDraws
from whet.verify.start import device_parity
from whet.verify.start.device_parity import LossAndGradients, compare_with_cpu, loss_and_gradients

pytestmark = pytest.mark.torch


def restless_model() -> nn.Module:
    """Everything that a forward pass can change: statistics, draws, modes, a buffer, even a weight."""

    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = convnet(dropout=0.3)
            self.norm = nn.BatchNorm1d(4)
            self.frozen = nn.BatchNorm1d(4).eval()
            self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.2)
            self.register_buffer("calls", torch.zeros(()))
            self.limit = nn.Parameter(torch.full((4,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.calls = self.calls + 1
            self.limit.data.clamp_(max=2.0)
            torch.rand(()), random.random(), np.random.rand()
            y = self.frozen(self.norm(self.body(x)))
            return functional.dropout(self.lstm(y[None])[0][0], 0.2, self.training) * self.limit

    torch.manual_seed(0)
    return Restless()


def small_images(num_samples: int = 6) -> MicroBatch:
    x, y = images(num_samples, seed=0)
    return MicroBatch(fields={"x": x, "y": y}, ids=np.arange(num_samples))


def loss_of(model: nn.Module) -> Callable[[MicroBatch], Tensor]:
    return lambda micro: functional.cross_entropy(model(micro.x), micro.y)


def trace_of(model: nn.Module, device: FakeDevice) -> dict[str, Any]:
    """Return all state that must be unchanged, as plain values."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {name: tensor.detach().clone().numpy().tobytes() for name, tensor in tensors.items()},
        "memory": {name: (id(tensor), tensor.data_ptr(), tensor.stride()) for name, tensor in tensors.items()},
        "gradients": {
            name: None if p.grad is None else (id(p.grad), p.grad.clone().numpy().tobytes())
            for name, p in model.named_parameters()
        },
        "modes": [module.training for module in model.modules()],
        "dropout": [getattr(module, "dropout", None) for module in model.modules() if isinstance(module, nn.LSTM)],
        "draws": (
            torch.get_rng_state().numpy().tobytes(),
            device.generator.get_state().numpy().tobytes(),
            repr(random.getstate()),
            repr(np.random.get_state()),
        ),
    }


def verify(model: nn.Module, device: FakeDevice, untouched: Callable[..., Any]) -> None:
    loss, micro, draws = loss_of(model), small_images(), RecordedDraws()
    with untouched(model, device):
        result = loss_and_gradients(model, device, loss, micro, precision="fp32", draws=draws)
        compare_with_cpu(model, loss, micro, result, precision="fp32", draws=draws)
        torch.rand((), generator=device._generator)
        model.eval()
        isolation.perturb_zero_weights(model)


@pytest.fixture
def restless() -> tuple[nn.Module, FakeDevice]:
    model, device = restless_model(), FakeDevice()
    nn.init.zeros_(model.body[0].bias)
    parameters = list(model.parameters())
    # As after a custom loop: some gradients exist.
    for parameter in parameters[::2]:
        parameter.grad = torch.ones_like(parameter)
    return model, device


def test_check_restores_the_model(restless) -> None:
    model, device = restless
    before = trace_of(model, device)
    verify(model, device, isolation.preserve_model_and_rng)
    assert trace_of(model, device) == before


def test_model_is_restored_after_an_exception(restless) -> None:
    model, device = restless
    before = trace_of(model, device)

    def loss(micro: MicroBatch) -> Tensor:
        model(micro.x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), isolation.preserve_model_and_rng(model, device):
        loss_and_gradients(model, device, loss, small_images(), precision="fp32", draws=RecordedDraws())
    assert trace_of(model, device) == before


MUTANTS = {
    "a gradient is left behind": ("parameter.grad = gradient", "pass", "gradients"),
    "buffers stay changed": ("buffers.restore()", "pass", "values"),
    "generators have moved": (
        "with preserve_model(model), preserve_rng(device), force_eager():",
        "with preserve_model(model), force_eager():",
        "draws",
    ),
    "modes stay changed": ("module.training = mode", "pass", "modes"),
    "weights stay changed": ("memory.copy_(values)", "pass", "values"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_of_the_restore_are_found(restless, name: str) -> None:
    model, device = restless
    right, wrong, where = MUTANTS[name]
    source = Path(isolation.__file__).read_text()
    assert source.count(right) == 1
    mutant = types.ModuleType("mutant")
    exec(compile(source.replace(right, wrong), "mutant.py", "exec"), mutant.__dict__)
    before = trace_of(model, device)
    verify(model, device, mutant.preserve_model_and_rng)
    after = trace_of(model, device)
    assert [part for part in before if before[part] != after[part]] != []
    assert before[where] != after[where]


# --- agreement -------------------------------------------------------------------------------------------------------


def agreement(
    model: nn.Module, loss: Any, micro: MicroBatch, *, precision: str, tamper: Any = None
) -> device_parity.DeviceParity:
    device, draws = CpuDevice(), RecordedDraws()
    with isolation.preserve_model_and_rng(model, device):
        result = loss_and_gradients(model, device, loss, micro, precision=precision, draws=draws)
        if tamper is not None:
            result = tamper(result)
        return compare_with_cpu(model, loss, micro, result, precision=precision, draws=draws)


@pytest.fixture(scope="module")
def trained_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, micro = Gpt(), micro_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        model.loss(micro).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("is_trained", [False, True])
def test_rounding_agrees(precision: str, is_trained: bool, trained_weights: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, micro = Gpt(), micro_of()
    if is_trained:
        model.load_state_dict(trained_weights)
    if is_trained and precision != "fp32":
        # All that is left of the gradients is rounding, which shows nothing.
        with pytest.raises(ArithmeticError, match="rounding alone changes the loss by"):
            agreement(model, model.loss, micro, precision=precision)
        return
    result = agreement(model, model.loss, micro, precision=precision)
    assert result.agrees, str(result)
    assert result.num_gradients == len(list(model.parameters()))
    assert f"loss and {result.num_gradients} gradients agree with the CPU" in str(result)


def test_dropout_is_off_and_batchnorm_in_training_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(convnet(dropout=0.5), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(100.0)
    result = agreement(model, loss_of(model), small_images(), precision="fp32")
    assert result.agrees, str(result)
    model[0].eval()
    assert result.device_loss == pytest.approx(float(loss_of(model)(small_images()).detach()), rel=1e-5)


def tampered(change: Callable[[dict[str, Tensor]], None]) -> Callable[[LossAndGradients], LossAndGradients]:
    def tamper(result: LossAndGradients) -> LossAndGradients:
        gradients = dict(result.gradients)
        change(gradients)
        return LossAndGradients(result.loss, gradients)

    return tamper


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("half", lambda g: g.update({"blocks.1.out.weight": 0.5 * g["blocks.1.out.weight"]})),
        ("one number", lambda g: g["blocks.0.qkv.bias"].__setitem__(50, g["blocks.0.qkv.bias"].abs().max())),
        ("missing", lambda g: g.pop("norm.weight")),
        ("zero", lambda g: g["head.weight"].zero_()),
        ("NaN", lambda g: g["place.weight"][3].fill_(torch.nan)),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_planted_wrong_gradient_is_named(precision: str, name: str, change: Any) -> None:
    torch.manual_seed(0)
    model = Gpt()
    result = agreement(model, model.loss, micro_of(), precision=precision, tamper=tampered(change))
    assert not result.agrees
    expected = {
        "half": "blocks.1.out.weight",
        "one number": "blocks.0.qkv.bias",
        "missing": "norm.weight",
        "zero": "head.weight",
        "NaN": "place.weight",
    }[name]
    assert result.worst == expected
    assert f"the gradient of {expected} differs from the CPU's" in str(result)


def test_planted_wrong_loss_is_found() -> None:
    torch.manual_seed(0)
    model = Gpt()
    wrong = agreement(
        model, model.loss, micro_of(), precision="fp32", tamper=lambda f: LossAndGradients(f.loss * 1.001, f.gradients)
    )
    assert not wrong.agrees
    assert "the loss is" in str(wrong)


@pytest.mark.parametrize(("scale", "is_judged"), [(60.0, True), (80.0, False)])
def test_float32_rounding_of_the_cpu_agrees_up_to_a_useful_bound(scale: float, is_judged: bool) -> None:
    """A loss with cancellation: another order of the same sum is off by more than the bound, on the CPU as well."""
    weight = nn.Parameter(torch.full((1000,), 1.0))
    model = nn.ParameterList([weight])
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * scale
    micro = MicroBatch(fields={"x": noise}, ids=np.arange(1))

    def in_order(seed: int) -> Callable[[MicroBatch], Tensor]:
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))
        return lambda m: (weight * m.x)[order].sum() - (weight * m.x).sum() + weight.square().sum() * 1e-3

    loss, other, draws = in_order(1), in_order(3), RecordedDraws()
    with isolation.preserve_model_and_rng(model, CpuDevice()):
        result = loss_and_gradients(model, CpuDevice(), other, micro, precision="fp32", draws=draws)
        if not is_judged:
            with pytest.raises(ArithmeticError, match="rounding alone changes the loss by"):
                compare_with_cpu(model, loss, micro, result, precision="fp32", draws=draws)
            return
        seen = compare_with_cpu(model, loss, micro, result, precision="fp32", draws=draws)
    assert (
        seen.loss_error > device_parity.PARITY_BOUNDS["fp32"][0]
        or seen.gradient_error > device_parity.PARITY_BOUNDS["fp32"][1]
    )
    assert seen.agrees, str(seen)


def noisy_agreement(tamper: Any = None) -> device_parity.DeviceParity:
    """A model that draws in eval mode too, as a VAE does, with torch's generator and NumPy's."""
    torch.manual_seed(0)
    model, micro = nn.Linear(4, 4), MicroBatch(fields={"x": torch.randn(6, 4)}, ids=np.arange(6))

    def loss(m: MicroBatch) -> Tensor:
        return (model(m.x) * torch.randn_like(m.x) * np.random.rand()).square().mean()

    return agreement(model, loss, micro, precision="fp32", tamper=tamper)


def test_draws_are_repeated_on_the_cpu() -> None:
    assert noisy_agreement().agrees
    wrong = noisy_agreement(tampered(lambda g: g["weight"].mul_(1.01)))
    assert not wrong.agrees
    assert wrong.gradient_bound == device_parity.PARITY_BOUNDS["fp32"][1]


def test_weighted_sums_and_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 3))
    micro = MicroBatch(fields={"x": torch.randint(0, 50, (5, 6))}, ids=np.arange(5))
    result = agreement(model, lambda m: (model(m.x).square().sum(), m.x.numel()), micro, precision="fp32")
    assert result.agrees
    assert result.num_gradients == 3


def test_repeat_difference_counts_tensors() -> None:
    torch.manual_seed(0)
    model, device, draws = Gpt(), CpuDevice(), RecordedDraws()
    with isolation.preserve_model_and_rng(model, device):
        one, two = (
            loss_and_gradients(model, device, model.loss, micro_of(), precision="fp32", draws=draws) for _ in range(2)
        )
    assert device_parity.repeat_difference(one, two) is None
    two.gradients["head.bias"][3] *= 1 + 1e-6
    assert f"different bits when repeated, in 1 of {len(one.gradients) + 1} tensors" in (
        device_parity.repeat_difference(one, two) or ""
    )
    one.gradients["norm.bias"][0] = two.gradients["norm.bias"][0] = torch.nan
    assert "in 1 of" in (device_parity.repeat_difference(one, two) or "")


def test_large_models_get_fewer_samples() -> None:
    assert device_parity.parity_batch_size(100_000, 64) == 8
    assert device_parity.parity_batch_size(10_000_000, 128) == 5
    assert device_parity.parity_batch_size(124_000_000, 1024) == 2


@pytest.fixture(autouse=True)
def _nothing_moves() -> Iterator[None]:
    yield
    random.seed(0)
    np.random.seed(0)
