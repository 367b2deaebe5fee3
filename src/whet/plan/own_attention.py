"""Which attention has kernels of whet's own? One with few places, and one of many spans that lie side by side."""

SHORT_TURNED = "short turned attention"
"""What a workload's layers say about it."""
MOST_PLACES = 128
"""What one program of a kernel holds; more would need sums over blocks, as torch's kernels have them."""
_SIZES = (32, 64, 128)

SPANS = "attention in spans"
"""What a workload's layers say of texts one behind the other, and of rows that hold several documents."""
_SPAN_SIZES = (32, 64)
"""With heads of 128 the way back spills its registers."""


def has_own_kernels(num_places: int, size: int) -> bool:
    """Whether so many places with heads of this size are few enough.

    >>> has_own_kernels(97, 64), has_own_kernels(512, 64), has_own_kernels(97, 48)
    (True, False, False)
    """
    return num_places <= MOST_PLACES and size in _SIZES


def has_span_kernels(size: int) -> bool:
    """Whether spans can be attended with heads of this size.

    >>> has_span_kernels(64), has_span_kernels(128)
    (True, False)
    """
    return size in _SPAN_SIZES


def own_attention_reason(layers: tuple[str, ...], *, lengths_vary: bool, lengths: object) -> str | None:
    """Why kernels of whet's own can attend such a workload; None where they have nothing to do.

    >>> own_attention_reason((SPANS,), lengths_vary=True, lengths="packed few")
    'texts lie one behind the other: each is attended alone'
    """
    if SHORT_TURNED in layers:
        return "few places: one kernel turns and attends"
    if SPANS not in layers:
        return None
    if lengths_vary:
        return "texts lie one behind the other: each is attended alone" if str(lengths).startswith("packed") else None
    return "rows hold several documents: each is attended alone"
