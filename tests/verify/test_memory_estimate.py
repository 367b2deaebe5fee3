"""Memory estimates: fake steps against real ones and formulas, and which machines fit."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.base.errors import UsageError, WhetError
from whet.data.adapters import open_source
from whet.data.batch import MicroBatch, Position
from whet.device.cpu import CpuDevice
from whet.machine.device_figures import DEVICE_FIGURES
from whet.machine.known import load_machine
from whet.plan.rules.memory import even_splits
from whet.verify.memory.estimate import MemoryEstimate, estimate_memory, estimate_trainable
from whet.verify.memory.fits import MachineFit, fit_machines
from whet.verify.trainable import Trainable, TrainableSpec, make_trainable

pytestmark = pytest.mark.torch

WIDTH, HEADS, LENGTH, WORDS = 64, 4, 96, 300
SQUARE = HEADS * LENGTH * LENGTH * 4
"""One layer's matrix of attention weights, for one sample."""


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def transformer(size: int = 4, dropout: float = 0.1) -> Trainable:
    layers = (nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=dropout, batch_first=True) for _ in range(3))
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))
    tokens = torch.randint(0, WORDS, (size, LENGTH))
    return make_trainable((model, (tokens, tokens.clone()), classify), name="transformer")


def convolutions() -> Trainable:
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))

    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    model = nn.Sequential(block(3, 16), nn.MaxPool2d(2), block(16, 16), *pool)
    return make_trainable(
        (model, (torch.randn(6, 3, 32, 32), torch.randint(0, 10, (6,))), classify), name="convolutions"
    )


def perceptron(width: int = 512, size: int = 64) -> Trainable:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    return make_trainable((model, (torch.randn(size, width),), lambda m, x: m(x).square().mean()), name="perceptron")


def subject(make: Callable[[], Trainable]) -> TrainableSpec:
    return TrainableSpec(name="subject", make=make)


_IN_THE_GATE = {
    (transformer, True, "bf16"),
    (convolutions, False, "bf16"),
    (convolutions, True, "fp32"),
    (perceptron, False, "fp32"),
}
_STEPS = list(product((transformer, convolutions, perceptron), (False, True), ("fp32", "bf16")))


@pytest.mark.parametrize(
    ("make", "is_checkpointed", "precision"),
    [step if step in _IN_THE_GATE else pytest.param(*step, marks=pytest.mark.slow) for step in _STEPS],
)
def test_fake_step_has_the_memory_of_a_real_one(
    make: Callable[[], Trainable], is_checkpointed: bool, precision: str
) -> None:
    ways = {"device": "cpu", "activation_checkpointing": is_checkpointed, "precision": precision}
    fake = estimate_memory(subject(make), **ways)
    real = estimate_trainable(make(), name="real", **ways)
    for size in (2, 5, 16):
        assert fake.bytes_at(size) == pytest.approx(real.bytes_at(size), rel=0.01)
    assert fake.phase_at(16) == real.phase_at(16)


@pytest.mark.parametrize(
    ("make", "device"),
    [
        (transformer, "mps"),
        (convolutions, "cuda"),
        pytest.param(transformer, "cuda", marks=pytest.mark.slow),
        pytest.param(convolutions, "mps", marks=pytest.mark.slow),
    ],
)
def test_two_batch_sizes_determine_all_others(make: Callable[[], Trainable], device: str) -> None:
    from_small = estimate_memory(subject(make), device=device, sizes=(2, 24))
    for size in (3, 10):
        there = estimate_memory(subject(make), device=device, sizes=(size, size + 1)).bytes_at(size)
        # Metal's page size rounds up small tensors, so a linear fit is inaccurate.
        assert from_small.bytes_at(size) == pytest.approx(there, rel=0.03 if device == "mps" else 0.01)


def test_peak_of_a_perceptron_equals_the_formula() -> None:
    weight = 512 * 512 * 4
    guess = estimate_memory(subject(perceptron), device="cpu")
    # With few samples at the end: all weights, gradients and the optimizer's state.
    few = guess.parts_at(1)
    assert few["weights"] == pytest.approx(2 * weight, rel=0.01)
    assert few["gradients"] == pytest.approx(2 * weight, rel=0.01)
    assert few["optimizer"] == pytest.approx(4 * weight, rel=0.01)
    assert guess.bytes_at(1) == pytest.approx(8 * weight, rel=0.02)
    # With many, where the backward pass begins: input, hidden layer and output; the mean's gradient, and three for the
    # square's: its base, that times 2, and the product of both.
    many = guess.parts_at(1_000_000)
    assert many["activations"] + many["temporary"] == pytest.approx(1_000_000 * 512 * 4 * 7, rel=0.01)
    assert guess.phase_at(1_000_000) == "backward"


def sample_bytes(guess: MemoryEstimate) -> int:
    """The bytes that one more sample adds to the peak."""
    return guess.bytes_at(guess.batch_size + 1) - guess.bytes_at(guess.batch_size)


