"""What MPS reads from the environment, and when. No torch here: the fall-back is read while torch is imported.

Written from PyTorch's sources (ATen/mps/MPSFallback.mm and MPSAllocator.mm of 2.13); never run on a real Mac.
"""

from whet.base import env

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
_WATERMARKS = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "1.0", "PYTORCH_MPS_LOW_WATERMARK_RATIO": "0.9"}


def before_torch(*, mps_fallback: bool) -> None:
    """To be called before torch is imported; afterwards the fall-back can no longer be switched."""
    if mps_fallback:
        env.set_unless_set({FALLBACK: "1"})
    before_first_allocation()


def before_first_allocation() -> None:
    """Sets both watermarks (with a high one below 1.4 alone, the first MPS call dies), unless you have set one."""
    if not any(env.read(name) for name in _WATERMARKS):
        env.set_unless_set(_WATERMARKS)


def has_fallback() -> bool:
    """Whether this process was started with the fall-back: any value but 0 switches it on."""
    return env.read(FALLBACK) not in (None, "0")
