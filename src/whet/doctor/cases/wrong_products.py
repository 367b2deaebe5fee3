"""Known silent bugs of matrix products, convolutions and attention."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

from whet.doctor.case import Place
from whet.doctor.cases.hazard import Hazards
from whet.doctor.cases.trying import draw, forward_and_backward
from whet.verify.agreement import HALF_CLOSE

_known = Hazards()
PRODUCTS = _known.cases

_CPU = torch.device("cpu")
_HALVES = (torch.float16, torch.bfloat16)


def _both(place: Place, compute: Any, *inputs: Tensor) -> tuple[Any, Any]:
    """Outputs and gradients, here and on the CPU."""
    return forward_and_backward(compute, inputs, place.device.place), forward_and_backward(compute, inputs, _CPU)


def _in_halves(place: Place, compute: Any, *inputs: Tensor) -> tuple[list[Any], list[Any]]:
    """Outputs in both half precisions without gradients, and what float32 gives on the CPU for the same inputs."""
    found, expected = [], []
    with torch.no_grad():
        for dtype in _HALVES:
            rounded = [t.to(dtype) for t in inputs]
            found.append(compute(*[place.put(t) for t in rounded]).float())
            expected.append(compute(*[t.float() for t in rounded]))
    return found, expected


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return f.scaled_dot_product_attention(q, k, v, **options)


@_known.add(177116, "gradient of a linear layer over 40,000 rows", is_quick=True)
def _many_rows(place: Place) -> tuple[Any, Any]:
    return _both(place, f.linear, draw(40_000, 48), draw(24, 48, seed=1), draw(24, seed=2))


@_known.add(189495, "linear with bias and more than 65,536 matrices")
def _many_matrices(place: Place) -> tuple[Any, Any]:
    inputs = draw(65_541, 2, 16), draw(8, 16, seed=1), draw(8, seed=2)
    return f.linear(*[place.put(t) for t in inputs]), f.linear(*inputs)


@_known.add(188438, "bias of a linear layer for a single vector")
def _single_vector(place: Place) -> tuple[Any, Any]:
    return _both(place, f.linear, draw(16), draw(8, 16, seed=1), draw(8, seed=2))


@_known.add(180776, "linear without bias in half precision, the same twice", tolerance=HALF_CLOSE[torch.bfloat16])
def _half_linear(place: Place) -> tuple[Any, Any]:
    inputs = draw(4, 96, 128), draw(64, 128, seed=1) / 11
    found, expected = _in_halves(place, f.linear, *inputs)
    again = [_in_halves(place, f.linear, *inputs)[0] for _ in range(4)]
    is_same = torch.tensor(
        [torch.equal(a.cpu(), b.cpu()) for other in again for a, b in zip(other, found, strict=True)]
    )
    return (found, is_same), (expected, torch.ones(8, dtype=torch.bool))


@_known.add(197796, "linear with a transposed weight in bf16, three dimensions", tolerance=HALF_CLOSE[torch.bfloat16])
def _transposed_weight(place: Place) -> tuple[Any, Any]:
    return _in_halves(place, lambda x, w: f.linear(x, w.t()), draw(2, 9, 32), draw(32, 16, seed=1) / 6)


@_known.add(161640, "linear on non-contiguous tensors")
def _strided_linear(place: Place) -> tuple[Any, Any]:
    return _both(place, lambda x, w: f.linear(x.transpose(0, 1), w[:, ::2]), draw(5, 7, 16), draw(6, 32, seed=1))


@_known.add(180201, "product with an expanded input (stride 0)")
def _expanded(place: Place) -> tuple[Any, Any]:
    return _both(place, lambda a, b: a.expand(8, 16) @ b, draw(1, 16), draw(16, 5, seed=1))


@_known.add(178056, "half-precision product with a vector of odd length", tolerance=HALF_CLOSE[torch.bfloat16])
def _odd_vector(place: Place) -> tuple[Any, Any]:
    return _in_halves(place, torch.matmul, draw(1, 1, 513), draw(1, 513, 67, seed=1) / 20)


@_known.add(192212, "convolution with non-contiguous weights", is_quick=True)
def _strided_kernel(place: Place) -> tuple[Any, Any]:
    return _both(place, lambda x, w: f.conv2d(x, w.permute(3, 2, 0, 1)), draw(2, 8, 9, 9), draw(3, 3, 8, 6, seed=1))


@_known.add(188335, "convolution with a kernel of 257")
def _long_kernel(place: Place) -> tuple[Any, Any]:
    return _both(place, f.conv2d, draw(1, 2, 270, 3), draw(2, 2, 257, 1, seed=1))


@_known.add(181133, "attention with permuted queries, keys and values")
def _permuted(place: Place) -> tuple[Any, Any]:
    heads = [draw(3, 12, 4, 16, seed=seed) for seed in range(3)]

    def compute(*qkv: Tensor) -> Tensor:
        return _attention(*[t.permute(0, 2, 1, 3) for t in qkv])

    with torch.no_grad():
        without_gradient = compute(*[place.put(t) for t in heads]), compute(*heads)
    found, expected = _both(place, compute, *heads)
    return (without_gradient[0], found), (without_gradient[1], expected)


@_known.add(195910, "causal attention in half precision sees no future", tolerance=1e-3, is_quick=True)
def _causal(place: Place) -> tuple[Any, Any]:
    q, k, v = (draw(1, 4, 64, 64, seed=seed) for seed in range(3))
    later_k, later_v = k.clone(), v.clone()
    # An odd place: a mask that is applied once for a block of rows leaks only inside the block.
    seen = 29
    later_k[:, :, seen:], later_v[:, :, seen:] = 5.0, -3.0
    found, expected = [], []
    with torch.no_grad():
        for dtype in (*_HALVES, torch.float32):
            one, other = (
                _attention(*[place.put(t.to(dtype)) for t in qkv], is_causal=True)[:, :, :seen].float()
                for qkv in ((q, k, v), (q, later_k, later_v))
            )
            found.append(other)
            expected.append(one)
    return found, expected


@_known.add(174861, "attention with grouped queries in half precision", tolerance=HALF_CLOSE[torch.bfloat16])
def _grouped(place: Place) -> tuple[Any, Any]:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v, enable_gqa=True)

    return _in_halves(place, compute, draw(2, 8, 1, 64), draw(2, 2, 1_100, 64, seed=1), draw(2, 2, 1_100, 64, seed=2))


@_known.add(160841, "attention in fp16 whose scores exceed fp16 before scaling", tolerance=2e-2)
def _large_scores(place: Place) -> tuple[Any, Any]:
    q, k, v = (draw(1, 2, 9, 64, seed=seed).half() for seed in range(3))
    q, k = torch.full_like(q, 40.0), torch.full_like(k, 40.0)
    with torch.no_grad():
        found = _attention(*[place.put(t) for t in (q, k, v)]).float()
    return found, v.float().mean(2, keepdim=True).expand_as(v)