def test_attention_weights_are_saved_on_mps_but_not_on_cuda() -> None:
    kept = {
        device: sample_bytes(estimate_memory(subject(partial(transformer, dropout=0.0)), device=device))
        for device in ("cuda", "mps")
    }
    assert kept["mps"] - kept["cuda"] > 2 * SQUARE
    rows = 100 * LENGTH * WIDTH * 4
    assert kept["cuda"] < rows


def test_dropouts_mask_has_one_byte_on_cuda_and_four_on_mps() -> None:
    def dropped() -> Trainable:
        model = nn.Sequential(nn.Linear(64, 64), *(nn.Dropout(0.1) for _ in range(8)), nn.Linear(64, 1))
        return make_trainable((model, (torch.randn(8, 64),), lambda m, x: m(x).mean()), name="dropped")

    cuda, mps = (estimate_memory(subject(dropped), device=device, sizes=(4096, 8192)) for device in ("cuda", "mps"))
    more = [guess.bytes_at(2_000_000) - guess.bytes_at(1_000_000) for guess in (cuda, mps)]
    assert (more[1] - more[0]) / 1_000_000 == pytest.approx(8 * 64 * 3, rel=0.05)


def test_checkpointing_and_half_precision_take_less() -> None:
    plain = sample_bytes(estimate_memory(subject(transformer), device="cuda"))
    assert sample_bytes(estimate_memory(subject(transformer), device="cuda", activation_checkpointing=True)) < plain / 2
    assert sample_bytes(estimate_memory(subject(transformer), device="cuda", precision="bf16")) < 0.8 * plain


def test_splitting_the_batch_keeps_all_gradients() -> None:
    guess = estimate_memory(subject(perceptron), device="mps")
    gradients = 2 * 512 * 512 * 4
    assert guess.bytes_at(100_000, is_split=True) - guess.bytes_at(100_000) == pytest.approx(gradients, rel=0.5)
    assert guess.parts_at(100_000, is_split=True)["gradients"] >= gradients


def test_huge_model_is_estimated_without_memory() -> None:
    def huge() -> Trainable:
        model = nn.Sequential(*(nn.Linear(32_768, 32_768) for _ in range(8)))
        return make_trainable((model, (torch.randn(4, 32_768),)), name="huge")

    before = psutil.Process().memory_info().rss
    guess = estimate_memory(subject(huge), device="cuda")
    assert guess.bytes_at(1) > 8 * 32_768**2 * 16
    assert psutil.Process().memory_info().rss - before < 500 * 2**20


def test_fake_model_with_real_data() -> None:
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))

    def micro(size: int) -> MicroBatch:
        source = open_source((x, y), CpuDevice(), global_batch_size=size, seed=0, is_resident=False)
        batch = next(iter(source.batches(Position())))
        return next(iter(source.micro_batches(batch, micro_batch=size, length_mode="fixed")))

    def make() -> Trainable:
        model = nn.Linear(64, 10)
        return Trainable(
            model=model, loss=lambda m: functional.cross_entropy(model(m.x), m.y), make_batch=micro, batch_size=16
        )

    assert estimate_memory(subject(make), device="mps").bytes_at(16) > 650 * 4 * 4


def test_unknown_device_is_an_error() -> None:
    with pytest.raises(UsageError, match="cannot be estimated"):
        estimate_memory(subject(perceptron), device="tpu")


def looking(loss: Callable[[nn.Module, Tensor], Tensor], shape: tuple[int, ...] = (64, 256)) -> Callable[[], Trainable]:
    return lambda: make_trainable((nn.Linear(256, 256), (torch.ones(shape),), loss), name="looking")


def reads_its_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    assert loss.item() > 0
    assert len(loss.detach()[None].tolist()) == 1
    return loss


