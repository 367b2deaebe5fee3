"""Does a device compute the same bits twice? A note and no error: some devices add in any order, and say so."""

import torch

from whet.verify.agreement import errors_by_name
from whet.verify.start.canary import Found


def difference(one: Found, other: Found) -> str | None:
    """In words how two passes over the same micro-batch differ; None where every bit is the same."""
    same = {**one.gradients, "the loss": one.loss}
    again = {**other.gradients, "the loss": other.loss}
    different = [n for n in same if n not in again or not torch.equal(_bits(same[n]), _bits(again[n]))]
    if not different:
        return None
    errors = errors_by_name(again, same)
    return f"other bits the second time in {len(different)} of {len(same)} tensors, by {max(errors.values()):.0e}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A NaN is equal to itself here."""
    return tensor.contiguous().view(-1).view(torch.uint8)
