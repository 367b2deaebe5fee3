"""Check that a causal model is causal, by changing the inputs of later positions and comparing earlier outputs.

`use_explicit_masks` in step/attention.py is the fallback for a device whose is_causal kernel is wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from whet.base.errors import UsageError
from whet.data.batch import Field, MicroBatch, Packed, Padded
from whet.device.abstract import AbstractDevice
from whet.verify.isolation import perturb_zero_weights
from whet.verify.tolerance import max_abs
from whet.verify.trainable import OutputFunction

# Maximum change of an earlier output that counts as rounding, relative to the largest output. On most devices, earlier
# outputs do not change at all.
TOLERANCES = {"fp32": 1e-5, "tf32": 1e-4, "bf16": 2e-3, "fp16": 2e-3}
MAX_PASSES = 8
# Maximum number of positions to try. In a pass, each sample tries a different one.
_MAX_POSITIONS = 64
_ROWS_PER_COPY = 4096
# Maximum number of FLOPs on a CPU, roughly estimated. Other devices get three times as many. At least two passes run.
_MAX_PROBE_FLOPS = 4e10


class InconclusiveError(Exception):
    """Raised if causality cannot be determined. The message contains the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalityLeak:
    """An output that depends on later inputs."""

    sample: int
    position: int
    """Position at which the output changed."""
    changed_from: int
    """First position whose input was changed."""
    change: float
    """Change of the output, relative to the largest output."""
    tolerance: float

    def __str__(self) -> str:
        return (
            f"the output at position {self.position} changes by {self.change:.1e} (at most {self.tolerance:.0e}) "
            f"when only inputs from position {self.changed_from} on are changed"
        )


def check_causality(
    model: nn.Module, device: AbstractDevice, outputs: OutputFunction, micro: MicroBatch, *, precision: str
) -> CausalityLeak | None:
    """Run `find_leak` on the device and in the precision of the run. The model remains in eval mode.

    Zero weights are perturbed and not restored.
    """
    model.eval()
    # An output layer with zero weights would hide every leak.
    perturb_zero_weights(model)

    def compute(batch: MicroBatch) -> Tensor:
        with device.compute_context(), device.autocast(precision):
            return outputs(batch.map_tensors(device.put))

    flops = 2 * sum(p.numel() for p in model.parameters()) * len(micro) * sequence_length(micro)
    affordable = int(_MAX_PROBE_FLOPS * (1 if device.is_cpu else 3) / max(1, flops)) - 1
    passes = max(1, min(MAX_PASSES, affordable))
    return find_leak(compute, micro, tolerance=TOLERANCES[precision], max_passes=passes)


@torch.no_grad()
def find_leak(
    outputs: OutputFunction,
    micro: MicroBatch,
    *,
    starts: list[int] | None = None,
    tolerance: float = TOLERANCES["fp32"],
    max_passes: int = MAX_PASSES,
) -> CausalityLeak | None:
    """Return the worst leak, or None. Raise InconclusiveError if the outputs do not depend on the inputs.

    For each position in `starts`, replace the tokens from this position on with other tokens of the batch, and add
    noise to floating-point inputs. By default, try up to 64 positions, spread over the sequence.
    """
    expected = outputs(micro)
    positions = SequencePositions.of(micro, expected)
    if positions.longest < 2:
        raise InconclusiveError("the samples have only one position")
    largest = max(max_abs(rows) for rows in _rows(expected, positions))
    if largest == 0.0:
        raise InconclusiveError("the outputs are all zero or not finite")
    worst: CausalityLeak | None = None
    any_change = False
    for first_changed in _passes(starts, positions, max_passes):
        perturbed, is_changed = perturb_from(micro, first_changed, positions)
        if not is_changed:
            raise InconclusiveError("all positions have the same input, so nothing can be changed")
        change = _distance(outputs(perturbed), expected, positions) / largest
        is_early = positions.position < first_changed[positions.sample]
        any_change |= bool((change[~is_early] > 0).any())
        early = change.masked_fill(~is_early, 0.0)
        # A change to NaN is detected too, because argmax treats NaN as the largest value.
        index = int(early.argmax())
        if early.flatten()[index] > (tolerance if worst is None else worst.change):
            sample = int(positions.sample.flatten()[index])
            worst = CausalityLeak(
                sample=sample,
                position=int(positions.position.flatten()[index]),
                changed_from=int(first_changed[sample]),
                change=float(early.flatten()[index]),
                tolerance=tolerance,
            )
    if worst is None and not any_change:
        raise InconclusiveError("the outputs do not depend on the inputs")
    return worst


def _passes(starts: list[int] | None, positions: "SequencePositions", max_passes: int) -> Iterator[Tensor]:
    """Yield the first changed position of each sample, (samples,), for every pass."""
    if starts is not None:
        yield from (torch.full((positions.num_samples,), start) for start in starts)
        return
    last = positions.longest - 1
    # Try the first positions one by one, to detect a mask that is wrong within groups of positions.
    count = min(last, _MAX_POSITIONS, max_passes * positions.num_samples)
    first = list(range(1, 1 + min(last, 3)))
    spread = torch.linspace(last, 1, max(2, count)).round().long().tolist()
    chosen = list(dict.fromkeys([*first, *spread]))[:count]
    for start in range(0, len(chosen), positions.num_samples):
        group = chosen[start : start + positions.num_samples]
        yield torch.tensor([group[i % len(group)] for i in range(positions.num_samples)])


def _rows(outputs: Tensor, positions: "SequencePositions") -> Iterator[Tensor]:
    """Copy the outputs to the CPU in chunks of rows, because logits may occupy most of the device memory."""
    flat = outputs.detach().flatten(0, positions.position.dim() - 1)
    yield from (rows.cpu().float() for rows in flat.split(_ROWS_PER_COPY))


