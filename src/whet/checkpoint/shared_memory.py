"""Tensors of a state that share memory.

Each is encoded as the same object, an alias, a view, or a separate tensor. Which of them share memory is determined
after everything is encoded.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from whet.checkpoint.encoding import dtype_name
from whet.checkpoint.state_format import TAG
from whet.distributed.strategies import is_distributed


class KeptTensor(NamedTuple):
    """A tensor that the encoded state refers to."""

    tensor: Tensor
    path: str
    encoded: dict[str, Any] | None
    """The encoding, which `StateEncoder.finish` completes, or None for a tensor of the model."""


def encode_group(group: list[KeptTensor], tensors: dict[str, Tensor]) -> None:
    """Complete the encodings of tensors that share memory. Add the tensors that must be saved to `tensors` by name."""
    distinct: dict[int, KeptTensor] = {}
    for kept in group:
        distinct.setdefault(id(kept.tensor), kept)
    live = [kept for kept in distinct.values() if kept.encoded is None]
    first = next(iter(distinct.values()))
    # Different views of memory that does not belong to the model: save the memory itself.
    is_whole = not live and any(not _is_same_view(kept.tensor, first.tensor) for kept in distinct.values())
    if not live and not is_distributed(first.tensor):
        is_whole = is_whole or overlaps_itself(first.tensor)
    if is_whole:
        tensors[first.path] = _whole_memory(first.tensor)
    for kept in group:
        if kept.encoded is None:
            continue
        original = distinct[id(kept.tensor)]
        if original is not kept:
            kept.encoded.update({TAG: "same", "of": original.path})
        elif is_whole:
            place = {"path": kept.path, "is_memory": True, **_geometry(kept.tensor, 0)}
            kept.encoded.update({TAG: "view", "of": first.path, **place})
        elif (base := next((b for b in live or [first] if _is_same_view(kept.tensor, b.tensor)), None)) is not None:
            if base is kept:
                tensors[kept.path] = kept.tensor
                stride = {} if kept.tensor.is_contiguous() else {"stride": list(kept.tensor.stride())}
                kept.encoded.update({TAG: "reference", "name": kept.path, **stride, **tensor_flags(kept.tensor)})
            else:
                flags = tensor_flags(kept.tensor)
                kept.encoded.update({TAG: "alias", "of": base.path, "path": kept.path, **flags})
        elif (base := next((b for b in live if _is_inside(kept.tensor, b.tensor)), None)) is not None:
            offset = int(base.tensor.storage_offset())
            facts = {
                "path": kept.path,
                "base_stride": list(base.tensor.stride()),
                **_geometry(kept.tensor, offset),
            }
            kept.encoded.update({TAG: "view", "of": base.path, **facts})
        else:
            # The memory is only partly covered by tensors of the model, such as one buffer that backs all weights.
            tensors[kept.path] = kept.tensor
            facts = {
                "path": kept.path,
                "name": kept.path,
                "size": live[0].tensor.untyped_storage().nbytes(),
            }
            kept.encoded.update(
                {TAG: "view", "of": live[0].path, "is_absolute": True, **facts, **_geometry(kept.tensor, 0)}
            )


def memory_key(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors that share memory."""
    if is_distributed(tensor):
        return id(tensor)
    storage = tensor.untyped_storage()
    return (storage._cdata,) if storage.nbytes() else id(tensor)


def _is_same_view(ours: Tensor, theirs: Tensor) -> bool:
    if ours is theirs:
        return True
    places = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (ours, theirs)]
    return places[0] == places[1]


def _is_inside(part: Tensor, whole: Tensor) -> bool:
    if part.dtype != whole.dtype or not _is_dense(whole) or not part.numel():
        return False
    first = part.storage_offset() - whole.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return first >= 0 and last < whole.numel()


def _is_dense(tensor: Tensor) -> bool:
    sizes = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    expected = 1
    for stride, size in sizes:
        if stride != expected:
            return False
        expected *= size
    return True


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as in an expanded tensor."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _whole_memory(tensor: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _geometry(tensor: Tensor, base_offset: int) -> dict[str, Any]:
    facts = {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset() - base_offset,
    }
    return {**facts, **tensor_flags(tensor)}


def tensor_flags(tensor: Tensor) -> dict[str, Any]:
    """Return the device of a tensor, and whether it is a parameter and whether it requires gradients."""
    flags: dict[str, Any] = {"device": tensor.device.type}
    if isinstance(tensor, nn.Parameter):
        flags["is_parameter"] = True
    if tensor.requires_grad:
        flags["requires_grad"] = True
    return flags
