"""whet's own kernels compute what torch's formulas do: on a real CUDA GPU, and interpreted where triton is there."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from whet.device.open import _WHY_NOT
from whet.device.own.attention import turned_attention
from whet.device.own.gate import gate
from whet.device.own.wanted import own_attention
from whet.recipes.recursive.layers import Look, PostNormBlock, Rotation, rotate, rotation

WHY_NOT = _WHY_NOT["cuda"]()
on_gpu = pytest.mark.skipif(WHY_NOT is not None, reason=f"no cuda: {WHY_NOT}")
SHAPES = [(97, 8, 64), (17, 3, 32), (128, 2, 128), (1, 1, 64)]


def by_torch(mixture: Tensor, turns: Rotation, num_heads: int) -> Tensor:
    queries, keys, values = mixture.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    found = functional.scaled_dot_product_attention(rotate(queries, turns), rotate(keys, turns), values)
    return found.transpose(1, 2).flatten(2)


def by_formula(mixture: Tensor) -> Tensor:
    gates, up = mixture.chunk(2, dim=-1)
    return functional.silu(gates) * up


def errors(ours, theirs, mixture: Tensor) -> tuple[float, float]:
    """How far results and gradients are from float64's, in its largest numbers."""
    wide = mixture.detach().double().requires_grad_()
    near = mixture.detach().clone().requires_grad_()
    expected, found = theirs(wide), ours(near)
    slopes = torch.randn_like(found)
    expected.backward(slopes.double())
    found.backward(slopes)
    assert wide.grad is not None
    assert near.grad is not None
    return (
        float((found - expected).detach().abs().max() / expected.detach().abs().max()),
        float((near.grad - wide.grad).abs().max() / wide.grad.abs().max()),
    )


def check(device: str, dtype: torch.dtype, *, rows: int, bound: float, shapes=SHAPES) -> None:
    torch.manual_seed(0)
    for places, heads, size in shapes:
        turns = tuple(table.to(device) for table in rotation(torch.arange(places), size))
        mixture = torch.randn(rows, places, 3 * heads * size, device=device).to(dtype)
        found = errors(
            lambda x, h=heads, t=turns: turned_attention(x, *t, h),
            lambda x, h=heads, t=turns: by_torch(x, t, h),
            mixture,
        )
        assert max(found) <= bound, (places, heads, size, found)
    assert max(errors(gate, by_formula, torch.randn(rows, 5, 2 * 700, device=device).to(dtype))) <= bound


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_and_gradients_are_torchs(dtype: torch.dtype) -> None:
    check("cuda", dtype, rows=600, bound=2e-2)


@on_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns of torch's own
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_block_computes_the_same_with_them(is_compiled: bool) -> None:
    torch.manual_seed(0)
    block = PostNormBlock(128, num_heads=2, expansion=4).cuda()
    look = Look(rotation=tuple(table.cuda() for table in rotation(torch.arange(20), 64)))
    call = torch.compile(block) if is_compiled else block
    x = torch.randn(6, 20, 128, device="cuda")

    def run() -> list[Tensor]:
        block.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = call(x, look)
        found.float().square().sum().backward()
        return [found.float(), *(p.grad for p in block.parameters())]

    plain = run()
    with own_attention():
        own = run()
    for one, other in zip(plain, own, strict=True):
        assert torch.linalg.norm(one - other) <= 2e-2 * torch.linalg.norm(one)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_on_the_cpu_they_compute_the_same() -> None:
    call = "a._MANY = 1; t.check('cpu', torch.float32, rows=2, bound=1e-5, shapes=[(17, 3, 32)])"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", f"import test_own_kernels as t, torch, whet.device.own.attention as a; {call}"]
    done = subprocess.run(words, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
