"""The layers and shapes that whet's CUDA kernels support.

A workload lists its layers by the names below. Rules K3, K4, K7, K8 and M6 use them.
"""

from whet.machine.facts import Machine
from whet.plan.setting import Scalar
from whet.plan.values import HALF_PRECISIONS
from whet.plan.workload import Workload

# Attention over at most MAX_SHORT_LENGTH positions with rotary embeddings.
SHORT_ROTARY_ATTENTION = "short rotary attention"
# Attention within spans of a row, for packed texts or rows of several documents.
SPAN_ATTENTION = "span attention"
# Group norms followed by SiLU or ReLU.
GROUP_NORM_ACTIVATION = "group norm and activation"
# A norm of a residual sum: the output of a layer, optionally with dropout, plus its input.
ADD_NORM = "add and norm"

# Positions that fit into one program of the kernel. Longer sequences need a loop over blocks, as in torch's kernels.
MAX_SHORT_LENGTH = 128
_SHORT_HEAD_SIZES = (32, 64, 128)
# A head size of 128 is not supported, because the backward kernel would spill registers.
_SPAN_HEAD_SIZES = (32, 64)

# Maximum channels per program, unless one group has more. In half precision they take 64 bytes, two memory sectors.
_MAX_CHANNELS = 32
# Elements that the registers of a program hold without spilling.
_MAX_ELEMENTS = 16_384
# Width of a row that a program can hold together with its gradients.
_MAX_WIDTH = 4096

# The major CUDA compute capability that the kernels were written for and measured on.
KERNEL_CAPABILITY = "9"
# torch's varlen attention needs flash attention (capability 8.0) and torch 2.10.
_FLASH_CAPABILITY = 8.0
_VARLEN_TORCH = 2, 10


def supports_short_attention(num_positions: int, head_size: int) -> bool:
    """Return whether the kernel for short rotary attention supports this shape.

    >>> supports_short_attention(97, 64), supports_short_attention(512, 64), supports_short_attention(97, 48)
    (True, False, False)
    """
    return num_positions <= MAX_SHORT_LENGTH and head_size in _SHORT_HEAD_SIZES


def supports_span_attention(head_size: int) -> bool:
    """Return whether the kernel for attention within spans supports this head size.

    >>> supports_span_attention(64), supports_span_attention(128)
    (True, False)
    """
    return head_size in _SPAN_HEAD_SIZES


def supports_unpadded_attention(machine: Machine, workload: Workload, *, device: str, precision: Scalar) -> bool:
    """Return whether torch's varlen kernel supports attention over packed samples: in half precision on CUDA only."""
    if not (workload.can_pack and workload.lengths_vary) or device != "cuda" or precision not in HALF_PRECISIONS:
        return False
    accelerator = machine.accelerator(device)
    try:
        capability = float((accelerator.capability if accelerator else None) or 0)
    except ValueError:
        return False
    return capability >= _FLASH_CAPABILITY and machine.torch.is_before(*_VARLEN_TORCH) is False


def attention_kernel_reason(layers: tuple[str, ...], *, lengths_vary: bool, lengths: object) -> str | None:
    """Return the reason to use whet's attention kernels for these layers, or None if they do not apply.

    >>> attention_kernel_reason((SPAN_ATTENTION,), lengths_vary=True, lengths="packed_bucketed")
    'packed texts: attention stays within each text'
    """
    if SHORT_ROTARY_ATTENTION in layers:
        return "short sequences: rotary embedding and attention in one kernel"
    if SPAN_ATTENTION not in layers:
        return None
    if lengths_vary:
        return "packed texts: attention stays within each text" if str(lengths).startswith("packed") else None
    return "rows hold several documents: attention stays within each document"


def has_norm_kernels(machine: Machine, *, device: str, precision: Scalar) -> bool:
    """Return whether whet's norm kernels were measured on this kind of device, in half precision."""
    accelerator = machine.accelerator(device)
    capability = (accelerator.capability if accelerator else None) or ""
    is_known = device == "cuda" and capability.partition(".")[0] == KERNEL_CAPABILITY
    return is_known and precision in HALF_PRECISIONS


def norm_kernel_reason(layers: tuple[str, ...], *, layout: object) -> str | None:
    """Return the reason to use whet's norm kernels for these layers, or None if they do not apply.

    >>> norm_kernel_reason((GROUP_NORM_ACTIVATION,), layout="channels_last")
    'norm and activation in one kernel without copies'
    """
    if GROUP_NORM_ACTIVATION in layers and layout == "channels_last":
        return "norm and activation in one kernel without copies"
    return "sum and norm in one kernel" if ADD_NORM in layers else None


def supports_group_norm(num_cells: int, width: int, num_groups: int) -> bool:
    """Return whether the kernel supports these groups.

    The number of channels of a group must be a power of two, and a group must fit into one program.

    >>> supports_group_norm(13 * 13, 128, 8), supports_group_norm(7 * 7, 24, 4), supports_group_norm(64 * 64, 512, 8)
    (True, False, False)
    """
    # `size & (size - 1)` is 0 only for a power of two.
    size = width // num_groups
    return size & (size - 1) == 0 and sum(cell_tiles(num_cells)) * size <= _MAX_ELEMENTS


def groups_per_program(num_cells: int, num_groups: int, size: int) -> int:
    """Return the number of groups of `size` channels per program, a power of two that divides `num_groups`.

    >>> [groups_per_program(169, *g) for g in ((8, 16), (3, 16), (8, 128))], groups_per_program(676, 8, 16)
    ([2, 1, 1], 1)
    """
    most = min(_MAX_CHANNELS, _MAX_ELEMENTS // sum(cell_tiles(num_cells)))
    count = 1
    # More groups per program give fewer and longer memory accesses, until the registers run out.
    while num_groups % (2 * count) == 0 and 2 * count * size <= most:
        count *= 2
    return count


def cell_tiles(num_cells: int) -> tuple[int, int]:
    """Return the sizes of two tiles that hold all cells, as powers of two. The first is full, the second may be 0.

    >>> cell_tiles(169), cell_tiles(64), cell_tiles(1)
    ((128, 64), (64, 0), (1, 0))
    """
    first = 1 << (num_cells.bit_length() - 1)
    rest = num_cells - first
    return first, 1 << (rest - 1).bit_length() if rest else 0


def supports_add_norm(width: int) -> bool:
    """Return whether the add and norm kernels support rows of `width`.

    A row must fit into one program, and its width must be a multiple of 4, because dropout draws 4 numbers at once.

    >>> [supports_add_norm(width) for width in (768, 384, 30, 16_384)]
    [True, True, False, False]
    """
    return width % 4 == 0 and 16 <= width <= _MAX_WIDTH
