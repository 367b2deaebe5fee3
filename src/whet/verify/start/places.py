"""Which places do the samples of a batch have, and how is all that comes from one of them on changed?"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.data.batch import Field, Micro
from whet.data.ragged import Packed, Padded


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """For every place of the outputs, in their shape: which sample it belongs to, and its number in it."""

    sample: Tensor
    place: Tensor
    num_samples: int
    longest: int
    packed_total: int | None

    @classmethod
    def of(cls, micro: Micro, outputs: Tensor) -> "Places":
        """The places of `outputs`; refused where they cannot be told apart."""
        if not isinstance(outputs, Tensor):
            raise UsageError("outputs must be a tensor", got=type(outputs).__name__, try_="outputs.logits")
        packed = next((f for f in micro.fields.values() if isinstance(f, Packed)), None)
        if packed is not None:
            total, starts = len(packed.values), packed.starts.long().cpu()
            if len(outputs) != total:
                raise _unknown_shape(outputs, f"({total}, ...), one for each packed place")
            sample, place = _packed_places(starts, total)
            return cls(
                sample=sample, place=place, num_samples=len(starts) - 1, longest=packed.max_length, packed_total=total
            )
        if outputs.dim() < 2 or len(outputs) != len(micro):
            raise _unknown_shape(outputs, f"({len(micro)}, length, ...)")
        length = outputs.shape[1]
        if not any(_has_places(field, length) for field in micro.fields.values()):
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


def num_places(micro: Micro) -> int:
    """How many places a sample has, at most: tokens have them, images have none."""
    rectangles = [values_of(f) for f in micro.fields.values() if not isinstance(f, Packed)]
    lengths = [v.shape[1] for v in rectangles if v.dim() == 2 and not v.is_floating_point()]
    return max([*lengths, *(f.max_length for f in micro.fields.values() if isinstance(f, Packed)), 1])


def _unknown_shape(outputs: Tensor, wanted: str) -> UsageError:
    return UsageError(
        "outputs of a causal model must tell places apart", got=f"shape {tuple(outputs.shape)}", try_=wanted
    )


def _packed_places(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    sample = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff(), output_size=total)
    return sample, torch.arange(total) - starts[sample]


# --- changes ---------------------------------------------------------------------------------------------------------


def changed_from(micro: Micro, starts: Tensor, where: Places) -> tuple[Micro, bool]:
    """The micro-batch with other values from `starts` on, and whether any value is another one."""
    fields: dict[str, Field] = {}
    is_any = False
    for number, (name, field) in enumerate(micro.fields.items()):
        values = values_of(field)
        is_late = _is_late(field, starts, where)
        other = None if is_late is None else _others(values, seed=number)
        if is_late is None or other is None:
            fields[name] = field
            continue
        mask = is_late.to(values.device).reshape(*is_late.shape, *(1,) * (values.dim() - is_late.dim()))
        fields[name] = _with_values(field, torch.where(mask, other, values))
        is_any = True
    return Micro(fields=fields, ids=micro.ids, first_place=micro.first_place), is_any


def _is_late(field: Field, starts: Tensor, where: Places) -> Tensor | None:
    """Which places of a field are changed; None for a field that has none."""
    if isinstance(field, Packed):
        sample, place = _packed_places(field.starts.long().cpu(), len(field.values))
        return place >= starts[sample]
    if where.packed_total is not None:
        return None
    if not _has_places(field, where.longest):
        return None
    return torch.arange(values_of(field).shape[1]) >= starts[:, None]


def _has_places(field: Field, length: int) -> bool:
    """As many as the outputs; or one more, where the last is a target only."""
    values = values_of(field)
    return values.dim() >= 2 and values.shape[1] in (length, length + 1)


def _others(values: Tensor, *, seed: int) -> Tensor | None:
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
