"""`whet compare`: agreement, planted wrong kernels, determinism, precision, reproducers, options."""

import copy
import dataclasses
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as f

import drawing_models
import whet
from paths import SUPPORT, Run
from small_models import TokenModel, convnet, images, ragged_tokens
from warm_python import WarmPython
from whet.api.verify import model_spec
from whet.base.errors import UsageError
from whet.cli.compare import render_comparison as comparison_lines
from whet.data.batch import MicroBatch
from whet.device.abstract import AbstractDevice
from whet.device.cpu import CpuDevice
from whet.step.optimizers import OptimizerChoice
from whet.verify.draws import RecordedDraws, UnrepeatableDrawError
from whet.verify.isolation import disable_dropout
from whet.verify.parity.compare import _compare_training, compare_devices
from whet.verify.parity.locate import first_wrong_module, locate
from whet.verify.parity.precision import compare_precision
from whet.verify.parity.references import FORMULAS
from whet.verify.parity.replay import TensorLayout
from whet.verify.parity.reproducer import MARKER, _memory
from whet.verify.parity.training import ParityRow, ReplicaFactory, compare_training
from whet.verify.tolerance import error_bound, relative_errors
from whet.verify.trainable import Trainable, TrainableSpec

pytestmark = pytest.mark.torch

WRONG_KERNELS = SUPPORT / "wrong_kernels.py"


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 3))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def tokens_subject() -> TrainableSpec:
    def make() -> Trainable:
        torch.manual_seed(0)
        model = TokenModel()
        tokens = ragged_tokens(8, longest=9, seed=0)

        def micro(size: int) -> MicroBatch:
            rows = torch.arange(size)
            return MicroBatch(fields={"tokens": tokens.padded(rows, length=9)}, ids=np.arange(size))

        return Trainable(model=model, loss=model.loss, make_batch=micro, batch_size=8)

    return TrainableSpec(name="tokens", make=make)


