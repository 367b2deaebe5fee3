"""Read the environment variables that fix settings of torch and of the C library before a plan is made."""

from whet.base import env
from whet.machine.facts import EnvironmentFacts

MPS_FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
MPS_HIGH_WATERMARK = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
MPS_LOW_WATERMARK = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
DISABLE_COMPILE = "DISABLE_COMPILE"
"""A variable that some training scripts use. torch does not read it, so whet does."""
_COMPILE_DISABLED = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", DISABLE_COMPILE)


def read_environment(*, is_deterministic: bool | None = None) -> EnvironmentFacts:
    """Return the settings that environment variables fix.

    `is_deterministic` is torch's flag, or None if torch is not loaded.
    """
    threads = next(((name, number) for name in _THREADS if (number := _count(env.read(name)))), (None, None))
    fallback = env.read(MPS_FALLBACK)
    return EnvironmentFacts(
        # torch treats every value except 0 as enabled.
        mps_fallback=None if fallback is None else fallback != "0",
        mps_high_watermark=_ratio(env.read(MPS_HIGH_WATERMARK)),
        mps_low_watermark=_ratio(env.read(MPS_LOW_WATERMARK)),
        threads_variable=threads[0],
        threads=threads[1],
        compile_disabled_by=next((name for name in _COMPILE_DISABLED if env.read(name) == "1"), None),
        malloc_variable=env.malloc_variable(),
        wait_variable=env.wait_variable(),
        spins_long=env.spins_long(),
        is_deterministic=is_deterministic,
    )


def _count(text: str | None) -> int | None:
    # OpenMP allows a list, one number for each nested level: "4,2".
    first = (text or "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and 0 < int(first) <= 1024 else None


def _ratio(text: str | None) -> float | None:
    """Parse a watermark. Return None if it is not a number from 0 to 2, which torch rejects when MPS is initialized."""
    try:
        ratio = float(text or "")
    except ValueError:
        return None
    return ratio if 0 <= ratio <= 2 else None
