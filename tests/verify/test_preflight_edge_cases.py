"""`whet check` with unusual models: shared, endless, printing, lazy, nested."""

import json
from pathlib import Path

import pytest
import torch

from paths import Run
from whet.api.verify import check
from whet.base.errors import UsageError
from whet.cli.check import render_sarif
from whet.verify.preflight.check import PreflightResult
from whet.verify.preflight.findings import PreflightFinding, SourceLocation

pytestmark = pytest.mark.torch


def test_shared_model_is_not_changed() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.LSTM(4, 4)).eval()
    x = torch.randn(8, 4)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for _ in range(2):
        result = check(lambda: (net, (x,)), device="mps")
        assert result.is_fake
        assert result.why_no_fits is None
    assert not any(module.training for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


class _Waits(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        while y.abs().max().item() > 0.1:
            y = y / 2
        return y


@pytest.mark.slow
def test_endless_loop_over_values_ends() -> None:
    result = check(lambda: (_Waits(4, 4), (torch.randn(2, 4),)), device="mps")
    assert not result.is_fake
    assert {finding.id for finding in result.findings} == {"wait-for-device"}


def test_nested_inputs_keep_strings_and_numbers() -> None:
    class Nested(torch.nn.Linear):
        def forward(self, given: dict[str, object], how: str, scale: float) -> torch.Tensor:  # type: ignore[override]
            assert (how, scale) == ("sum", 2.0)
            [x] = given["x"]  # type: ignore[misc]
            return super().forward(x) * scale

    result = check(lambda: (Nested(4, 4), ({"x": [torch.randn(2, 4).double()]}, "sum", 2.0)), device="mps")
    assert any("the input input0['x'][0] is float64" in finding.what for finding in result.findings)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ((torch.nn.ReLU(), (torch.randn(2, 2),)), "no trainable parameters"),
        ((torch.nn.LazyLinear(2), (torch.randn(2, 2),)), "lazy layers"),
        ((torch.nn.Linear(2, 2), (torch.randn(0, 2),)), "no sample"),
        ((torch.nn.Linear(2, 2), (torch.randn(2, 2),), 5), "loss is not callable"),
    ],
)
def test_untrainable_models_are_errors(made: tuple[object, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(lambda: made)


def test_batch_norm_with_one_sample_raises() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        check(lambda: (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), (torch.randn(1, 2),)))


def test_complex_weights_are_traced() -> None:
    class Complex(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex64) @ self.weight).abs()

    assert not check(lambda: (Complex(), (torch.randn(2, 2),)), device="cuda").findings


def test_labels_are_passed_to_the_loss_only() -> None:
    def made() -> tuple[object, ...]:
        net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
        tokens, labels = torch.randint(0, 9, (2, 2, 8))
        loss = torch.nn.functional.cross_entropy
        return net, (tokens, labels), lambda net, x, y: loss(net(x).flatten(0, 1), y.flatten())

    assert not check(made, device="cpu", is_causal=True).findings


_LOUD = """
import sys
import torch

class Loud(torch.nn.Linear):
    def forward(self, x):
        print("not JSON")
        return super().forward(x)

def model():
    return Loud(2, 2).double(), (torch.randn(2, 2).double(),)

class Ends(torch.nn.Linear):
    def forward(self, x):
        sys.exit(0)

def ends():
    return Ends(2, 2), (torch.randn(2, 2),)
"""


def test_prints_exits_and_odd_names_are_handled(warm_whet: Run, tmp_path: Path) -> None:
    file = tmp_path / "my model, 5% #1.py"
    file.write_text(_LOUD)
    assert json.loads(warm_whet("check", str(file), "--json").stdout)["findings"]
    ended = warm_whet("check", f"{file}:ends")
    assert ended.returncode == 1
    assert "SystemExit: 0 (my model, 5% #1.py:" in ended.stderr
    place = SourceLocation(file="my model, 5% #1.py", line=3)
    finding = PreflightFinding(id="x", severity="error", what="w", try_="t", place=place)
    sarif = render_sarif(PreflightResult(name="s", device="mps", torch="2", findings=(finding,)))
    location = sarif["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert location["artifactLocation"]["uri"] == "my%20model%2C%205%25%20%231.py"


_NOISY = """
import torch

def compiled():
    return torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())), (torch.randn(2, 2),)

def wrong():
    return torch.nn.Linear(3, 2), (torch.randn(2, 2),)
"""


@pytest.mark.slow
def test_torch_logs_of_a_trace_are_hidden(warm_whet: Run, tmp_path: Path) -> None:
    file = tmp_path / "noisy.py"
    file.write_text(_NOISY)
    compiled = warm_whet("check", f"{file}:compiled")
    assert compiled.returncode == 0, compiled.stderr
    assert compiled.stderr == ""
    wrong = warm_whet("check", f"{file}:wrong")
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[0] == "error: a library raised an exception"
    assert len(wrong.stderr.splitlines()) == 3


def test_scripted_models_and_nested_tensors_are_traced() -> None:
    def nested() -> tuple[object, ...]:
        ragged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
        return torch.nn.Linear(4, 4), (ragged,), lambda net, x: net(x).values().sum()

    assert not check(nested, device="cuda").findings
    assert not check(lambda: (torch.jit.script(torch.nn.Linear(2, 2)), (torch.randn(2, 2),)), device="cuda").findings