class Functional(nn.Module):
    """Dropout in three disguises."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.recurrent = nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        seen, _ = self.attention(x, x, x)
        seen = f.scaled_dot_product_attention(seen, x, x, dropout_p=0.3)
        return self.recurrent(f.dropout(seen, 0.5))[0]


# --- sound models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        tokens_subject(),
        model_spec(convnet(), images(8, seed=0), lambda model, x, y: f.cross_entropy(model(x), y)),
        model_spec(norm_net(), (torch.randn(16, 6),), mean_square),
        model_spec(Functional(), (torch.randn(3, 5, 8),)),
    ],
    ids=["tokens", "conv", "norm", "dropout"],
)
def test_correct_models_agree(spec: TrainableSpec) -> None:
    result = compare_devices(spec, devices=["cpu"], steps=5)
    assert result.agrees, result
    assert result.reference == "cpu float64"
    assert {"loss", "gradients", "update", "trajectory"} <= {row.what for row in result.rows}
    assert all(row.error < row.bound for row in result.rows)
    assert result.rows[1].error > 0, "float32 is not float64"
    assert result.determinism.is_same
    assert result.located is None


def test_all_kinds_of_dropout_are_disabled_and_restored() -> None:
    model, x = nn.Sequential(Functional(), nn.Dropout(0.5), nn.BatchNorm1d(5)), torch.randn(3, 5, 8)

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(x).detach()

    with disable_dropout(model):
        assert torch.equal(drawn(1), drawn(2))
        assert model[2].training
    assert not torch.equal(drawn(1), drawn(2))
    assert all(module.training for module in model.modules())
    assert (model[0].attention.dropout, model[0].recurrent.dropout) == (0.5, 0.5)


class StochasticDepth(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(()).round() if self.training else x


def test_eval_mode_disables_draws_but_not_batchnorm_training() -> None:
    model, x = nn.Sequential(Functional(), StochasticDepth(), nn.BatchNorm1d(5)), torch.randn(3, 5, 8)
    before = torch.get_rng_state()
    with disable_dropout(model, use_eval_mode=True):
        assert not model[1].training
        assert model[2].training
        model(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    with disable_dropout(model):
        model(x)
    assert not torch.equal(torch.get_rng_state(), before), "only quiet modules draw nothing"


def test_given_model_is_not_changed() -> None:
    model = norm_net().eval()
    model[0].weight.grad = torch.ones(8, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate()
    result = whet.compare(model, (torch.randn(16, 6, generator=torch.Generator()),), devices=["cpu"], steps=2)
    assert result.agrees
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(8, 6))
    assert not model.training
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]


def test_model_without_float64_support_gets_a_note() -> None:
    class Narrow(nn.Linear):
        def forward(self, x):
            return f.linear(x, self.weight.float() * 1) + torch.mm(x, torch.ones(3, 3))

    result = whet.compare(Narrow(3, 3), (torch.randn(4, 3),), devices=["cpu"], steps=2, precisions=[])
    assert result.reference == "cpu float32"
    assert result.rows == ()
    assert "does not run in float64" in result.notes[0]
    assert result.verdict == "cannot judge"
    assert "not compared with anything" in comparison_lines(result)[-1]


def test_complex_buffers_stay_complex_in_float64() -> None:
    class Turned(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("turns", torch.polar(torch.ones(2), torch.tensor([0.3, 2.0])))

        def forward(self, x):
            pairs = torch.view_as_complex(super().forward(x).unflatten(-1, (2, 2)))
            return torch.view_as_real(pairs * self.turns).flatten(-2)

    result = whet.compare(Turned(), (torch.randn(6, 4),), devices=["cpu"], steps=2, precisions=[])
    assert (result.agrees, result.reference) == (True, "cpu float64")


# --- planted errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "named", "module", "phase"),
    [
        ("tanh", "aten::tanh", "", "forward"),
        ("tanh_backward", "aten::tanh_backward", "", "backward"),
        ("sum.dim_IntList", "aten::sum", "second", "backward"),
        ("clamp_min_", "aten::clamp_min_", "", "forward"),
    ],
)
def test_wrong_kernel_is_named_and_reproduced(
    warm_python: WarmPython, tmp_path: Path, operator: str, named: str, module: str, phase: str
) -> None:
    program = tmp_path / "shown.py"
    done = warm_python.run(WRONG_KERNELS, operator, program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["agrees"]
    culprit = result["located"]["culprit"]
    assert (culprit["operator"], culprit["module"], culprit["phase"]) == (named, module, phase)
    assert culprit["line"].startswith("wrong_kernels.py:")
    assert list(result["located"]["wrong"]) == [named], "operators that got wrong inputs are not blamed"
    assert result["exit_code"] == 1, "the reproducer fails with the same fault"
    # Without the fault, and without whet; one of them in a Python that has imported nothing before.
    alone = (
        "import sys, runpy\n"
        "sys.modules.update({name: None for name in ('whet', *sys.modules) if name.partition('.')[0] == 'whet'})\n"
        f"runpy.run_path({str(program)!r}, run_name='__main__')"
    )
    if operator == "tanh":
        again = subprocess.run([sys.executable, "-c", alone, "cpu"], capture_output=True, text=True, cwd=tmp_path)
    else:
        again = warm_python.run("-c", alone, "cpu", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "agrees" in again.stdout


class Elsewhere(AbstractDevice):
    """The CPU under another name; modules can detect that they are on it."""

    kind = "elsewhere"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def put_model(self, model: nn.Module, optimizer: object = None) -> None:
        for module in model.modules():
            module.is_elsewhere = True


class Sly(nn.Linear):
    """Every operator is correct, but the device uses other operators."""

    is_elsewhere = False

    def forward(self, x):
        return super().forward(x) * (1.01 if self.is_elsewhere else 1.0)


class SlyGradient(nn.Linear):
    is_elsewhere = False

    def forward(self, x):
        if self.is_elsewhere and x.requires_grad:
            x = x * 1
            x.register_hook(lambda gradient: gradient * 1.01)
        return super().forward(x)


@pytest.mark.parametrize(("kind", "phase"), [(Sly, "forward"), (SlyGradient, "backward")])
def test_module_is_named_if_no_operator_is_wrong(kind: type[nn.Linear], phase: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), kind(4, 4)), nn.Linear(4, 2))
    bench = ReplicaFactory(model_spec(model, (torch.randn(6, 4),)))
    rows = compare_training(bench, Elsewhere(), steps=2).rows
    assert not all(row.agrees for row in rows)
    result = locate(bench, Elsewhere())
    assert result.num_checked > 10
    assert result.culprit is not None
    assert (result.culprit.operator, result.culprit.module, result.culprit.phase) == (None, "1.1", phase)


def test_no_module_of_a_correct_model_is_wrong() -> None:
    for model, x in ((norm_net(), torch.randn(16, 6)), (Functional(), torch.randn(3, 5, 8))):
        assert first_wrong_module(ReplicaFactory(model_spec(model, (x,))), Elsewhere()) is None


class Reordered(nn.Linear):
    """Elsewhere, the gradient of the bias is a sum in another order."""

    is_elsewhere = False

    def forward(self, x):
        return super().forward(x.flip(0)).flip(0) if self.is_elsewhere else super().forward(x)


def test_rounding_of_a_gradient_that_cancels_is_no_wrong_module() -> None:
    """BatchNorm removes any bias before it, so the gradient of that bias is only rounding."""
    model = nn.Sequential(Reordered(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    assert first_wrong_module(ReplicaFactory(model_spec(model, (torch.randn(64, 6),))), Elsewhere()) is None


def test_nondeterministic_model_is_found(warm_whet: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import itertools, torch\n"
        "from torch import nn\n"
        "calls = itertools.count()\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) * (1 + next(calls) / 2**21)\n"
        "def model():\n"
        "    return Net(4, 2), (torch.ones(8, 4),)\n"
    )
    done = warm_whet("compare", "mine.py", "--devices", "cpu", "--steps", "2")
    assert done.returncode == 1
    assert "DIFFERS: first the loss in step 1" in done.stdout
    assert done.stdout.count("DIFFERS") == 1, "by rounding only, so nothing else does"


# --- random draws ----------------------------------------------------------------------------------------------------


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x)


def test_random_operators_are_listed() -> None:
    result = locate(ReplicaFactory(model_spec(Noisy(3, 3), (torch.randn(4, 3),))), CpuDevice())
    assert result.draws == ("aten::rand_like",)
    assert result.culprit is None


_DRAWING = list(drawing_models.MODELS)


# The gate tries the first four on the virtual Mac.
@pytest.mark.parametrize(
    "name",
    [*_DRAWING[4::2], *(pytest.param(name, marks=pytest.mark.slow) for name in (*_DRAWING[:4], *_DRAWING[5::2]))],
)
def test_models_that_draw_agree_within_the_usual_bounds(name: str) -> None:
    model, x = drawing_models.make(name)
    result = whet.compare(model, (x,), devices=["cpu"], steps=3, precisions=[])
    assert (result.verdict, result.reference) == ("agrees", "cpu float64"), result
    assert result.num_draws > 0
    assert all(row.error < 1e-4 for row in result.rows if row.what in ("loss", "gradients", "draws")), result.rows


class HiddenDraws(nn.Linear):
    """Draws from a generator that nobody can seed, as data augmentation in NumPy may."""

    def forward(self, x):
        return super().forward(x) * np.random.default_rng().uniform(0.5, 1.5)


class HiddenNumber(nn.Linear):
    """Draws as often as a generator decides that nobody can seed."""

    def forward(self, x):
        x = super().forward(x)
        for _ in range(np.random.default_rng().integers(1, 200)):
            x = x + torch.rand_like(x)
        return x


class KernelDraws(nn.Linear):
    def forward(self, x):
        return f.rrelu(super().forward(x), training=True)


class Chaotic(nn.Linear):
    """Amplifies rounding until it hides an error of 1 %."""

    def forward(self, x):
        x = torch.sigmoid(super().forward(x))
        for _ in range(14):
            x = 3.99 * x * (1 - x)
        return x


class Infinite(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (HiddenDraws, "two passes on the CPU differ by"),
        (HiddenNumber, "its random numbers cannot be repeated"),
        (KernelDraws, "its random numbers cannot be repeated: aten.rrelu_with_noise draws inside a kernel"),
        (Infinite, "its loss on the CPU is"),
    ],
)
def test_what_cannot_be_judged_is_no_agreement(kind: type[nn.Linear], why: str) -> None:
    torch.manual_seed(0)
    result = compare_devices(model_spec(kind(3, 3), (torch.randn(4, 3),)), devices=["cpu"], steps=2, precisions=[])
    assert (result.verdict, result.agrees) == ("cannot judge", False), result
    assert result.located is not None, "every operator is still checked alone"
    assert comparison_lines(result)[-1].startswith(f"cannot be judged: {why}"), comparison_lines(result)
    assert json.loads(json.dumps(result.as_json()))["verdict"] == "cannot judge"


def test_bound_that_would_hide_one_percent_is_no_agreement() -> None:
    torch.manual_seed(0)
    bench = ReplicaFactory(model_spec(Chaotic(3, 3), (torch.randn(4, 3),)))
    parity, obstacles = _compare_training(bench, Elsewhere(), steps=20, progress=lambda _: None)
    rows = {row.what: row for row in parity.rows}
    assert rows["gradients"].error <= rows["gradients"].bound, "the same CPU"
    assert rows["gradients"].verdict == "cannot judge"
    assert [obstacle.split()[3] for obstacle in obstacles] == ["loss", "gradients"]
    assert all("rounding alone changes" in obstacle for obstacle in obstacles)
    assert 1 <= rows["trajectory"].steps < 20, "steps are compared as long as rounding allows"
    assert rows["trajectory"].agrees


def test_command_has_an_exit_code_for_no_verdict(warm_whet: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) * numpy.random.default_rng().uniform(0.5, 1.5)\n"
        "def model():\n"
        "    return Net(4, 2), (torch.ones(8, 4),)\n"
    )
    done = warm_whet("compare", "mine.py", "--devices", "cpu", "--steps", "2")
    assert done.returncode == 3, done.stderr
    assert "cannot be judged: two passes on the CPU differ by" in done.stdout
    assert "agrees\n" not in done.stdout


def test_repeated_draws_must_be_the_same_kind_and_shape() -> None:
    draws = RecordedDraws()
    with draws.record():
        first = torch.randn(3), torch.empty(2, 2).bernoulli_(0.3), torch.bernoulli(torch.tensor([0.5, 0.1]))
    assert [str(kind) for kind, _ in draws.drawn] == ["aten.randn", "aten.bernoulli_", "aten.bernoulli"]
    assert next(iter(draws.parameters.values())).tolist() == pytest.approx([0.5, 0.1])
    with draws.repeat():
        again = (
            torch.randn(3, dtype=torch.float64),
            torch.ops.aten.native_dropout(torch.ones(2, 2), 0.7, True)[1],
            torch.bernoulli(torch.tensor([0.9, 0.9])),
        )
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(first, again, strict=True))
    assert next(iter(draws.parameters.values())).tolist() == pytest.approx([0.9, 0.9]), "it would hide a wrong rate"
    for wrong in (lambda: torch.rand(3), lambda: torch.randn(4), lambda: torch.randn(3)):
        with pytest.raises(UnrepeatableDrawError), draws.repeat():
            wrong()


def test_small_learning_rates_do_not_hide_a_wrong_update() -> None:
    """An update of 1e-6 is little more than the rounding of a weight of 1."""

    def make() -> Trainable:
        torch.manual_seed(0)
        made = model_spec(nn.Linear(8, 8), (torch.randn(4, 8),)).make()
        return dataclasses.replace(made, optimizer=OptimizerChoice(lr=1e-6))

    rows = {row.what: row for row in compare_devices(TrainableSpec(name="slow", make=make), devices=["cpu"]).rows}
    assert rows["update"].agrees
    assert rows["update"].error < 1e-3


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_formula_agrees_with_autograd(is_causal: bool, has_bias: bool) -> None:
    """CUDA's kernel has no CPU version; a formula replaces it."""
    q, k, v = (torch.randn(2, 3, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 3, 6, 6, dtype=torch.float64) if has_bias else None
    past = torch.ones(6, 6, dtype=torch.bool).tril() if is_causal else torch.ones(6, 6, dtype=torch.bool)
    mask = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~past, -torch.inf) + (0 if bias is None else bias)
    right = f.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    gradient = torch.randn_like(right)
    right.backward(gradient)
    name = "_scaled_dot_product_efficient_attention"
    forward, backward = (getattr(torch.ops.aten, f"{name}{end}").default for end in ("", "_backward"))
    given = {"query": q, "key": k, "value": v, "attn_bias": bias, "grad_out_": gradient, "dropout_p": 0.0}
    given |= {"is_causal": is_causal, "scale": 0.3, "compute_log_sumexp": True, "grad_input_mask": [True] * 4}
    with torch.no_grad():
        for func, expected in ((forward, [right]), (backward, [q.grad, k.grad, v.grad])):
            # By the order of torch's own schema.
            named = [(argument.name, argument.kwarg_only) for argument in func._schema.arguments]
            args = [given.get(name) for name, is_word in named if not is_word]
            words = {name: given[name] for name, is_word in named if is_word}
            for ours, theirs in zip(FORMULAS[func.name()](*args, **words), expected, strict=True):
                torch.testing.assert_close(ours, theirs)


