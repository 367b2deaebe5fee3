"""Heads over more than 32,768 outputs are computed in pieces where larger products give wrong gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from whet.machine.facts import Machine
from whet.machine.known import load_machine
from whet.plan.plan import Plan, make_plan
from whet.plan.warnings import ROW_LIMIT
from whet.plan.workload import Workload
from whet.step.model_contexts import large_heads, split_large_heads

pytestmark = pytest.mark.torch

NUM_WORDS = 70_000
WORKLOAD = Workload(recipe="any", num_parameters=1_000, global_batch_size=4, max_length=8, activation_bytes=1_000)


def planned(name: str = "m2-air-8gb", torch_version: str = "2.13.0") -> Plan:
    machine = load_machine(name)
    facts = machine.torch.model_copy(update={"version": torch_version})
    return make_plan(Machine(**{**dict(machine), "torch": facts}), WORKLOAD)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, NUM_WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class LongestSum(TorchDispatchMode):
    """Records the largest number of elements that a matrix product sums over."""

    longest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default):
            self.longest = max(self.longest, args[-2].shape[-1])
        return func(*args, **(kwargs or {}))


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
    recorder = LongestSum()
    with recorder:
        out = model(x)
        nn.functional.cross_entropy(out, torch.arange(len(x))).backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, recorder.longest


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_head_in_pieces_has_the_same_gradients(has_bias: bool) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    model.head.bias = nn.Parameter(torch.randn(NUM_WORDS)) if has_bias else None
    x = torch.randn(6, 8)
    whole_out, whole, longest = gradients(copy.deepcopy(model), x)
    assert longest == NUM_WORDS, "the fault is there without the pieces"
    with split_large_heads(planned(), model):
        out, split, longest = gradients(model, x)
    assert longest <= ROW_LIMIT
    torch.testing.assert_close(out, whole_out)
    torch.testing.assert_close(split, whole)
    assert "forward" not in model.head.__dict__
    assert list(model.state_dict()) == list(copy.deepcopy(model).state_dict())


def test_only_affected_machines_and_layers_are_split() -> None:
    model = LanguageModel()
    assert list(large_heads(planned(), model)) == ["head"]
    for plan in (planned(torch_version="2.14.0"), planned("m3-max-64gb"), planned("h200")):
        assert large_heads(plan, model) == {}

    class OwnHead(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    model.head = OwnHead(8, NUM_WORDS)
    assert large_heads(planned(), model) == {}


def test_without_gradients_the_head_stays_whole() -> None:
    model, recorder = LanguageModel(), []
    with split_large_heads(planned(), model), torch.no_grad():
        model.head.register_forward_hook(lambda *_: recorder.append(1))
        assert model(torch.randn(2, 8)).shape == (2, NUM_WORDS)
    assert recorder == [1], "hooks run once"
