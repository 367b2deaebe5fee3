"""Compiled code for one attention kernel is not reused for another one."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from whet.device.open import open_device
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.plan.workload import Workload
from whet.step.apply_plan import apply_kernels
from whet.step.compilation import CompiledCalls

pytestmark = pytest.mark.torch


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return scaled_dot_product_attention(heads, heads, heads)


def test_each_attention_kernel_has_its_own_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, tags = [], []

    def backend(graph: torch.fx.GraphModule, _inputs: object):
        tags.append(torch.compiler.config.cache_key_tag)
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(Attends, "compile", lambda self, **options: _compile(self, **options))
    workload = Workload(recipe="any", num_parameters=72, global_batch_size=2, layers=("sdpa",))
    model, device, x = Attends(), open_device("cpu").device, torch.randn(2, 3, 8)
    plans = [
        make_plan(load_machine("linux-2core"), workload, overrides={"compile": "on", "attention": attention})
        for attention in ("torch", "flash", "math")
    ]
    calls = [CompiledCalls(model, plan) for plan in plans]
    for _ in range(2):
        for plan, compiled in zip(plans, calls, strict=True):
            with apply_kernels(plan, model, device), compiled.in_use():
                model(x)
    assert len(graphs) == 3
    assert tags == ["", "attention=flash", "attention=math"]
    assert torch.compiler.config.cache_key_tag == ""


def _compile(module: nn.Module, **options: object) -> None:
    module._compiled_call_impl = torch.compile(module._call_impl, **options)