def test_relative_errors() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "zero": torch.tensor([0.0])}
    noisy = {"a": torch.tensor([1.0, 2.0]), "zero": torch.tensor([1e-9])}
    assert relative_errors(noisy, one) == {"a": 0.0, "zero": pytest.approx(5e-8)}
    assert relative_errors({"a": one["a"]}, one)["zero"] == math.inf
    assert relative_errors({**one, "a": torch.tensor([1.0, math.nan])}, one)["a"] == math.inf
    assert not ParityRow(what="loss", error=math.nan, bound=1.0).agrees
    assert error_bound(1e-4, 1e-3) == pytest.approx(2e-2)
    assert error_bound(1e-4, None) == error_bound(1e-4, 1e-9) == 1e-4


# --- precision -------------------------------------------------------------------------------------------------------


def micro_of(x: torch.Tensor) -> MicroBatch:
    return MicroBatch(fields={"x": x}, ids=np.arange(len(x)))


def test_bf16_agrees_and_the_model_is_restored() -> None:
    torch.manual_seed(0)
    model = norm_net().eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    buffers = [id(buffer) for buffer in model.buffers()]
    x = torch.randn(16, 6)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    result = compare_precision(model, lambda m: model(m.x).square().mean(), micro_of(x), CpuDevice(), "bf16")
    assert result.agrees
    assert 0 < result.gradient_error < result.bound
    assert result.loss_error > 0
    assert set(result.by_module) == {"0", "1", "4"}
    assert max(result.by_module.values()) == result.gradient_error
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert [id(buffer) for buffer in model.buffers()] == buffers
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]


