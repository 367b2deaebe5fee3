"""Environment variables that torch reads.

This module does not import torch, because MPS reads its fallback switch during that import. The MPS part is based on
the source code of PyTorch 2.13 (MPSFallback.mm, MPSAllocator.mm), and has not been run on a real Mac.
"""

import contextlib
import getpass
import os
import sys
import tempfile
from pathlib import Path

from whet.base import env
from whet.base.errors import UsageError
from whet.machine.environment import MPS_FALLBACK, MPS_HIGH_WATERMARK, MPS_LOW_WATERMARK
from whet.plan.environment import TORCH_WATERMARKS, WHET_WATERMARKS

FALLBACK, HIGH, LOW = MPS_FALLBACK, MPS_HIGH_WATERMARK, MPS_LOW_WATERMARK
_TORCH_WATERMARKS = dict(zip((HIGH, LOW), TORCH_WATERMARKS, strict=True))
_MAX_RATIO = 2.0
_COMPILER_PREFIXES = ("TORCHINDUCTOR_", "TORCH_COMPILE", "TORCHDYNAMO_", "TRITON_")
_COMPILER_CONFIGS = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.compiler.config",
)
# Where compiled code is cached does not change it, and whet sets these variables itself.
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_MAX_GPUS = 64
_FIX = f"export {HIGH}=1.0 {LOW}=0.9, or unset both"


def configure_before_torch(*, mps_fallback: bool, deterministic: bool = False) -> None:
    """Set the environment variables that torch reads during its import or at the first use of a device."""
    if deterministic:
        # cuBLAS reads this when it is initialized. Without it, matrix products may not be deterministic.
        env.set_defaults({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    if mps_fallback:
        env.set_defaults({FALLBACK: "1"})
    _set_watermarks()


def configure_mps_memory() -> None:
    """Set the memory watermarks of MPS, unless the user has set one.

    Call this before the first allocation or memory query of MPS. Raise UsageError for values that MPS would reject.
    """
    _set_watermarks()
    _check_watermarks()


def check_mps_memory(watermarks: tuple[float, float]) -> None:
    """Raise UsageError if the environment, which torch has already read, has watermarks that differ from the plan."""
    current = _read_ratio(HIGH), _read_ratio(LOW)
    if current != watermarks:
        raise UsageError(
            "torch has read other watermarks of MPS than those of the plan",
            got=f"high {current[0]:g} and low {current[1]:g}; the plan has {watermarks[0]:g} and {watermarks[1]:g}",
            try_=f"export {HIGH}={watermarks[0]:g} {LOW}={watermarks[1]:g}",
        )


def configure_compile_cache() -> None:
    """Cache compiled code in whet's home folder, so that the same training run starts faster the next time.

    torch's default is a temporary folder, which a reboot may delete. The cache holds code that is executed, so only the
    user may write to it.
    """
    folder = env.home() / "compiled"
    # Without a user name (KeyError) or a writable home folder, keep torch's default.
    with contextlib.suppress(OSError, KeyError):
        # Importing torch's compiler sets the variable to its default. Such a value is not the user's choice.
        default = Path(tempfile.gettempdir()).absolute() / f"torchinductor_{getpass.getuser()}"
        _make_private(folder)
        env.set_defaults({"TORCHINDUCTOR_CACHE_DIR": str(folder)}, defaults=(str(default),))
        of_torch = [str(default / "triton" / str(index)) for index in range(_MAX_GPUS)]
        env.set_defaults({"TRITON_CACHE_DIR": str(folder / "triton")}, defaults=of_torch)


def compiler_settings() -> dict[str, object]:
    """Return what the user has configured of torch's compiler: environment variables, and options set in Python.

    The code that the compiler produces depends on them, so keys of cached comparisons and measurements contain them.
    An option can only have been changed in a module that is loaded.
    """
    settings: dict[str, object] = dict(env.with_prefix(*_COMPILER_PREFIXES))
    for name in _COMPILER_CONFIGS:
        if (module := sys.modules.get(name)) is not None:
            # Not codegen_config(): it also lists options that torch itself has set to their defaults (torch 2.13).
            defaults = {option: entry.default for option, entry in module._config.items()}
            current = module.get_config_copy().items()
            settings |= {f"{name}.{option}": repr(value) for option, value in current if value != defaults.get(option)}
    return {name: value for name, value in settings.items() if name not in _FOLDERS}


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can access. Raise PermissionError if another user owns it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Check the owner, because root can change the mode of any folder.
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    folder.chmod(0o700)


def has_fallback() -> bool:
    """Return whether the MPS fallback is enabled. Any nonempty value except 0 enables it."""
    return env.read(FALLBACK) not in (None, "0")


def _set_watermarks() -> None:
    if env.read(HIGH) is None and env.read(LOW) is None:
        env.set_defaults(dict(zip((HIGH, LOW), map(str, WHET_WATERMARKS), strict=True)))


def _check_watermarks() -> None:
    high, low = _read_ratio(HIGH), _read_ratio(LOW)
    # A high watermark of 0 means no limit.
    if low <= (high or _MAX_RATIO):
        return
    if env.read(LOW) is None:
        raise UsageError(
            "MPS needs both watermarks, or none",
            got=f"{HIGH}={env.read(HIGH)} alone, below torch's default {LOW}={_TORCH_WATERMARKS[LOW]}",
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
