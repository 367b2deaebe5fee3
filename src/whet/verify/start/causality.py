"""Check that a causal model is causal: perturb later positions and compare earlier outputs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.errors import UsageError
from whet.data.batch import Field, MicroBatch, Packed, Padded
from whet.device.abstract import AbstractDevice
from whet.verify.isolation import perturb_zero_weights
from whet.verify.tolerance import max_abs as largest_of
from whet.verify.trainable import OutputFunction


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePositions:
    """For every place of the outputs, in their shape: which sample it belongs to, and its number in it."""

    sample: Tensor
    place: Tensor
    num_samples: int
    longest: int
    packed_total: int | None

    @classmethod
    def of(cls, micro: MicroBatch, outputs: Tensor) -> "SequencePositions":
        """The places of `outputs`; refused where they cannot be told apart."""
        if not isinstance(outputs, Tensor):
            raise UsageError("outputs must be a tensor", got=type(outputs).__name__, try_="outputs.logits")
        packed = next((f for f in micro.fields.values() if isinstance(f, Packed)), None)
        if packed is not None:
            total, starts = len(packed.values), packed.starts.long().cpu()
            if len(outputs) != total:
                raise _unknown_shape(outputs, f"({total}, ...), one for each packed place")
            sample, place = _packed_positions(starts, total)
            return cls(
                sample=sample, place=place, num_samples=len(starts) - 1, longest=packed.max_length, packed_total=total
            )
        if outputs.dim() < 2 or len(outputs) != len(micro):
            raise _unknown_shape(outputs, f"({len(micro)}, length, ...)")
        length = outputs.shape[1]
        if not any(_has_positions(field, length) for field in micro.fields.values()):
            shapes = {name: tuple(values_of(field).shape) for name, field in micro.fields.items()}
            raise UsageError(
                "no field of the data has the places that the outputs have",
                got=f"outputs {tuple(outputs.shape)}, fields {shapes}",
                try_="outputs of shape (batch, length, ...), one for each place of the input",
            )
        return cls(
            sample=torch.arange(len(micro))[:, None].expand(-1, length),
            place=torch.arange(length).expand(len(micro), -1),
            num_samples=len(micro),
            longest=length,
            packed_total=None,
        )


def sequence_length(micro: MicroBatch) -> int:
    """How many places a sample has, at most: tokens have them, images have none."""
    rectangles = [values_of(f) for f in micro.fields.values() if not isinstance(f, Packed)]
    lengths = [v.shape[1] for v in rectangles if v.dim() == 2 and not v.is_floating_point()]
    return max([*lengths, *(f.max_length for f in micro.fields.values() if isinstance(f, Packed)), 1])


def _unknown_shape(outputs: Tensor, wanted: str) -> UsageError:
    return UsageError(
        "outputs of a causal model must tell places apart", got=f"shape {tuple(outputs.shape)}", try_=wanted
    )


def _packed_positions(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    sample = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff(), output_size=total)
    return sample, torch.arange(total) - starts[sample]


# --- changes ---------------------------------------------------------------------------------------------------------


def perturb_from(micro: MicroBatch, starts: Tensor, where: SequencePositions) -> tuple[MicroBatch, bool]:
    """The micro-batch with other values from `starts` on, and whether any value is another one."""
    fields: dict[str, Field] = {}
    is_any = False
    for number, (name, field) in enumerate(micro.fields.items()):
        values = values_of(field)
        is_late = _is_late(field, starts, where)
        other = None if is_late is None else _perturbed_values(values, seed=number)
        if is_late is None or other is None:
            fields[name] = field
            continue
        mask = is_late.to(values.device).reshape(*is_late.shape, *(1,) * (values.dim() - is_late.dim()))
        fields[name] = _with_values(field, torch.where(mask, other, values))
        is_any = True
    return MicroBatch(fields=fields, ids=micro.ids, first_index=micro.first_index), is_any


def _is_late(field: Field, starts: Tensor, where: SequencePositions) -> Tensor | None:
    """Which places of a field are changed; None for a field that has none."""
    if isinstance(field, Packed):
        sample, place = _packed_positions(field.starts.long().cpu(), len(field.values))
        return place >= starts[sample]
    if where.packed_total is not None:
        return None
    if not _has_positions(field, where.longest):
        return None
    return torch.arange(values_of(field).shape[1]) >= starts[:, None]


def _has_positions(field: Field, length: int) -> bool:
    """As many as the outputs; or one more, where the last is a target only."""
    values = values_of(field)
    return values.dim() >= 2 and values.shape[1] in (length, length + 1)


def _perturbed_values(values: Tensor, *, seed: int) -> Tensor | None:
    """Another value for every one: the next token that occurs in the batch, or noise added. None where there is none.

    Masks stay as they are.
    """
    if values.dtype == torch.bool:
        return None
    if values.is_floating_point():
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)).to(values)
        return values + noise * values.std().clamp(min=1e-3)
    tokens, index = values.cpu().unique(return_inverse=True)
    return None if len(tokens) < 2 else tokens[(index + 1) % len(tokens)].to(values)


def values_of(field: Field) -> Tensor:
    """The tensor of a field, whatever its form."""
    return field if isinstance(field, Tensor) else field.values


def _with_values(field: Field, values: Tensor) -> Field:
    if isinstance(field, Padded):
        return Padded(values=values, lengths=field.lengths)
    if isinstance(field, Packed):
        return replace(field, values=values)
    return values


TOLERANCES = {"fp32": 1e-5, "tf32": 1e-4, "bf16": 2e-3, "fp16": 2e-3}
"""By how much an output may move, relative to the largest: the same shapes give the same bits on most devices."""
_MAX_POSITIONS = 64
"""Places that are tried, a different one in each sample, in as many passes as that takes."""
MAX_PASSES = 8
_ROWS = 4096
_MAX_PROBE_FLOPS = 4e10
"""What a CPU is asked to do, roughly, and other devices three times as much; two passes are made in any case."""


class InconclusiveError(Exception):
    """The probe cannot tell; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalityLeak:
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