def test_bf16_differs_after_cancellation() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    nn.init.constant_(model.bias, 1000.0)
    loss = lambda m: (model(m.x).float() - 1000).square().mean()  # noqa: E731
    result = compare_precision(model, loss, micro_of(torch.randn(16, 4)), CpuDevice(), "bf16")
    assert not result.agrees


class WrongInHalfPrecision(nn.Linear):
    """A layer whose result is half too large under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.5 if torch.is_autocast_enabled("cpu") else 1.0)


def deep_conv_net(head: nn.Module) -> nn.Module:
    """Return a network of convolutions and BatchNorm that amplifies rounding until early gradients are noise."""
    layers = [
        layer for _ in range(16) for layer in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.Flatten(), head)


@pytest.mark.parametrize(("head", "agrees"), [(nn.Linear, True), (WrongInHalfPrecision, False)])
def test_a_network_that_amplifies_rounding_is_judged_by_its_own_rounding(head: type[nn.Linear], agrees: bool) -> None:
    torch.manual_seed(0)
    model = deep_conv_net(head(8 * 6 * 6, 3))
    x, labels = torch.randn(8, 8, 6, 6), torch.arange(8) % 3
    loss = lambda m: nn.functional.cross_entropy(model(m.x).float(), labels)  # noqa: E731
    result = compare_precision(model, loss, micro_of(x), CpuDevice(), "bf16")
    assert max(result.by_module.values()) > 0.2, "no more than usual rounding: the test shows nothing"
    assert result.agrees == agrees, result


def test_tiny_gradients_agree_in_fp16_thanks_to_scaling() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    loss = lambda m: model(m.x).float().square().mean() * 1e-6  # noqa: E731
    result = compare_precision(model, loss, micro_of(torch.randn(16, 6)), CpuDevice(), "fp16")
    assert result.agrees, "without a scale every gradient would be 0"


# --- programs and words ----------------------------------------------------------------------------------------------


def layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(60.0).reshape(3, 4, 5)
    return {
        "plain": base,
        "transposed": base.transpose(0, 2),
        "from the middle": base[1:, 1:, ::2],
        "expanded": base[:, :1].expand(3, 7, 5),
        "one number": base[1, 2, 3],
        "empty": base[:0],
        "whole numbers": base.long()[..., 2],
        "flags": base[0] > 7,
    }


@pytest.mark.parametrize("name", list(layouts()))
def test_reproducer_keeps_memory_layouts(name: str) -> None:
    tensor = layouts()[name]
    was = TensorLayout(size=tuple(tensor.shape), stride=tensor.stride(), offset=int(tensor.storage_offset()))
    flat, layout = _memory(tensor.clone(), was)
    again = flat.as_strided(layout.size, layout.stride, layout.offset)
    assert torch.equal(again, tensor)
    assert again.stride() == tensor.stride()
    if tensor.numel():
        assert again.storage_offset() == tensor.storage_offset()


def test_overlapping_memory_becomes_contiguous() -> None:
    tensor = torch.arange(8.0).unfold(0, 4, 1)
    flat, layout = _memory(tensor.clone(), TensorLayout(size=tuple(tensor.shape), stride=tensor.stride(), offset=0))
    assert torch.equal(flat.as_strided(layout.size, layout.stride, layout.offset), tensor)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--size", "-1"], "--size must be at least 1"),
        (["--devices", "cpu,tpu"], "no such device"),
        (["--devices", "cpu,cpu"], "a device is named twice"),
        (["--devices", "cpu,mps,cuda"], "only one device is compared with the CPU"),
        (["--precision", "fp8"], "unknown precision"),
        (["--precision", "tf32", "--devices", "cpu"], "only CUDA has tf32"),
        (["--out", "there/is/none.py"], "the reproducer cannot be written there"),
        (["--out", "mine.txt"], "the reproducer cannot be written there"),
        (["--out", "mine.py"], "the file was not written by whet compare"),
        (["--out", "weights.py"], "the reproducer's data would replace a file"),
    ],
)
def test_bad_options_are_three_line_errors(
    words: list[str], what: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.cli.main import run

    monkeypatch.chdir(tmp_path)
    Path("weights.safetensors").touch()
    Path("mine.py").write_text("raise SystemError('loaded too early')\n")
    assert run(["compare", "mine.py", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {what}")
    assert "  got: " in error
    assert len(error.strip().splitlines()) == 3


def test_invalid_models_are_errors(warm_whet: Run, tmp_path: Path) -> None:
    done = warm_whet("compare", "nothing.py")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: no such recipe file")
    with pytest.raises(UsageError, match="no trainable parameters"):
        compare_devices(model_spec(nn.Tanh(), (torch.randn(2, 2),)), devices=["cpu"])
    uneven = model_spec(nn.Linear(2, 2), (torch.ones(2, 2), torch.ones(3)), lambda model, x, _: model(x).sum())
    with pytest.raises(UsageError, match="cannot be resized"):
        compare_devices(uneven, devices=["cpu"], size=1)


def test_only_reproducers_are_overwritten(tmp_path: Path) -> None:
    ours = tmp_path / "ours.py"
    ours.write_text(f'"""{MARKER}"""\n')
    result = compare_devices(model_spec(nn.Linear(2, 2), (torch.ones(3, 2),)), devices=["cpu"], steps=1, out=ours)
    assert result.agrees
    assert ours.read_text() == f'"""{MARKER}"""\n', "nothing is written where nothing is wrong"


def test_infinities_are_valid_json() -> None:
    row = ParityRow(what="loss", error=math.inf, bound=1.0)
    assert json.loads(json.dumps(row.as_json(), allow_nan=False))["error"] == "inf"
