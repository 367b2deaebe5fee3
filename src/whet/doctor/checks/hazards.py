"""Checks for known silent bugs of devices, by their issue number at pytorch/pytorch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from whet.doctor.check import Check, CheckFinding, DeviceUnderTest, first_line, not_applicable
from whet.doctor.checks.compare import compare_results, draw, forward_and_backward
from whet.verify.tolerance import FP32_TOLERANCE, HALF_TOLERANCES

Try = Callable[[DeviceUnderTest], tuple[Any, Any]]


class HazardTable:
    """Collects the hazards of one file."""

    def __init__(self) -> None:
        self.cases: list[Check] = []

    def add(
        self,
        issue: int,
        what: str,
        *,
        tolerance: float = FP32_TOLERANCE,
        may_refuse: bool = False,
        is_quick: bool = False,
    ) -> Callable[[Try], Try]:
        """Names what is tried; `may_refuse` where an error is an honest answer of the device."""

        def note(attempt: Try) -> Try:
            run = partial(_compare_hazard, attempt, tolerance, may_refuse)
            self.cases.append(Check(name=f"#{issue} {what}", run=run, issue=issue, is_quick=is_quick))
            return attempt

        return note


def _compare_hazard(attempt: Try, tolerance: float, may_refuse: bool, place: DeviceUnderTest) -> CheckFinding:
    try:
        found, expected = attempt(place)
    except RuntimeError as error:
        if not may_refuse:
            raise
        return not_applicable(f"refused here, not wrong: {first_line(error)}", outcome="refused")
    return compare_results(found, expected, tolerance=tolerance, right="right here", wrong="wrong here")


_memory = HazardTable()
MEMORY = _memory.cases
_CPU = torch.device("cpu")


@_memory.add(189563, "a copy to the CPU in another type leaves its source alone", tolerance=1e-3, is_quick=True)
def _converting_copy(place: DeviceUnderTest) -> tuple[Any, Any]:
    whole = draw(4_100)
    source = place.put(whole)
    # From an offset: that is where the source was used as scratch memory.
    copied = source[100:].to("cpu", torch.float16)
    counted = source[100:].to("cpu", torch.int32)
    return (copied.float(), counted, source), (whole[100:], whole[100:].to(torch.int32), whole)


@_memory.add(189961, "a copy between views with gaps")
def _gaps(place: DeviceUnderTest) -> tuple[Any, Any]:
    there = place.put(torch.arange(20.0))[::2]
    parent = torch.zeros(20)
    parent[::2].copy_(there)
    place.device.sync()
    expected = torch.arange(20.0)
    expected[1::2] = 0
    return parent, expected


@_memory.add(187117, "a number from the middle of a CPU tensor", is_quick=True)
def _number_from_a_view(place: DeviceUnderTest) -> tuple[Any, Any]:
    x, numbers = draw(6), torch.arange(1.0, 9.0)
    there = place.put(x)
    return (there * numbers[4], there + numbers[5], there / numbers[6]), (x * 5, x + 6, x / 7)


@_memory.add(139550, "copies to the device that do not wait for their source")
def _copies_without_waiting(place: DeviceUnderTest) -> tuple[Any, Any]:
    moved = []
    for number in range(40):
        source = torch.full((50_000,), float(number))
        moved.append(source.to(place.device.torch_device, non_blocking=True))
        del source
        # Takes the memory that was just given back, and writes over it.
        torch.full((50_000,), -1.0)
    place.device.sync()
    return torch.stack([m.float().mean() for m in moved]), torch.arange(40.0)


@_memory.add(118115, "addcdiv_ and addcmul_ on transposed weights (Adam)", is_quick=True)
def _transposed_update(place: DeviceUnderTest) -> tuple[Any, Any]:
    def update(where: torch.device) -> Tensor:
        weight = draw(8, 12).to(where).t()
        a, b = draw(12, 8, seed=1).to(where), draw(12, 8, seed=2).abs().to(where) + 1
        weight.addcdiv_(a, b, value=-0.5).addcmul_(a, b, value=0.1)
        return weight

    return update(place.device.torch_device), update(_CPU)


@_memory.add(100764, "results written into a part of a tensor")
def _parts(place: DeviceUnderTest) -> tuple[Any, Any]:
    def write(where: torch.device) -> Tensor:
        whole = torch.zeros(6, 10, device=where)
        x = draw(6, 5).to(where)
        torch.exp(x, out=whole[:, ::2])
        whole[2:4, 1::2].add_(x[2:4])
        whole[5].mul_(x[5].repeat(2))
        return whole

    return write(place.device.torch_device), write(_CPU)


@_memory.add(176159, "masked_fill_ on a transposed tensor")
def _masked(place: DeviceUnderTest) -> tuple[Any, Any]:
    def fill(where: torch.device) -> Tensor:
        x = draw(7, 5).to(where)
        x.t().masked_fill_((draw(5, 7, seed=1) > 0).to(where), 3.0)
        return x

    return fill(place.device.torch_device), fill(_CPU)


@_memory.add(98212, "activations of non-contiguous tensors")
def _strided_activations(place: DeviceUnderTest) -> tuple[Any, Any]:
    def compute(x: Tensor) -> tuple[Tensor, ...]:
        part = x.t()[:, ::2]
        return f.silu(part), f.gelu(part), f.leaky_relu(part), f.mish(part), f.softmax(part, -1)

    inputs = (draw(8, 6),)
    return forward_and_backward(compute, inputs, place.device.torch_device), forward_and_backward(compute, inputs, _CPU)


@_memory.add(165257, "random numbers written into a transposed tensor", tolerance=0.05)
def _strided_draws(place: DeviceUnderTest) -> tuple[Any, Any]:
    torch.manual_seed(0)
    normal, uniform = (torch.full((300, 200), 9.0, device=place.device.torch_device) for _ in range(2))
    normal.t().normal_()
    uniform[:, ::2].uniform_()
    drawn = uniform[:, ::2]
    found = [normal.std(), (normal == 9.0).float().mean(), drawn.mean(), drawn.std(), uniform[:, 1::2].mean()]
    expected = [1.0, 0.0, 0.5, 12**-0.5, 9.0]
    return [x.reshape(1) + 1 for x in found], [torch.tensor([x + 1]) for x in expected]


@_memory.add(141457, "multinomial from a non-contiguous tensor")
def _strided_multinomial(place: DeviceUnderTest) -> tuple[Any, Any]:
    # Each row has one possible answer.
    certain = torch.eye(6)[torch.tensor([3, 1, 4, 0, 5, 2])]
    drawn = place.put(certain.t().contiguous()).t().multinomial(1)
    return drawn, certain.argmax(1, keepdim=True)


@_memory.add(184620, "sorting of bools, largest integers and NaN")
def _sorting(place: DeviceUnderTest) -> tuple[Any, Any]:
    bools, numbers = draw(70) > 0, torch.tensor([5, 2**31 - 1, -7, 2**31 - 1, 0], dtype=torch.int32)
    fractions = torch.tensor([1.0, torch.nan, -2.0, torch.inf, torch.nan])
    found, expected = [], []
    for x in (bools, numbers, fractions):
        values, places = place.put(x).sort()
        in_range = ((places >= 0) & (places < len(x))).all()
        found.append((values.float(), in_range))
        expected.append((x.sort().values.float(), torch.tensor(True)))
    return found, expected


_products = HazardTable()
PRODUCTS = _products.cases

_CPU_PRODUCTS = torch.device("cpu")
_HALVES = (torch.float16, torch.bfloat16)


def _both(place: DeviceUnderTest, compute: Any, *inputs: Tensor) -> tuple[Any, Any]:
    """Outputs and gradients, here and on the CPU."""
    return forward_and_backward(compute, inputs, place.device.torch_device), forward_and_backward(
        compute, inputs, _CPU_PRODUCTS
    )


def _in_halves(place: DeviceUnderTest, compute: Any, *inputs: Tensor) -> tuple[list[Any], list[Any]]:
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


@_products.add(177116, "gradient of a linear layer over 40,000 rows", is_quick=True)
def _many_rows(place: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(place, f.linear, draw(40_000, 48), draw(24, 48, seed=1), draw(24, seed=2))


@_products.add(189495, "linear with bias and more than 65,536 matrices")
def _many_matrices(place: DeviceUnderTest) -> tuple[Any, Any]:
    inputs = draw(65_541, 2, 16), draw(8, 16, seed=1), draw(8, seed=2)
    return f.linear(*[place.put(t) for t in inputs]), f.linear(*inputs)


@_products.add(188438, "bias of a linear layer for a single vector")
def _single_vector(place: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(place, f.linear, draw(16), draw(8, 16, seed=1), draw(8, seed=2))


@_products.add(
    180776, "linear without bias in half precision, the same twice", tolerance=HALF_TOLERANCES[torch.bfloat16]
)
def _half_linear(place: DeviceUnderTest) -> tuple[Any, Any]:
    inputs = draw(4, 96, 128), draw(64, 128, seed=1) / 11
    found, expected = _in_halves(place, f.linear, *inputs)
    again = [_in_halves(place, f.linear, *inputs)[0] for _ in range(4)]
    is_same = torch.tensor(
        [torch.equal(a.cpu(), b.cpu()) for other in again for a, b in zip(other, found, strict=True)]
    )
    return (found, is_same), (expected, torch.ones(8, dtype=torch.bool))


@_products.add(
    197796, "linear with a transposed weight in bf16, three dimensions", tolerance=HALF_TOLERANCES[torch.bfloat16]
)
def _transposed_weight(place: DeviceUnderTest) -> tuple[Any, Any]:
    return _in_halves(place, lambda x, w: f.linear(x, w.t()), draw(2, 9, 32), draw(32, 16, seed=1) / 6)


@_products.add(161640, "linear on non-contiguous tensors")
def _strided_linear(place: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(place, lambda x, w: f.linear(x.transpose(0, 1), w[:, ::2]), draw(5, 7, 16), draw(6, 32, seed=1))


@_products.add(180201, "product with an expanded input (stride 0)")
def _expanded(place: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(place, lambda a, b: a.expand(8, 16) @ b, draw(1, 16), draw(16, 5, seed=1))


@_products.add(178056, "half-precision product with a vector of odd length", tolerance=HALF_TOLERANCES[torch.bfloat16])
def _odd_vector(place: DeviceUnderTest) -> tuple[Any, Any]:
    return _in_halves(place, torch.matmul, draw(1, 1, 513), draw(1, 513, 67, seed=1) / 20)


@_products.add(192212, "convolution with non-contiguous weights", is_quick=True)
def _strided_kernel(place: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(place, lambda x, w: f.conv2d(x, w.permute(3, 2, 0, 1)), draw(2, 8, 9, 9), draw(3, 3, 8, 6, seed=1))


@_products.add(188335, "convolution with a kernel of 257")
def _long_kernel(place: DeviceUnderTest) -> tuple[Any, Any]:
    return _both(place, f.conv2d, draw(1, 2, 270, 3), draw(2, 2, 257, 1, seed=1))


@_products.add(181133, "attention with permuted queries, keys and values")
def _permuted(place: DeviceUnderTest) -> tuple[Any, Any]:
    heads = [draw(3, 12, 4, 16, seed=seed) for seed in range(3)]

    def compute(*qkv: Tensor) -> Tensor:
        return _attention(*[t.permute(0, 2, 1, 3) for t in qkv])

    with torch.no_grad():
        without_gradient = compute(*[place.put(t) for t in heads]), compute(*heads)
    found, expected = _both(place, compute, *heads)
    return (without_gradient[0], found), (without_gradient[1], expected)


@_products.add(195910, "causal attention in half precision sees no future", tolerance=1e-3, is_quick=True)
def _causal(place: DeviceUnderTest) -> tuple[Any, Any]:
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


@_products.add(174861, "attention with grouped queries in half precision", tolerance=HALF_TOLERANCES[torch.bfloat16])
def _grouped(place: DeviceUnderTest) -> tuple[Any, Any]:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v, enable_gqa=True)

    return _in_halves(place, compute, draw(2, 8, 1, 64), draw(2, 2, 1_100, 64, seed=1), draw(2, 2, 1_100, 64, seed=2))


@_products.add(160841, "attention in fp16 whose scores exceed fp16 before scaling", tolerance=2e-2)
def _large_scores(place: DeviceUnderTest) -> tuple[Any, Any]:
    q, k, v = (draw(1, 2, 9, 64, seed=seed).half() for seed in range(3))
    q, k = torch.full_like(q, 40.0), torch.full_like(k, 40.0)
    with torch.no_grad():
        found = _attention(*[place.put(t) for t in (q, k, v)]).float()
    return found, v.float().mean(2, keepdim=True).expand_as(v)


_training = HazardTable()
TRAINING = _training.cases
_CPU_TRAINING = torch.device("cpu")


@_training.add(190491, "layer_norm of rows with little variance", is_quick=True)
def _little_variance(place: DeviceUnderTest) -> tuple[Any, Any]:
    rows = torch.tensor([[-9.9e-4, -9.9e-4, 9.9e-4, 9.9e-4], [1e-5, -1e-5, 1e-5, -1e-5]])
    return f.layer_norm(place.put(rows), (4,), eps=1e-12), f.layer_norm(rows.double(), (4,), eps=1e-12)


@_training.add(183825, "gradient of layer_norm with frozen inputs")
def _frozen_input(place: DeviceUnderTest) -> tuple[Any, Any]:
    def gradients(where: torch.device) -> list[Tensor]:
        weight, bias = torch.ones(12, device=where).requires_grad_(), torch.zeros(12, device=where).requires_grad_()
        f.layer_norm(draw(5, 12).to(where), (12,), weight, bias).pow(2).sum().backward()
        assert weight.grad is not None
        assert bias.grad is not None
        return [weight.grad, bias.grad]

    return gradients(place.device.torch_device), gradients(_CPU_TRAINING)


@_training.add(189617, "rms_norm in half precision", tolerance=2e-2)
def _half_rms(place: DeviceUnderTest) -> tuple[Any, Any]:
    x, weight = draw(9, 256), 1 + draw(256, seed=1) / 10
    found = [
        f.rms_norm(place.put(x.to(d)), (256,), place.put(weight.to(d))).float() for d in (torch.float16, torch.bfloat16)
    ]
    return found, [f.rms_norm(x, (256,), weight)] * 2


@_training.add(156555, "gradient of batch_norm")
def _batch_norm(place: DeviceUnderTest) -> tuple[Any, Any]:
    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return f.batch_norm(x.transpose(1, 2), None, None, weight, bias, training=True).tanh()

    inputs = draw(6, 20, 3), draw(3, seed=1), draw(3, seed=2)
    return forward_and_backward(compute, inputs, place.device.torch_device), forward_and_backward(
        compute, inputs, _CPU_TRAINING
    )


@_training.add(186278, "gelu and tanh of large numbers")
def _large_numbers(place: DeviceUnderTest) -> tuple[Any, Any]:
    def compute(x: Tensor) -> tuple[Tensor, ...]:
        return f.gelu(x, approximate="tanh"), f.gelu(x), x.tanh()

    inputs = (torch.tensor([-1e4, -90.0, -12.0, 0.0, 12.0, 90.0, 1e4]),)
    return forward_and_backward(compute, inputs, place.device.torch_device), forward_and_backward(
        compute, inputs, _CPU_TRAINING
    )


@_training.add(189659, "adaptive_max_pool2d to a size that does not divide", may_refuse=True)
def _uneven_pool(place: DeviceUnderTest) -> tuple[Any, Any]:
    x = draw(1, 2, 10, 7)
    return f.adaptive_max_pool2d(place.put(x), (4, 3)), f.adaptive_max_pool2d(x, (4, 3))


@_training.add(190056, "dropout inside an LSTM, forward and backward", tolerance=0.05)
def _lstm_dropout(place: DeviceUnderTest) -> tuple[Any, Any]:
    """With the same draws, the gradient must be the slope of the loss; and dropout must change the result at all."""
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 16, num_layers=2, dropout=0.8).to(place.device.torch_device)
    x, direction = place.put(draw(5, 3, 4)), place.put(draw(5, 3, 4, seed=1))

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


@_training.add(186360, "a fused optimizer under a loss scaler: scaled right, and no step on infinity", is_quick=True)
def _scaled_fused(place: DeviceUnderTest) -> tuple[Any, Any]:
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

    return train(place.device.torch_device, fused=True), train(_CPU_TRAINING, fused=False)


@_training.add(184286, "a loss scaler keeps half-precision gradients", tolerance=2e-2)
def _scaled_half(place: DeviceUnderTest) -> tuple[Any, Any]:
    # CUDA refuses to unscale half gradients at all: there is nothing to get wrong.
    half = torch.float32 if place.device.kind == "cuda" else torch.bfloat16
    weight = nn.Parameter(place.put(draw(40)).to(half))
    scaler = torch.amp.GradScaler(place.device.torch_device.type, init_scale=1024.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight.float() * 3).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    return weight.grad.float(), torch.full((40,), 3.0)


CHECKS: list[Check] = [*PRODUCTS, *MEMORY, *TRAINING]