def check_causality(
    model: nn.Module, device: AbstractDevice, outputs: OutputFunction, micro: MicroBatch, *, precision: str
) -> CausalityLeak | None:
    """`find_leak` with a model in eval mode, on its device, as it computes in training. Only inside `untouched`."""
    model.eval()
    perturb_zero_weights(model)

    def computed(given: MicroBatch) -> Tensor:
        with device.computing(), device.autocast(precision):
            return outputs(given.moved(device.put))

    operations = 2 * sum(p.numel() for p in model.parameters()) * len(micro) * sequence_length(micro)
    affordable = int(_MAX_PROBE_FLOPS * (1 if device.kind == "cpu" else 3) / max(1, operations)) - 1
    passes = max(1, min(MAX_PASSES, affordable))
    return find_leak(computed, micro, tolerance=TOLERANCES[precision], most_passes=passes)


@torch.no_grad()
def find_leak(
    outputs: OutputFunction,
    micro: MicroBatch,
    *,
    places: list[int] | None = None,
    tolerance: float = TOLERANCES["fp32"],
    most_passes: int = MAX_PASSES,
) -> CausalityLeak | None:
    """The worst leak that shows, or None; raises InconclusiveError where the outputs do not move at all.

    `places` are those from which on tokens become other tokens of the batch, and floating-point numbers others with
    noise; by default up to 64, a different one in each sample, the first and the last among them.
    """
    expected = outputs(micro)
    where = SequencePositions.of(micro, expected)
    if where.longest < 2:
        raise InconclusiveError("the samples have one place only")
    largest = max(largest_of(rows) for rows in _rows(expected, where))
    if largest == 0.0:
        raise InconclusiveError("the outputs are all zero, or not finite")
    worst: CausalityLeak | None = None
    has_moved = False
    for starts in _passes(places, where, most_passes):
        changed, is_any = perturb_from(micro, starts, where)
        if not is_any:
            raise InconclusiveError("there is nothing to change: all places hold the same")
        moved = _distance(outputs(changed), expected, where) / largest
        is_early = where.place < starts[where.sample]
        has_moved |= bool((moved[~is_early] > 0).any())
        early = moved.masked_fill(~is_early, 0.0)
        # A NaN that appears is the largest there is.
        index = int(early.argmax())
        if early.flatten()[index] > (tolerance if worst is None else worst.moved):
            sample = int(where.sample.flatten()[index])
            worst = CausalityLeak(
                sample=sample,
                place=int(where.place.flatten()[index]),
                changed_from=int(starts[sample]),
                moved=float(early.flatten()[index]),
                tolerance=tolerance,
            )
    if worst is None and not has_moved:
        raise InconclusiveError("the outputs do not depend on what the model reads")
    return worst


