"""Which attention has kernels of whet's own? One that turns queries and keys by their places, and has few of them."""

SHORT_TURNED = "short turned attention"
"""What a workload's layers say about it."""
MOST_PLACES = 128
"""What one program of a kernel holds; more would need sums over blocks, as torch's kernels have them."""
_SIZES = (32, 64, 128)


def has_own_kernels(num_places: int, size: int) -> bool:
    """Whether so many places with heads of this size are few enough.

    >>> has_own_kernels(97, 64), has_own_kernels(512, 64), has_own_kernels(97, 48)
    (True, False, False)
    """
    return num_places <= MOST_PLACES and size in _SIZES
