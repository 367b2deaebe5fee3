"""What torch reads from the environment, and when. No torch here: MPS's fall-back is read while torch is imported.

The MPS part was written from PyTorch's sources (MPSFallback.mm and MPSAllocator.mm of 2.13); never run on a real Mac.
"""

import contextlib
import getpass
import tempfile
from pathlib import Path

from whet.base import env
from whet.base.errors import UsageError

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
_WHET_WATERMARKS = {HIGH: "1.0", LOW: "0.9"}
_TORCH_WATERMARKS = {HIGH: 1.7, LOW: 1.4}
_MAX_RATIO = 2.0
_FIX = f"export {HIGH}=1.0 {LOW}=0.9, or unset both"


def configure_before_torch(*, mps_fallback: bool, deterministic: bool = False) -> None:
    """To be called before torch is imported; afterwards the fall-back can no longer be switched."""
    if deterministic:
        # Read by cuBLAS when it starts: without it some products have no deterministic form.
        env.set_defaults({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    if mps_fallback:
        env.set_defaults({FALLBACK: "1"})
    _set_watermarks()


def configure_mps_memory() -> None:
    """To be called before MPS is asked for memory, or for how much there is: then it reads the watermarks.

    Sets both, unless you have set one; a pair that MPS would die of is refused here, where the cure can be told.
    """
    _set_watermarks()
    _check_watermarks()


def configure_compile_cache() -> None:
    """What torch compiles is kept with whet's other caches, so that the next start of a run or a like one is fast.

    torch's own place is a temporary folder, which a restart of the machine empties.
    """
    folder = env.home() / "compiled"
    # A user without a name (KeyError) or a home that cannot be written: then torch's own place will do.
    with contextlib.suppress(OSError, KeyError):
        # Importing torch's compiler, which others may have done, writes its place into the variable.
        torchs = Path(tempfile.gettempdir()).absolute() / f"torchinductor_{getpass.getuser()}"
        folder.mkdir(parents=True, exist_ok=True)
        env.set_defaults({"TORCHINDUCTOR_CACHE_DIR": str(folder)}, defaults=(str(torchs),))


def watermark_note() -> str | None:
    """What to know about watermarks that are not the plan's; None when they are."""
    found = {name: env.read(name) for name in _WHET_WATERMARKS}
    if found == _WHET_WATERMARKS:
        return None
    if _read_ratio(HIGH) == 0:
        return f"{HIGH}=0.0 removes the limit of GPU memory: the Mac may swap or freeze, and the GPU fail silently"
    said = ", ".join(f"{name}={value}" for name, value in found.items() if value is not None)
    return f"the watermarks are yours, not the plan's: {said}"


def has_fallback() -> bool:
    """Whether this process was started with the fall-back: any value but 0 switches it on."""
    return env.read(FALLBACK) not in (None, "0")


def _set_watermarks() -> None:
    if not any(env.read(name) for name in _WHET_WATERMARKS):
        env.set_defaults(_WHET_WATERMARKS)


def _check_watermarks() -> None:
    high, low = _read_ratio(HIGH), _read_ratio(LOW)
    most = high or _MAX_RATIO
    if low <= most:
        return
    if env.read(LOW) is None:
        raise UsageError(
            "MPS needs both watermarks, or none",
            got=f"{HIGH}={env.read(HIGH)} alone, below torch's own {LOW}={_TORCH_WATERMARKS[LOW]}",
            try_=_FIX,
        )
    raise UsageError(
        "MPS's low watermark must not be above the high one", got=f"{LOW}={low:g}, {HIGH}={high:g}", try_=_FIX
    )


def _read_ratio(name: str) -> float:
    value = env.read(name)
    if value is None:
        return _TORCH_WATERMARKS[name]
    try:
        ratio = float(value)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= _MAX_RATIO:
        raise UsageError(f"{name} must be a number from 0 to 2", got=repr(value), try_=_FIX)
    return ratio