def _passes(places: list[int] | None, where: SequencePositions, most_passes: int) -> Iterator[Tensor]:
    """For every pass the place in each sample from which on it is changed."""
    if places is not None:
        yield from (torch.full((where.num_samples,), place) for place in places)
        return
    last = where.longest - 1
    # The first ones one by one: a mask that is wrong for groups of places shows there.
    wanted = min(last, _MAX_POSITIONS, most_passes * where.num_samples)
    first = list(range(1, 1 + min(last, 3)))
    spread = torch.linspace(last, 1, max(2, wanted)).round().long().tolist()
    chosen = list(dict.fromkeys([*first, *spread]))[:wanted]
    for start in range(0, len(chosen), where.num_samples):
        group = chosen[start : start + where.num_samples]
        yield torch.tensor([group[i % len(group)] for i in range(where.num_samples)])


def _rows(outputs: Tensor, where: SequencePositions) -> Iterator[Tensor]:
    """All places as rows on the CPU, some at a time: the logits of a batch may be most of a device's memory."""
    flat = outputs.detach().flatten(0, where.place.dim() - 1)
    yield from (rows.cpu().float() for rows in flat.split(_ROWS))


def _distance(found: Tensor, expected: Tensor, where: SequencePositions) -> Tensor:
    """By how much every place moved; infinite where a number became none, or the reverse."""
    moved = []
    for ours, theirs in zip(_rows(found, where), _rows(expected, where), strict=True):
        is_same = ours.eq(theirs) | (ours.isnan() & theirs.isnan())
        apart = torch.where(is_same, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        moved.append(apart.reshape(len(apart), -1).amax(-1))
    return torch.cat(moved).reshape(where.place.shape)


_ATTENTION_NAME = "scaled_dot_product_attention"


@contextmanager
def use_explicit_masks() -> Iterator[None]:
    """While entered, attention that is asked for with is_causal=True gets a mask instead, in every thread.

    The function is replaced wherever it goes by its own name, also in modules that imported it.
    """
    original = _attention_now()

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        if is_causal and attn_mask is None:
            attn_mask, is_causal = causal_mask(query, key), False
        return original(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **more)

    with _replaced(original, attention):
        yield


@contextmanager
def count_attention_calls() -> Iterator[list[None]]:
    """While entered, every call of torch's attention adds to the list."""
    original, calls = _attention_now(), list[None]()

    def attention(*given: Any, **named: Any) -> Any:
        calls.append(None)
        return original(*given, **named)

    with _replaced(original, attention):
        yield calls


@contextmanager
def _replaced(original: Any, attention: Any) -> Iterator[None]:
    holders = [module for module in list(sys.modules.values()) if _holds(module, original)]
    for module in holders:
        setattr(module, _ATTENTION_NAME, attention)
    try:
        yield
    finally:
        for module in holders:
            setattr(module, _ATTENTION_NAME, original)


def _attention_now() -> Any:
    return getattr(torch.nn.functional, _ATTENTION_NAME)


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Zero where a place may look, minus infinity where it may not; aligned as is_causal is, at the first place."""
    shape = query.shape[-2], key.shape[-2]
    may_look = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    return torch.zeros(shape, dtype=query.dtype, device=query.device).masked_fill(~may_look, -torch.inf)


def _holds(module: object, function: object) -> bool:
    return isinstance(module, ModuleType) and vars(module).get(_ATTENTION_NAME) is function
