"""Known silent bugs of copies, views and strides."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

from whet.doctor.case import Place
from whet.doctor.cases.hazard import Hazards
from whet.doctor.cases.trying import draw, forward_and_backward

_known = Hazards()
MEMORY = _known.cases
_CPU = torch.device("cpu")


@_known.add(189563, "a copy to the CPU in another type leaves its source alone", tolerance=1e-3, is_quick=True)
def _converting_copy(place: Place) -> tuple[Any, Any]:
    whole = draw(4_100)
    source = place.put(whole)
    # From an offset: that is where the source was used as scratch memory.
    copied = source[100:].to("cpu", torch.float16)
    counted = source[100:].to("cpu", torch.int32)
    return (copied.float(), counted, source), (whole[100:], whole[100:].to(torch.int32), whole)


@_known.add(189961, "a copy between views with gaps")
def _gaps(place: Place) -> tuple[Any, Any]:
    there = place.put(torch.arange(20.0))[::2]
    parent = torch.zeros(20)
    parent[::2].copy_(there)
    place.device.sync()
    expected = torch.arange(20.0)
    expected[1::2] = 0
    return parent, expected


@_known.add(187117, "a number from the middle of a CPU tensor", is_quick=True)
def _number_from_a_view(place: Place) -> tuple[Any, Any]:
    x, numbers = draw(6), torch.arange(1.0, 9.0)
    there = place.put(x)
    return (there * numbers[4], there + numbers[5], there / numbers[6]), (x * 5, x + 6, x / 7)


@_known.add(139550, "copies to the device that do not wait for their source")
def _copies_without_waiting(place: Place) -> tuple[Any, Any]:
    moved = []
    for number in range(40):
        source = torch.full((50_000,), float(number))
        moved.append(source.to(place.device.place, non_blocking=True))
        del source
        # Takes the memory that was just given back, and writes over it.
        torch.full((50_000,), -1.0)
    place.device.sync()
    return torch.stack([m.float().mean() for m in moved]), torch.arange(40.0)


@_known.add(118115, "addcdiv_ and addcmul_ on transposed weights (Adam)", is_quick=True)
def _transposed_update(place: Place) -> tuple[Any, Any]:
    def update(where: torch.device) -> Tensor:
        weight = draw(8, 12).to(where).t()
        a, b = draw(12, 8, seed=1).to(where), draw(12, 8, seed=2).abs().to(where) + 1
        weight.addcdiv_(a, b, value=-0.5).addcmul_(a, b, value=0.1)
        return weight

    return update(place.device.place), update(_CPU)


@_known.add(100764, "results written into a part of a tensor")
def _parts(place: Place) -> tuple[Any, Any]:
    def write(where: torch.device) -> Tensor:
        whole = torch.zeros(6, 10, device=where)
        x = draw(6, 5).to(where)
        torch.exp(x, out=whole[:, ::2])
        whole[2:4, 1::2].add_(x[2:4])
        whole[5].mul_(x[5].repeat(2))
        return whole

    return write(place.device.place), write(_CPU)


@_known.add(176159, "masked_fill_ on a transposed tensor")
def _masked(place: Place) -> tuple[Any, Any]:
    def fill(where: torch.device) -> Tensor:
        x = draw(7, 5).to(where)
        x.t().masked_fill_((draw(5, 7, seed=1) > 0).to(where), 3.0)
        return x

    return fill(place.device.place), fill(_CPU)


@_known.add(98212, "activations of non-contiguous tensors")
def _strided_activations(place: Place) -> tuple[Any, Any]:
    def compute(x: Tensor) -> tuple[Tensor, ...]:
        part = x.t()[:, ::2]
        return f.silu(part), f.gelu(part), f.leaky_relu(part), f.mish(part), f.softmax(part, -1)

    inputs = (draw(8, 6),)
    return forward_and_backward(compute, inputs, place.device.place), forward_and_backward(compute, inputs, _CPU)


@_known.add(165257, "random numbers written into a transposed tensor", tolerance=0.05)
def _strided_draws(place: Place) -> tuple[Any, Any]:
    torch.manual_seed(0)
    normal, uniform = (torch.full((300, 200), 9.0, device=place.device.place) for _ in range(2))
    normal.t().normal_()
    uniform[:, ::2].uniform_()
    drawn = uniform[:, ::2]
    found = [normal.std(), (normal == 9.0).float().mean(), drawn.mean(), drawn.std(), uniform[:, 1::2].mean()]
    expected = [1.0, 0.0, 0.5, 12**-0.5, 9.0]
    return [x.reshape(1) + 1 for x in found], [torch.tensor([x + 1]) for x in expected]


@_known.add(141457, "multinomial from a non-contiguous tensor")
def _strided_multinomial(place: Place) -> tuple[Any, Any]:
    # Each row has one possible answer.
    certain = torch.eye(6)[torch.tensor([3, 1, 4, 0, 5, 2])]
    drawn = place.put(certain.t().contiguous()).t().multinomial(1)
    return drawn, certain.argmax(1, keepdim=True)


@_known.add(184620, "sorting of bools, largest integers and NaN")
def _sorting(place: Place) -> tuple[Any, Any]:
    bools, numbers = draw(70) > 0, torch.tensor([5, 2**31 - 1, -7, 2**31 - 1, 0], dtype=torch.int32)
    fractions = torch.tensor([1.0, torch.nan, -2.0, torch.inf, torch.nan])
    found, expected = [], []
    for x in (bools, numbers, fractions):
        values, places = place.put(x).sort()
        in_range = ((places >= 0) & (places < len(x))).all()
        found.append((values.float(), in_range))
        expected.append((x.sort().values.float(), torch.tensor(True)))
    return found, expected
