"""Which rows of a tensor does this process hold? All of them, unless several processes share the tensor.

FSDP2 shares a tensor by its first dimension: each process holds as many rows as the next, the last ones fewer or none.
Such a tensor is told by what it can do, so that nobody who trains alone loads torch.distributed.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from whet.base.errors import WhetError


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows from `start` to before `stop`, of `total`."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        """How many they are. Not the length: no rows at all would be taken for none asked for."""
        return self.stop - self.start


def rows_of(tensor: Tensor) -> Rows | None:
    """The rows that lie here; None for a tensor that is here as a whole."""
    placements = getattr(tensor, "placements", None)
    if placements is None or all(placement.is_replicate() for placement in placements):
        return None
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise WhetError(
            "a tensor that is shared in this way cannot be saved",
            got=f"{tuple(placements)} of a tensor of shape {tuple(tensor.shape)}",
            try_="fully_shard over one dimension of processes, which shares the first dimension",
        )
    shared: Any = tensor
    mesh = shared.device_mesh
    rows = share_of(tensor.shape[0], rank=mesh.get_local_rank(), size=mesh.size())
    if held(tensor).shape[0] != rows.count:
        got = f"{held(tensor).shape[0]} rows here; {rows.count} of {rows.total} were expected"
        raise WhetError("a shared tensor has another part here than it should", got=got, try_="sharding=off")
    return rows


def share_of(total: int, *, rank: int, size: int) -> Rows:
    """The rows of one of `size` processes.

    >>> [share_of(10, rank=rank, size=4).count for rank in range(4)]
    [3, 3, 3, 1]
    >>> [share_of(5, rank=rank, size=8).count for rank in range(8)]
    [1, 1, 1, 1, 1, 0, 0, 0]
    """
    each = -(-total // size)
    return Rows(min(rank * each, total), min((rank + 1) * each, total), total)


def is_shared(tensor: Tensor) -> bool:
    """Whether several processes share it, in parts or as copies."""
    return hasattr(tensor, "placements")


def held(tensor: Tensor) -> Tensor:
    """What of a tensor lies here, in its own memory."""
    shared: Any = tensor
    return shared.detach().to_local() if is_shared(tensor) else tensor
