"""Known silent bugs of norms, recurrent layers, pooling and loss scaling."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from whet.doctor.case import Place
from whet.doctor.cases.hazard import Hazards
from whet.doctor.cases.trying import draw, forward_and_backward

_known = Hazards()
TRAINING = _known.cases
_CPU = torch.device("cpu")


@_known.add(190491, "layer_norm of rows with little variance", is_quick=True)
def _little_variance(place: Place) -> tuple[Any, Any]:
    rows = torch.tensor([[-9.9e-4, -9.9e-4, 9.9e-4, 9.9e-4], [1e-5, -1e-5, 1e-5, -1e-5]])
    return f.layer_norm(place.put(rows), (4,), eps=1e-12), f.layer_norm(rows.double(), (4,), eps=1e-12)


@_known.add(183825, "gradient of layer_norm with frozen inputs")
def _frozen_input(place: Place) -> tuple[Any, Any]:
    def gradients(where: torch.device) -> list[Tensor]:
        weight, bias = torch.ones(12, device=where).requires_grad_(), torch.zeros(12, device=where).requires_grad_()
        f.layer_norm(draw(5, 12).to(where), (12,), weight, bias).pow(2).sum().backward()
        assert weight.grad is not None
        assert bias.grad is not None
        return [weight.grad, bias.grad]

    return gradients(place.device.place), gradients(_CPU)


@_known.add(189617, "rms_norm in half precision", tolerance=2e-2)
def _half_rms(place: Place) -> tuple[Any, Any]:
    x, weight = draw(9, 256), 1 + draw(256, seed=1) / 10
    found = [
        f.rms_norm(place.put(x.to(d)), (256,), place.put(weight.to(d))).float() for d in (torch.float16, torch.bfloat16)
    ]
    return found, [f.rms_norm(x, (256,), weight)] * 2


@_known.add(156555, "gradient of batch_norm")
def _batch_norm(place: Place) -> tuple[Any, Any]:
    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return f.batch_norm(x.transpose(1, 2), None, None, weight, bias, training=True).tanh()

    inputs = draw(6, 20, 3), draw(3, seed=1), draw(3, seed=2)
    return forward_and_backward(compute, inputs, place.device.place), forward_and_backward(compute, inputs, _CPU)


@_known.add(186278, "gelu and tanh of large numbers")
def _large_numbers(place: Place) -> tuple[Any, Any]:
    def compute(x: Tensor) -> tuple[Tensor, ...]:
        return f.gelu(x, approximate="tanh"), f.gelu(x), x.tanh()

    inputs = (torch.tensor([-1e4, -90.0, -12.0, 0.0, 12.0, 90.0, 1e4]),)
    return forward_and_backward(compute, inputs, place.device.place), forward_and_backward(compute, inputs, _CPU)


@_known.add(189659, "adaptive_max_pool2d to a size that does not divide", may_refuse=True)
def _uneven_pool(place: Place) -> tuple[Any, Any]:
    x = draw(1, 2, 10, 7)
    return f.adaptive_max_pool2d(place.put(x), (4, 3)), f.adaptive_max_pool2d(x, (4, 3))


@_known.add(190056, "dropout inside an LSTM, forward and backward", tolerance=0.05)
def _lstm_dropout(place: Place) -> tuple[Any, Any]:
    """With the same draws, the gradient must be the slope of the loss; and dropout must change the result at all."""
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 16, num_layers=2, dropout=0.8).to(place.device.place)
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


@_known.add(186360, "a fused optimizer under a loss scaler: scaled right, and no step on infinity", is_quick=True)
def _scaled_fused(place: Place) -> tuple[Any, Any]:
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

    return train(place.device.place, fused=True), train(_CPU, fused=False)


@_known.add(184286, "a loss scaler keeps half-precision gradients", tolerance=2e-2)
def _scaled_half(place: Place) -> tuple[Any, Any]:
    # CUDA refuses to unscale half gradients at all: there is nothing to get wrong.
    half = torch.float32 if place.device.kind == "cuda" else torch.bfloat16
    weight = nn.Parameter(place.put(draw(40)).to(half))
    scaler = torch.amp.GradScaler(place.device.place.type, init_scale=1024.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight.float() * 3).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    return weight.grad.float(), torch.full((40,), 3.0)
