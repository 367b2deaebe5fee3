"""Checks for known silent bugs on devices, each reduced to a few operators.

The number of a check is the issue or pull request in pytorch/pytorch that describes the bug. Most checks were written
from these descriptions alone, without a Mac to reproduce the bugs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from whet.base.errors import describe_error
from whet.doctor.check import Check, CheckFinding, DeviceUnderTest, not_applicable
from whet.doctor.checks.compare import compare_results, draw, forward_and_backward
from whet.verify.tolerance import FP32_TOLERANCE, HALF_TOLERANCES

# Returns the result on the device and the correct result.
Attempt = Callable[[DeviceUnderTest], tuple[Any, Any]]

CHECKS: list[Check] = []
_CPU = torch.device("cpu")


def _hazard(
    issue: int, what: str, *, tolerance: float = FP32_TOLERANCE, may_raise: bool = False, is_quick: bool = False
) -> Callable[[Attempt], Attempt]:
    """Return a decorator that adds a function to CHECKS. Set `may_raise` if a RuntimeError is an acceptable result."""

    def add(attempt: Attempt) -> Attempt:
        run = partial(_compare_hazard, attempt, tolerance, may_raise)
        CHECKS.append(Check(name=f"#{issue} {what}", run=run, issue=issue, is_quick=is_quick))
        return attempt

    return add


def _compare_hazard(attempt: Attempt, tolerance: float, may_raise: bool, target: DeviceUnderTest) -> CheckFinding:
    try:
        result, expected = attempt(target)
    except RuntimeError as error:
        if not may_raise:
            raise
        return not_applicable(f"refused here, not wrong: {describe_error(error)}", outcome="refused")
    return compare_results(result, expected, tolerance=tolerance, right="right here", wrong="wrong here")


_HALVES = (torch.float16, torch.bfloat16)


def _both(target: DeviceUnderTest, compute: Any, *inputs: Tensor) -> tuple[Any, Any]:
    """Run a function on the device and on the CPU. Return the outputs and gradients of both."""
    on_device = forward_and_backward(compute, inputs, target.torch_device)
    return on_device, forward_and_backward(compute, inputs, _CPU)


def _in_halves(target: DeviceUnderTest, compute: Any, *inputs: Tensor) -> tuple[list[Any], list[Any]]:
    """Return the outputs in both half precisions, and the float32 outputs on the CPU for the same rounded inputs."""
    result, expected = [], []
    with torch.no_grad():
        for dtype in _HALVES:
            rounded = [t.to(dtype) for t in inputs]
            result.append(compute(*[target.put(t) for t in rounded]).float())
            expected.append(compute(*[t.float() for t in rounded]))
    return result, expected


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return f.scaled_dot_product_attention(q, k, v, **options)


@_hazard(177116, "gradient of a linear layer over 40,000 rows", is_quick=True)
def _many_rows(target: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(target, f.linear, draw(40_000, 48), draw(24, 48, seed=1), draw(24, seed=2))


@_hazard(189495, "linear with bias and more than 65,536 matrices")
def _many_matrices(target: DeviceUnderTest) -> tuple[Any, Any]:
    inputs = draw(65_541, 2, 16), draw(8, 16, seed=1), draw(8, seed=2)
    return f.linear(*[target.put(t) for t in inputs]), f.linear(*inputs)


@_hazard(188438, "bias of a linear layer for a single vector")
def _single_vector(target: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(target, f.linear, draw(16), draw(8, 16, seed=1), draw(8, seed=2))


@_hazard(180776, "linear without bias in half precision, the same twice", tolerance=HALF_TOLERANCES[torch.bfloat16])
def _half_linear(target: DeviceUnderTest) -> tuple[Any, Any]:
    inputs = draw(4, 96, 128), draw(64, 128, seed=1) / 11
    result, expected = _in_halves(target, f.linear, *inputs)
    again = [_in_halves(target, f.linear, *inputs)[0] for _ in range(4)]
    is_same = torch.tensor(
        [torch.equal(a.cpu(), b.cpu()) for other in again for a, b in zip(other, result, strict=True)]
    )
    return (result, is_same), (expected, torch.ones(8, dtype=torch.bool))


@_hazard(197796, "linear with a transposed weight in bf16, three dimensions", tolerance=HALF_TOLERANCES[torch.bfloat16])
def _transposed_weight(target: DeviceUnderTest) -> tuple[Any, Any]:
    return _in_halves(target, lambda x, w: f.linear(x, w.t()), draw(2, 9, 32), draw(32, 16, seed=1) / 6)


@_hazard(161640, "linear on non-contiguous tensors")
def _strided_linear(target: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(target, lambda x, w: f.linear(x.transpose(0, 1), w[:, ::2]), draw(5, 7, 16), draw(6, 32, seed=1))


@_hazard(180201, "product with an expanded input (stride 0)")
def _expanded(target: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(target, lambda a, b: a.expand(8, 16) @ b, draw(1, 16), draw(16, 5, seed=1))


@_hazard(178056, "half-precision product with a vector of odd length", tolerance=HALF_TOLERANCES[torch.bfloat16])
def _odd_vector(target: DeviceUnderTest) -> tuple[Any, Any]:
    return _in_halves(target, torch.matmul, draw(1, 1, 513), draw(1, 513, 67, seed=1) / 20)


@_hazard(192212, "convolution with non-contiguous weights", is_quick=True)
def _strided_kernel(target: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(target, lambda x, w: f.conv2d(x, w.permute(3, 2, 0, 1)), draw(2, 8, 9, 9), draw(3, 3, 8, 6, seed=1))


@_hazard(188335, "convolution with a kernel of 257")
def _long_kernel(target: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(target, f.conv2d, draw(1, 2, 270, 3), draw(2, 2, 257, 1, seed=1))


@_hazard(181133, "attention with permuted queries, keys and values")
def _permuted(target: DeviceUnderTest) -> tuple[Any, Any]:
    heads = [draw(3, 12, 4, 16, seed=seed) for seed in range(3)]

    def compute(*qkv: Tensor) -> Tensor:
        return _attention(*[t.permute(0, 2, 1, 3) for t in qkv])

    with torch.no_grad():
        without_gradient = compute(*[target.put(t) for t in heads]), compute(*heads)
    result, expected = _both(target, compute, *heads)
    return (without_gradient[0], result), (without_gradient[1], expected)


@_hazard(195910, "causal attention in half precision sees no future", tolerance=1e-3, is_quick=True)
def _causal(target: DeviceUnderTest) -> tuple[Any, Any]:
    q, k, v = (draw(1, 4, 64, 64, seed=seed) for seed in range(3))
    later_k, later_v = k.clone(), v.clone()
    # Use an odd position, because a mask that is applied once per block of rows leaks only within a block.
    seen = 29
    later_k[:, :, seen:], later_v[:, :, seen:] = 5.0, -3.0
    result, expected = [], []
    with torch.no_grad():
        for dtype in (*_HALVES, torch.float32):
            one, other = (
                _attention(*[target.put(t.to(dtype)) for t in qkv], is_causal=True)[:, :, :seen].float()
                for qkv in ((q, k, v), (q, later_k, later_v))
            )
            result.append(other)
            expected.append(one)
    return result, expected


@_hazard(174861, "attention with grouped queries in half precision", tolerance=HALF_TOLERANCES[torch.bfloat16])
def _grouped(target: DeviceUnderTest) -> tuple[Any, Any]:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v, enable_gqa=True)

    return _in_halves(target, compute, draw(2, 8, 1, 64), draw(2, 2, 1_100, 64, seed=1), draw(2, 2, 1_100, 64, seed=2))


@_hazard(160841, "attention in fp16 whose scores exceed fp16 before scaling", tolerance=2e-2)
def _large_scores(target: DeviceUnderTest) -> tuple[Any, Any]:
    q, k, v = (draw(1, 2, 9, 64, seed=seed).half() for seed in range(3))
    q, k = torch.full_like(q, 40.0), torch.full_like(k, 40.0)
    with torch.no_grad():
        result = _attention(*[target.put(t) for t in (q, k, v)]).float()
    return result, v.float().mean(2, keepdim=True).expand_as(v)


# --- Copies, views and strides ----------------------------------------------------------------------------------------


@_hazard(189563, "a copy to the CPU in another dtype does not change its source", tolerance=1e-3, is_quick=True)
def _converting_copy(target: DeviceUnderTest) -> tuple[Any, Any]:
    whole = draw(4_100)
    source = target.put(whole)
    # Start at an offset: only then does the bug use the source as scratch memory.
    copied = source[100:].to("cpu", torch.float16)
    counted = source[100:].to("cpu", torch.int32)
    return (copied.float(), counted, source), (whole[100:], whole[100:].to(torch.int32), whole)


@_hazard(189961, "a copy between views with gaps")
def _gaps(target: DeviceUnderTest) -> tuple[Any, Any]:
    there = target.put(torch.arange(20.0))[::2]
    parent = torch.zeros(20)
    parent[::2].copy_(there)
    target.device.sync()
    expected = torch.arange(20.0)
    expected[1::2] = 0
    return parent, expected


@_hazard(187117, "a number from the middle of a CPU tensor", is_quick=True)
def _number_from_a_view(target: DeviceUnderTest) -> tuple[Any, Any]:
    x, numbers = draw(6), torch.arange(1.0, 9.0)
    there = target.put(x)
    return (there * numbers[4], there + numbers[5], there / numbers[6]), (x * 5, x + 6, x / 7)


@_hazard(139550, "copies to the device that do not wait for their source")
def _copies_without_waiting(target: DeviceUnderTest) -> tuple[Any, Any]:
    moved = []
    for number in range(40):
        source = torch.full((50_000,), float(number))
        moved.append(source.to(target.torch_device, non_blocking=True))
        del source
        # Allocate the memory that was just freed, and overwrite it.
        torch.full((50_000,), -1.0)
    target.device.sync()
    return torch.stack([m.float().mean() for m in moved]), torch.arange(40.0)


@_hazard(118115, "addcdiv_ and addcmul_ on transposed weights (Adam)", is_quick=True)
def _transposed_update(target: DeviceUnderTest) -> tuple[Any, Any]:
    def update(where: torch.device) -> Tensor:
        weight = draw(8, 12).to(where).t()
        a, b = draw(12, 8, seed=1).to(where), draw(12, 8, seed=2).abs().to(where) + 1
        weight.addcdiv_(a, b, value=-0.5).addcmul_(a, b, value=0.1)
        return weight

    return update(target.torch_device), update(_CPU)


@_hazard(100764, "results written into a part of a tensor")
def _parts(target: DeviceUnderTest) -> tuple[Any, Any]:
    def write(where: torch.device) -> Tensor:
        whole = torch.zeros(6, 10, device=where)
        x = draw(6, 5).to(where)
        torch.exp(x, out=whole[:, ::2])
        whole[2:4, 1::2].add_(x[2:4])
        whole[5].mul_(x[5].repeat(2))
        return whole

    return write(target.torch_device), write(_CPU)


@_hazard(176159, "masked_fill_ on a transposed tensor")
def _masked(target: DeviceUnderTest) -> tuple[Any, Any]:
    def fill(where: torch.device) -> Tensor:
        x = draw(7, 5).to(where)
        x.t().masked_fill_((draw(5, 7, seed=1) > 0).to(where), 3.0)
        return x

    return fill(target.torch_device), fill(_CPU)


@_hazard(98212, "activations of non-contiguous tensors")
def _strided_activations(target: DeviceUnderTest) -> tuple[Any, Any]:
    def compute(x: Tensor) -> tuple[Tensor, ...]:
        part = x.t()[:, ::2]
        return f.silu(part), f.gelu(part), f.leaky_relu(part), f.mish(part), f.softmax(part, -1)

    return _both(target, compute, draw(8, 6))


@_hazard(165257, "random numbers written into a transposed tensor", tolerance=0.05)
def _strided_draws(target: DeviceUnderTest) -> tuple[Any, Any]:
    torch.manual_seed(0)
    normal, uniform = (torch.full((300, 200), 9.0, device=target.torch_device) for _ in range(2))
    normal.t().normal_()
    uniform[:, ::2].uniform_()
    drawn = uniform[:, ::2]
    result = [normal.std(), (normal == 9.0).float().mean(), drawn.mean(), drawn.std(), uniform[:, 1::2].mean()]
    expected = [1.0, 0.0, 0.5, 12**-0.5, 9.0]
    return [x.reshape(1) + 1 for x in result], [torch.tensor([x + 1]) for x in expected]


@_hazard(141457, "multinomial from a non-contiguous tensor")
def _strided_multinomial(target: DeviceUnderTest) -> tuple[Any, Any]:
    # Each row has exactly one possible outcome, so the draw is deterministic.
    certain = torch.eye(6)[torch.tensor([3, 1, 4, 0, 5, 2])]
    drawn = target.put(certain.t().contiguous()).t().multinomial(1)
    return drawn, certain.argmax(1, keepdim=True)


@_hazard(184620, "sorting of bools, largest integers and NaN")
def _sorting(target: DeviceUnderTest) -> tuple[Any, Any]:
    bools, numbers = draw(70) > 0, torch.tensor([5, 2**31 - 1, -7, 2**31 - 1, 0], dtype=torch.int32)
    fractions = torch.tensor([1.0, torch.nan, -2.0, torch.inf, torch.nan])
    result, expected = [], []
    for x in (bools, numbers, fractions):
        values, indices = target.put(x).sort()
        in_range = ((indices >= 0) & (indices < len(x))).all()
        result.append((values.float(), in_range))
        expected.append((x.sort().values.float(), torch.tensor(True)))
    return result, expected


# --- Norms, recurrent layers, pooling and loss scaling ----------------------------------------------------------------


@_hazard(190491, "layer_norm of rows with little variance", is_quick=True)
def _little_variance(target: DeviceUnderTest) -> tuple[Any, Any]:
    rows = torch.tensor([[-9.9e-4, -9.9e-4, 9.9e-4, 9.9e-4], [1e-5, -1e-5, 1e-5, -1e-5]])
    return f.layer_norm(target.put(rows), (4,), eps=1e-12), f.layer_norm(rows.double(), (4,), eps=1e-12)


@_hazard(183825, "gradient of layer_norm with frozen inputs")
def _frozen_input(target: DeviceUnderTest) -> tuple[Any, Any]:
    def gradients(where: torch.device) -> list[Tensor]:
        weight, bias = torch.ones(12, device=where).requires_grad_(), torch.zeros(12, device=where).requires_grad_()
        f.layer_norm(draw(5, 12).to(where), (12,), weight, bias).pow(2).sum().backward()
        assert weight.grad is not None
        assert bias.grad is not None
        return [weight.grad, bias.grad]

    return gradients(target.torch_device), gradients(_CPU)


@_hazard(189617, "rms_norm in half precision", tolerance=2e-2)
def _half_rms(target: DeviceUnderTest) -> tuple[Any, Any]:
    x, weight = draw(9, 256), 1 + draw(256, seed=1) / 10
    result = [
        f.rms_norm(target.put(x.to(d)), (256,), target.put(weight.to(d))).float()
        for d in (torch.float16, torch.bfloat16)
    ]
    return result, [f.rms_norm(x, (256,), weight)] * 2


@_hazard(156555, "gradient of batch_norm")
def _batch_norm(target: DeviceUnderTest) -> tuple[Any, Any]:
    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return f.batch_norm(x.transpose(1, 2), None, None, weight, bias, training=True).tanh()

    return _both(target, compute, draw(6, 20, 3), draw(3, seed=1), draw(3, seed=2))


@_hazard(186278, "gelu and tanh of large numbers")
def _large_numbers(target: DeviceUnderTest) -> tuple[Any, Any]:
    def compute(x: Tensor) -> tuple[Tensor, ...]:
        return f.gelu(x, approximate="tanh"), f.gelu(x), x.tanh()

    return _both(target, compute, torch.tensor([-1e4, -90.0, -12.0, 0.0, 12.0, 90.0, 1e4]))


@_hazard(189659, "adaptive_max_pool2d to a size that does not divide", may_raise=True)
def _uneven_pool(target: DeviceUnderTest) -> tuple[Any, Any]:
    x = draw(1, 2, 10, 7)
    return f.adaptive_max_pool2d(target.put(x), (4, 3)), f.adaptive_max_pool2d(x, (4, 3))


@_hazard(190056, "dropout inside an LSTM, forward and backward", tolerance=0.05)
def _lstm_dropout(target: DeviceUnderTest) -> tuple[Any, Any]:
    """Compare the gradient with finite differences for the same mask, and check that dropout changes the result."""
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 16, num_layers=2, dropout=0.8).to(target.torch_device)
    x, direction = target.put(draw(5, 3, 4)), target.put(draw(5, 3, 4, seed=1))

    def loss(at: Tensor) -> Tensor:
        torch.manual_seed(1)
        return lstm(at)[0].sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    slope = (loss(x + 0.01 * direction) - loss(x - 0.01 * direction)) / 0.02
    dropped = loss(x)
    lstm.eval()
    has_effect = (loss(x) - dropped).abs() > 1e-3
    return ((leaf.grad * direction).sum().reshape(1), has_effect), (slope.reshape(1), torch.tensor(True))


@_hazard(186360, "a fused optimizer under a loss scaler: scaled right, and no step on infinity", is_quick=True)
def _scaled_fused(target: DeviceUnderTest) -> tuple[Any, Any]:
    def train(where: torch.device, *, fused: bool) -> list[Tensor]:
        torch.manual_seed(0)
        weight = nn.Parameter(draw(6, 6).to(where))
        optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler(where.type, init_scale=65536.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((weight * weight).mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return [weight]

    return train(target.torch_device, fused=True), train(_CPU, fused=False)


@_hazard(184286, "a loss scaler keeps half-precision gradients", tolerance=2e-2)
def _scaled_half(target: DeviceUnderTest) -> tuple[Any, Any]:
    # On CUDA, use float32, because torch refuses to unscale half-precision gradients there.
    half = torch.float32 if target.device.kind == "cuda" else torch.bfloat16
    weight = nn.Parameter(target.put(draw(40)).to(half))
    scaler = torch.amp.GradScaler(target.torch_device.type, init_scale=1024.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight.float() * 3).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    return weight.grad.float(), torch.full((40,), 3.0)
