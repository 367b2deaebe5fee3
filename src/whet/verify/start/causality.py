"""Is a causal model causal? What comes at a place or after it is changed; what came out before it must not move."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whet.data.batch import Micro
from whet.device.abstract import AbstractDevice
from whet.verify.agreement import largest as largest_of
from whet.verify.start.places import Places, changed_from, num_places
from whet.verify.subject import Outputs
from whet.verify.untouched import wake_zeros

TOLERANCES = {"fp32": 1e-5, "tf32": 1e-4, "bf16": 2e-3, "fp16": 2e-3}
"""By how much an output may move, relative to the largest: the same shapes give the same bits on most devices."""
_MOST_PLACES = 64
"""Places that are tried, a different one in each sample, in as many passes as that takes."""
MOST_PASSES = 8
_ROWS = 4096
_MOST_OPERATIONS = 4e10
"""What a CPU is asked to do, roughly, and other devices three times as much; two passes are made in any case."""


class NothingShownError(Exception):
    """The probe cannot tell; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """An output that depends on what comes later."""

    sample: int
    place: int
    """Where the output moved."""
    changed_from: int
    """All that the model read was the same before this place."""
    moved: float
    """By how much, relative to the largest output."""
    tolerance: float

    def __str__(self) -> str:
        return (
            f"the output at place {self.place} moves by {self.moved:.1e} (at most {self.tolerance:.0e}) "
            f"when only what comes from place {self.changed_from} on is changed"
        )


def probe(model: nn.Module, device: AbstractDevice, outputs: Outputs, micro: Micro, *, precision: str) -> Leak | None:
    """`leaks` with a model in eval mode, on its device, as it computes in training. Only inside `untouched`."""
    model.eval()
    wake_zeros(model)

    def computed(given: Micro) -> Tensor:
        with device.computing(), device.autocast(precision):
            return outputs(given.moved(device.put))

    operations = 2 * sum(p.numel() for p in model.parameters()) * len(micro) * num_places(micro)
    affordable = int(_MOST_OPERATIONS * (1 if device.kind == "cpu" else 3) / max(1, operations)) - 1
    passes = max(1, min(MOST_PASSES, affordable))
    return leaks(computed, micro, tolerance=TOLERANCES[precision], most_passes=passes)


@torch.no_grad()
def leaks(
    outputs: Outputs,
    micro: Micro,
    *,
    places: list[int] | None = None,
    tolerance: float = TOLERANCES["fp32"],
    most_passes: int = MOST_PASSES,
) -> Leak | None:
    """The worst leak that shows, or None; raises NothingShownError where the outputs do not move at all.

    `places` are those from which on tokens become other tokens of the batch, and floating-point numbers others with
    noise; by default up to 64, a different one in each sample, the first and the last among them.
    """
    expected = outputs(micro)
    where = Places.of(micro, expected)
    if where.longest < 2:
        raise NothingShownError("the samples have one place only")
    largest = max(largest_of(rows) for rows in _rows(expected, where))
    if largest == 0.0:
        raise NothingShownError("the outputs are all zero, or not finite")
    worst: Leak | None = None
    has_moved = False
    for starts in _passes(places, where, most_passes):
        changed, is_any = changed_from(micro, starts, where)
        if not is_any:
            raise NothingShownError("there is nothing to change: all places hold the same")
        moved = _distance(outputs(changed), expected, where) / largest
        is_early = where.place < starts[where.sample]
        has_moved |= bool((moved[~is_early] > 0).any())
        early = moved.masked_fill(~is_early, 0.0)
        # A NaN that appears is the largest there is.
        index = int(early.argmax())
        if early.flatten()[index] > (tolerance if worst is None else worst.moved):
            sample = int(where.sample.flatten()[index])
            worst = Leak(
                sample=sample,
                place=int(where.place.flatten()[index]),
                changed_from=int(starts[sample]),
                moved=float(early.flatten()[index]),
                tolerance=tolerance,
            )
    if worst is None and not has_moved:
        raise NothingShownError("the outputs do not depend on what the model reads")
    return worst


def _passes(places: list[int] | None, where: Places, most_passes: int) -> Iterator[Tensor]:
    """For every pass the place in each sample from which on it is changed."""
    if places is not None:
        yield from (torch.full((where.num_samples,), place) for place in places)
        return
    last = where.longest - 1
    # The first ones one by one: a mask that is wrong for groups of places shows there.
    wanted = min(last, _MOST_PLACES, most_passes * where.num_samples)
    first = list(range(1, 1 + min(last, 3)))
    spread = torch.linspace(last, 1, max(2, wanted)).round().long().tolist()
    chosen = list(dict.fromkeys([*first, *spread]))[:wanted]
    for start in range(0, len(chosen), where.num_samples):
        group = chosen[start : start + where.num_samples]
        yield torch.tensor([group[i % len(group)] for i in range(where.num_samples)])


def _rows(outputs: Tensor, where: Places) -> Iterator[Tensor]:
    """All places as rows on the CPU, some at a time: the logits of a batch may be most of a device's memory."""
    flat = outputs.detach().flatten(0, where.place.dim() - 1)
    yield from (rows.cpu().float() for rows in flat.split(_ROWS))


def _distance(found: Tensor, expected: Tensor, where: Places) -> Tensor:
    """By how much every place moved; infinite where a number became none, or the reverse."""
    moved = []
    for ours, theirs in zip(_rows(found, where), _rows(expected, where), strict=True):
        is_same = ours.eq(theirs) | (ours.isnan() & theirs.isnan())
        apart = torch.where(is_same, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        moved.append(apart.reshape(len(apart), -1).amax(-1))
    return torch.cat(moved).reshape(where.place.shape)
