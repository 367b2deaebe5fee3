"""Which layers and shapes whet's own CUDA kernels support."""

from whet.machine.facts import Machine
from whet.plan.setting import Scalar
from whet.plan.workload import Workload

SHORT_ROTARY_ATTENTION = "short turned attention"
"""What a workload's layers say about it."""
MAX_SHORT_LENGTH = 128
"""What one program of a kernel holds; more would need sums over blocks, as torch's kernels have them."""
_SHORT_HEAD_SIZES = (32, 64, 128)

SPAN_ATTENTION = "attention in spans"
"""What a workload's layers say of texts one behind the other, and of rows that hold several documents."""
_SPAN_HEAD_SIZES = (32, 64)
"""With heads of 128 the way back spills its registers."""


def supports_short_attention(num_places: int, size: int) -> bool:
    """Whether so many places with heads of this size are few enough.

    >>> has_own_kernels(97, 64), has_own_kernels(512, 64), has_own_kernels(97, 48)
    (True, False, False)
    """
    return num_places <= MAX_SHORT_LENGTH and size in _SHORT_HEAD_SIZES


def supports_span_attention(size: int) -> bool:
    """Whether spans can be attended with heads of this size.

    >>> has_span_kernels(64), has_span_kernels(128)
    (True, False)
    """
    return size in _SPAN_HEAD_SIZES


def attention_kernel_reason(layers: tuple[str, ...], *, lengths_vary: bool, lengths: object) -> str | None:
    """Why kernels of whet's own can attend such a workload; None where they have nothing to do.

    >>> own_attention_reason((SPANS,), lengths_vary=True, lengths="packed few")
    'texts lie one behind the other: each is attended alone'
    """
    if SHORT_ROTARY_ATTENTION in layers:
        return "few places: one kernel turns and attends"
    if SPAN_ATTENTION not in layers:
        return None
    if lengths_vary:
        return "texts lie one behind the other: each is attended alone" if str(lengths).startswith("packed") else None
    return "rows hold several documents: each is attended alone"


GROUP_NORM_ACTIVATION = "group norms before activations"
"""What a workload's layers say about them."""
ADD_NORM = "norms over sums"
"""What they say about norms of what a layer found, dropped out, and what came in before it; with weights or without."""
_MAX_CHANNELS = 32
"""Of a program, unless one group has more: 64 bytes in half precision, two of the pieces that memory gives."""
_MAX_ELEMENTS = 16_384
"""What the registers of a program hold without spilling."""
_MAX_WIDTH = 4096
"""Of a row that a program holds with its slopes."""

_KERNEL_CAPABILITY = "9"
"""The compute capability for which the kernels were written."""


def has_norm_kernels(machine: Machine, *, device: str, precision: Scalar) -> bool:
    """Whether norms of whet's own are known to be fast here."""
    accelerator = machine.accelerator(device)
    capability = (accelerator.capability if accelerator else None) or ""
    is_known = device == "cuda" and capability.partition(".")[0] == _KERNEL_CAPABILITY
    return is_known and precision in ("bf16", "fp16")


def norm_kernel_reason(layers: tuple[str, ...], *, layout: object) -> str | None:
    """Why kernels of whet's own can compute norms of such layers; None where they have nothing to do.

    >>> own_norms_reason((BENT_GROUP_NORMS,), layout="channels_last")
    'norm and activation in one kernel that copies nothing'
    """
    if GROUP_NORM_ACTIVATION in layers and layout == "channels_last":
        return "norm and activation in one kernel that copies nothing"
    return "sum and norm in one kernel" if ADD_NORM in layers else None


def supports_group_norm(num_cells: int, width: int, num_groups: int) -> bool:
    """Whether the numbers of a group fit a program, whose tiles have powers of two as sides.

    >>> has_own_norms(13 * 13, 128, 8), has_own_norms(7 * 7, 24, 4), has_own_norms(64 * 64, 512, 8)
    (True, False, False)
    """
    size = width // num_groups
    return size & (size - 1) == 0 and sum(cell_tiles(num_cells)) * size <= _MAX_ELEMENTS


def groups_per_program(num_cells: int, num_groups: int, size: int) -> int:
    """How many groups of so many channels a program takes: a power of two that divides them.

    >>> [groups_together(169, *groups) for groups in ((8, 16), (3, 16), (8, 128))], groups_together(676, 8, 16)
    ([2, 1, 1], 1)
    """
    most = min(_MAX_CHANNELS, _MAX_ELEMENTS // sum(cell_tiles(num_cells)))
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


def supports_add_norm(width: int) -> bool:
    """Whether a norm over so many numbers has kernels: a row fits a program, and its dropout is drawn in fours.

    >>> [has_sum_norms(width) for width in (768, 384, 30, 16_384)]
    [True, True, False, False]
    """
    return width % 4 == 0 and 16 <= width <= _MAX_WIDTH


_FLASH_CAPABILITY = 8.0
_VARLEN_TORCH = 2, 10


def supports_unpadded_attention(machine: Machine, workload: Workload, *, device: str, precision: Scalar) -> bool:
    """CUDA has a kernel for samples that lie one behind the other, in half precision (device/kernels/spans.py)."""
    if not (workload.can_pack and workload.lengths_vary) or device != "cuda" or precision not in ("bf16", "fp16"):
        return False
    accelerator = machine.accelerator(device)
    try:
        capability = float((accelerator.capability if accelerator else None) or 0)
    except ValueError:
        return False
    return capability >= _FLASH_CAPABILITY and machine.torch.is_before(*_VARLEN_TORCH) is False