def _distance(actual: Tensor, expected: Tensor, positions: "SequencePositions") -> Tensor:
    """Return the largest change at every position. It is infinite if a value became NaN or infinite, or the reverse."""
    changes = []
    for ours, theirs in zip(_rows(actual, positions), _rows(expected, positions), strict=True):
        is_same = ours.eq(theirs) | (ours.isnan() & theirs.isnan())
        change = torch.where(is_same, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        changes.append(change.reshape(len(change), -1).amax(-1))
    return torch.cat(changes).reshape(positions.position.shape)


# --- positions of a batch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePositions:
    """The sample and the position in the sample of every output.

    `sample` and `position` have the shape (batch, length), or (total,) if samples are packed.
    """

    sample: Tensor
    position: Tensor
    num_samples: int
    longest: int
    packed_total: int | None
    """Total number of positions if samples are packed, otherwise None."""

    @classmethod
    def of(cls, micro: MicroBatch, outputs: Tensor) -> Self:
        """Match outputs with positions of the inputs. Raise UsageError if their shapes do not match."""
        if not isinstance(outputs, Tensor):
            raise UsageError("outputs must be a tensor", got=type(outputs).__name__, try_="outputs.logits")
        packed = next((f for f in micro.fields.values() if isinstance(f, Packed)), None)
        if packed is not None:
            total, starts = len(packed.values), packed.starts.long().cpu()
            if len(outputs) != total:
                raise _shape_error(outputs, f"({total}, ...), one row for each packed position")
            sample, position = _packed_positions(starts, total)
            return cls(
                sample=sample,
                position=position,
                num_samples=len(starts) - 1,
                longest=packed.max_length,
                packed_total=total,
            )
        if outputs.dim() < 2 or len(outputs) != len(micro):
            raise _shape_error(outputs, f"({len(micro)}, length, ...)")
        length = outputs.shape[1]
        if not any(_has_positions(field, length) for field in micro.fields.values()):
            shapes = {name: tuple(_values(field).shape) for name, field in micro.fields.items()}
            raise UsageError(
                "no input has the length of the outputs",
                got=f"outputs {tuple(outputs.shape)}, fields {shapes}",
                try_="outputs of shape (batch, length, ...), one for each position of the input",
            )
        return cls(
            sample=torch.arange(len(micro))[:, None].expand(-1, length),
            position=torch.arange(length).expand(len(micro), -1),
            num_samples=len(micro),
            longest=length,
            packed_total=None,
        )


def sequence_length(micro: MicroBatch) -> int:
    """Return the largest number of positions of a sample, or 1 for data without positions, such as images."""
    tensors = [_values(f) for f in micro.fields.values() if not isinstance(f, Packed)]
    lengths = [v.shape[1] for v in tensors if v.dim() == 2 and not v.is_floating_point()]
    return max([*lengths, *(f.max_length for f in micro.fields.values() if isinstance(f, Packed)), 1])


def _shape_error(outputs: Tensor, expected: str) -> UsageError:
    return UsageError(
        "outputs of a causal model need one row for each position",
        got=f"shape {tuple(outputs.shape)}",
        try_=expected,
    )


def _packed_positions(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    sample = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff(), output_size=total)
    return sample, torch.arange(total) - starts[sample]


def perturb_from(micro: MicroBatch, starts: Tensor, positions: SequencePositions) -> tuple[MicroBatch, bool]:
    """Change the values from position `starts` of each sample on. Return the batch, and whether any value changed."""
    fields: dict[str, Field] = {}
    is_changed = False
    for number, (name, field) in enumerate(micro.fields.items()):
        values = _values(field)
        is_late = _late_positions(field, starts, positions)
        other = None if is_late is None else _perturbed_values(values, seed=number)
        if is_late is None or other is None:
            fields[name] = field
            continue
        mask = is_late.to(values.device).reshape(*is_late.shape, *(1,) * (values.dim() - is_late.dim()))
        fields[name] = _with_values(field, torch.where(mask, other, values))
        is_changed = True
    return MicroBatch(fields, micro.ids, micro.first_index, make_data=micro.make_data), is_changed


def _late_positions(field: Field, starts: Tensor, positions: SequencePositions) -> Tensor | None:
    """Return a mask of the positions to change, or None for a field without positions."""
    if isinstance(field, Packed):
        sample, position = _packed_positions(field.starts.long().cpu(), len(field.values))
        return position >= starts[sample]
    if positions.packed_total is not None or not _has_positions(field, positions.longest):
        return None
    return torch.arange(_values(field).shape[1]) >= starts[:, None]


def _has_positions(field: Field, length: int) -> bool:
    """Return whether the field has one value per output, or one more because its last token is only a target."""
    values = _values(field)
    return values.dim() >= 2 and values.shape[1] in (length, length + 1)


def _perturbed_values(values: Tensor, *, seed: int) -> Tensor | None:
    """Return different values: the next token that occurs in the batch, or a floating-point value plus noise.

    Return None for masks, and if the batch contains only one token.
    """
    if values.dtype == torch.bool:
        return None
    if values.is_floating_point():
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)).to(values)
        return values + noise * values.std().clamp(min=1e-3)
    tokens, index = values.cpu().unique(return_inverse=True)
    return None if len(tokens) < 2 else tokens[(index + 1) % len(tokens)].to(values)


def _values(field: Field) -> Tensor:
    return field if isinstance(field, Tensor) else field.values


def _with_values(field: Field, values: Tensor) -> Field:
    if isinstance(field, Padded):
        return Padded(values=values, lengths=field.lengths)
    if isinstance(field, Packed):
        return replace(field, values=values)
    return values
