"""Which norms have kernels of whet's own? Group norms before an activation, and norms over sums."""

from whet.machine.facts import Machine
from whet.plan.setting import Scalar

BENT_GROUP_NORMS = "group norms before activations"
"""What a workload's layers say about them."""
SUM_NORMS = "norms over sums"
"""What they say about norms of what a layer found, dropped out, and what came in before it; with weights or without."""
_MOST_CHANNELS = 32
"""Of a program, unless one group has more: 64 bytes in half precision, two of the pieces that memory gives."""
_MOST_NUMBERS = 16_384
"""What the registers of a program hold without spilling."""
_MOST_WIDTH = 4096
"""Of a row that a program holds with its slopes."""

_WRITTEN_FOR = "9"
"""The compute capability for which the kernels were written."""


def has_norm_kernels(machine: Machine, *, device: str, precision: Scalar) -> bool:
    """Whether norms of whet's own are known to be fast here."""
    accelerator = machine.accelerator(device)
    capability = (accelerator.capability if accelerator else None) or ""
    is_known = device == "cuda" and capability.partition(".")[0] == _WRITTEN_FOR
    return is_known and precision in ("bf16", "fp16")


def own_norms_reason(layers: tuple[str, ...], *, layout: object) -> str | None:
    """Why kernels of whet's own can compute norms of such layers; None where they have nothing to do.

    >>> own_norms_reason((BENT_GROUP_NORMS,), layout="channels_last")
    'norm and activation in one kernel that copies nothing'
    """
    if BENT_GROUP_NORMS in layers and layout == "channels_last":
        return "norm and activation in one kernel that copies nothing"
    return "sum and norm in one kernel" if SUM_NORMS in layers else None


def has_own_norms(num_cells: int, width: int, num_groups: int) -> bool:
    """Whether the numbers of a group fit a program, whose tiles have powers of two as sides.

    >>> has_own_norms(13 * 13, 128, 8), has_own_norms(7 * 7, 24, 4), has_own_norms(64 * 64, 512, 8)
    (True, False, False)
    """
    size = width // num_groups
    return size & (size - 1) == 0 and sum(cell_tiles(num_cells)) * size <= _MOST_NUMBERS


def groups_together(num_cells: int, num_groups: int, size: int) -> int:
    """How many groups of so many channels a program takes: a power of two that divides them.

    >>> [groups_together(169, *groups) for groups in ((8, 16), (3, 16), (8, 128))], groups_together(676, 8, 16)
    ([2, 1, 1], 1)
    """
    most = min(_MOST_CHANNELS, _MOST_NUMBERS // sum(cell_tiles(num_cells)))
    together = 1
    while num_groups % (2 * together) == 0 and 2 * together * size <= most:
        together *= 2
    return together


def cell_tiles(num_cells: int) -> tuple[int, int]:
    """The sides of two tiles that hold all cells: the first is full, the second may be empty.

    >>> cell_tiles(169), cell_tiles(64), cell_tiles(1)
    ((128, 64), (64, 0), (1, 0))
    """
    first = 1 << (num_cells.bit_length() - 1)
    rest = num_cells - first
    return first, 1 << (rest - 1).bit_length() if rest else 0


def has_sum_norms(width: int) -> bool:
    """Whether a norm over so many numbers has kernels: a row fits a program, and its dropout is drawn in fours.

    >>> [has_sum_norms(width) for width in (768, 384, 30, 16_384)]
    [True, True, False, False]
    """
    return width % 4 == 0 and 16 <= width <= _MOST_WIDTH