def refuses_bad_numbers(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    if not bool(y.isfinite().all()):
        raise ValueError("a bad number")
    return y.square().mean()


def picks_by_a_mask(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[x[:, 0] > 0].square().mean()


@pytest.mark.parametrize("loss", [reads_its_loss, refuses_bad_numbers, picks_by_a_mask])
def test_data_dependent_step_is_estimated(loss) -> None:
    ways = {"device": "cpu", "sizes": (32, 64)}
    real = estimate_trainable(looking(loss)(), name="real", **ways)
    fake = estimate_memory(subject(looking(loss)), **ways)
    assert fake.bytes_at(64) == pytest.approx(real.bytes_at(64), rel=0.02)


@pytest.mark.parametrize(("precision", "copies"), [("fp32", 3 * 4), ("bf16", 2 * 4 + 2)])
def test_cross_entropy_bytes_per_logit_on_a_gpu(precision: str, copies: int) -> None:
    # bf16: scores in bf16, the same in float32, and their gradient.
    def words() -> Trainable:
        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(model(x), y)

        return make_trainable((nn.Linear(8, 20_000), (torch.ones(64, 8), torch.zeros(64).long()), loss), name="words")

    guess = estimate_memory(subject(words), device="cuda", precision=precision, sizes=(512, 1024))
    slope = (guess.bytes_at(20_000) - guess.bytes_at(10_000)) / 10_000
    assert slope == pytest.approx(20_000 * copies, rel=0.01)


def test_model_with_a_fixed_batch_size_is_estimated_at_that_size() -> None:
    fixed = looking(lambda model, x: model(x.view(8, 8, 256)).square().mean())
    assert estimate_memory(subject(fixed), device="mps").bytes_at(64) > 64 * 256 * 4


def test_step_with_too_many_reads_is_a_three_line_error() -> None:
    large = looking(lambda model, x: model(x)[x > 0].mean(), (2**17, 256))
    with pytest.raises(WhetError, match="depends on data"):
        estimate_memory(subject(large), device="cuda")


def test_recurrent_layer_has_one_reserve_on_a_gpu() -> None:
    def recurrent() -> Trainable:
        model = nn.LSTM(32, 32, 4, batch_first=True)
        return make_trainable((model, (torch.randn(8, 50, 32),), lambda m, x: m(x)[0].sum()), name="recurrent")

    guess = estimate_memory(subject(recurrent), device="cuda", sizes=(512, 1024))
    slope = (guess.bytes_at(2_000_000) - guess.bytes_at(1_000_000)) / 1_000_000
    # 23 vectors a step in time of reserve; input, output and their gradients.
    assert slope == pytest.approx((23 + 4) * 50 * 32 * 4, rel=0.1)


def deep(size: int = 64) -> Trainable:
    """3.4 M parameters, and 1.3 GB of activations for 64 samples."""
    layers = (nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4))
    model = nn.Sequential(nn.Embedding(1000, 256), *layers, nn.Linear(256, 1000))
    tokens = torch.randint(0, 1000, (size, 512))
    return make_trainable((model, (tokens, tokens.clone()), classify), name="deep")


def test_largest_micro_batch_that_fits_is_reported() -> None:
    (fit,) = fit_machines(subject(partial(deep, 256)), [load_machine("m2-air-8gb")])
    assert fit.limit_bytes is not None
    assert fit.micro_batch is not None
    assert fit.device == "mps"
    guess = estimate_memory(subject(partial(deep, 256)), device="mps", precision=fit.precision)
    larger = min(size for size in even_splits(256) if size > fit.micro_batch)
    assert (
        fit.num_bytes
        == guess.bytes_at(fit.micro_batch, is_split=True) + DEVICE_FIGURES["mps"].context_bytes
        <= fit.limit_bytes
    )
    assert guess.bytes_at(larger, is_split=larger < 256) + DEVICE_FIGURES["mps"].context_bytes > fit.limit_bytes
    assert fit.summary.startswith(f"fits m2-air-8gb (8 GB) at micro batch {fit.micro_batch}: ")
    assert fit.summary.endswith(" of 5.3 GB")


def test_model_that_does_not_fit_gets_a_suggestion() -> None:
    def wide() -> Trainable:
        layers = (nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True) for _ in range(12))
        model = nn.Sequential(nn.Embedding(1000, 512), *layers, nn.Linear(512, 1000))
        tokens = torch.randint(0, 1000, (2, 4096))
        return make_trainable((model, (tokens, tokens.clone()), classify), name="wide")

    (fit,) = fit_machines(subject(wide), [load_machine("m1-air-8gb")])
    assert fit.micro_batch is None
    assert fit.micro_batch_checkpointed is not None
    assert fit.summary.startswith("does not fit m1-air-8gb (8 GB): one sample needs ")
    assert fit.summary.endswith(f"; with activation_checkpointing=on {fit.micro_batch_checkpointed} fit")


def test_batch_with_batchnorm_is_not_split() -> None:
    (fit,) = fit_machines(subject(convolutions), [load_machine("m2-air-8gb")], global_batch_size=1_000_000)
    assert (fit.micro_batch, fit.least) == (None, 1_000_000)
    assert "the 1000000 samples that cannot be split need" in fit.summary


def test_all_known_machines_have_a_result() -> None:
    result = fit_machines(subject(transformer))
    assert len(result) >= 6
    assert all(fit.micro_batch == 4 for fit in result)
    assert {fit.device for fit in result} == {"cuda", "mps", "cpu"}


def test_unknown_memory_is_reported() -> None:
    fit = MachineFit(
        machine="x",
        memory_bytes=None,
        device="cuda",
        precision="fp32",
        is_checkpointed=False,
        micro_batch=None,
        least=1,
        num_bytes=2**30,
        limit_bytes=None,
    )
    assert fit.summary == "x: a step with 1 needs 1 GB; the machine's memory is unknown"


@pytest.mark.slow
def test_the_benchmark_runs_on_small_models(tmp_path: os.PathLike[str]) -> None:
    from paths import ROOT

    script = ROOT / "benchmarks" / "memory_estimates.py"
    words = ["--small", "--device", "cpu", "--precisions", "fp32", "--only", "GPT", "perceptron"]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 within 10%" in done.stdout
