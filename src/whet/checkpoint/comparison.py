"""Compare two snapshots bit for bit, and name the differences."""

from typing import Any

import torch
from torch import Tensor

from whet.checkpoint.attributes import describe_attribute
from whet.checkpoint.snapshot import Snapshot
from whet.checkpoint.state_json import plain_value

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_snapshots(expected: Snapshot, got: Snapshot) -> list[str]:
    """Return the names of all tensors and JSON values that differ, in the form shown to users. NaN equals NaN.

    The metadata (`info`) is not compared.
    """
    differing = []
    for name in {**expected.tensors, **got.tensors}:
        ours, theirs = expected.tensors.get(name), got.tensors.get(name)
        if ours is None or theirs is None:
            differing.append(f"{describe_tensor(name)} ({'new' if ours is None else 'missing'})")
        elif not tensors_equal(ours, theirs):
            differing.append(describe_tensor(name))
    return [*differing, *dict.fromkeys(_fact_changes(expected.facts, got.facts, ()))]


def tensors_equal(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits. NaN is equal to NaN."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    ours, theirs = (t.detach().contiguous().cpu() for t in (ours, theirs))
    if ours.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    words = [tensor.view(_INTEGERS[tensor.itemsize]) for tensor in (ours, theirs)]
    if torch.equal(*words):
        return True
    # torch has no isnan for 8-bit floats.
    are_nan = ours.float().isnan() & theirs.float().isnan() if ours.is_floating_point() else None
    return are_nan is not None and bool(((words[0] == words[1]) | are_nan).all())


def describe_tensor(name: str) -> str:
    """Return the name of a saved tensor in the form shown to users.

    >>> describe_tensor("optimizer/0.weight/exp_avg")
    'exp_avg of 0.weight in the optimizer'
    """
    role, _, rest = name.partition("/")
    if role == "model":
        return rest
    if role == "optimizer":
        owner, _, key = rest.rpartition("/")
        other, is_other, inside = owner.partition("/")
        where = f"the optimizer {other.removeprefix('@')}" if is_other and other.startswith("@") else "the optimizer"
        return f"{key.replace('%2F', '/').replace('%25', '%')} of {inside or owner} in {where}"
    words = {
        "ema": f"the average of {rest}",
        "rng": f"the generator of {rest}",
        "gradient": f"the gradient of {rest}",
        "attribute": f"the attribute {rest}",
        "registered": f"registered state {rest}",
    }
    return words.get(role, rest)


def _fact_changes(expected: Any, got: Any, path: tuple[str, ...]) -> list[str]:
    if isinstance(expected, dict) and isinstance(got, dict):
        names = {**expected, **got}
        return [c for n in names for c in _fact_changes(expected.get(n), got.get(n), (*path, str(n)))]
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        pairs = enumerate(zip(expected, got, strict=True))
        return [c for index, (ours, theirs) in pairs for c in _fact_changes(ours, theirs, (*path, str(index)))]
    if expected == got and type(expected) is type(got):
        return []
    name = ".".join(path)
    if path[:3] == ("model", "attributes", "now") and len(path) > 4:
        name = f"the attribute {describe_attribute(path[3], path[4])}"
        if len(path) > 5:
            # The entry is part of the encoding, such as the name of the array that shares its memory.
            return [name]
    values = [str(plain_value(value))[:60] for value in (expected, got)]
    return [f"{name} {values[0]} -> {values[1]}"]
