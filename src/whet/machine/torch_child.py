"""Describe torch and its devices in a child process, because importing torch may be slow, crash or hang.

To start fast, the child imports nothing from whet except its end of the pipe.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.base.worker import WorkerChannel


def describe_torch(channel: "WorkerChannel", _arguments: dict[str, Any]) -> int:
    """Send torch's version and devices, or the error if torch cannot be imported."""
    facts: dict[str, Any] = {}
    try:
        # Import by name, because import rules forbid `import torch` in this package.
        torch = importlib.import_module("torch")
        facts["version"] = str(torch.__version__)
        facts["num_threads"] = _optional(lambda: int(torch.get_num_threads()))
        _optional(lambda: _describe_mps(torch, facts))
        _describe_cuda(torch, facts)
    except BaseException as error:
        facts = {"error": _error_line(error)}
    channel.send(facts)
    return 0


def _describe_cuda(torch: Any, facts: dict[str, Any]) -> None:
    facts["cuda_build"] = _optional(lambda: torch.version.cuda)
    try:
        facts["cuda_available"] = bool(torch.cuda.is_available())
        if facts["cuda_available"]:
            devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
            facts["cuda_devices"] = [_describe_device(device) for device in devices]
        elif facts["cuda_build"]:
            # torch was built for CUDA, but finds no device. init() raises an error that contains the reason.
            torch.cuda.init()
    except Exception as error:
        facts["cuda_available"] = False
        facts["cuda_error"] = _error_line(error)


def _describe_device(device: Any) -> dict[str, Any]:
    return {
        "name": device.name,
        "memory_bytes": device.total_memory,
        "capability": f"{device.major}.{device.minor}",
        "num_multiprocessors": device.multi_processor_count,
    }


def _describe_mps(torch: Any, facts: dict[str, Any]) -> None:
    facts["mps_built"] = _optional(lambda: bool(torch.backends.mps.is_built()))
    facts["mps_available"] = _optional(lambda: bool(torch.backends.mps.is_available()))
    if facts["mps_available"]:
        facts["mps_recommended_bytes"] = _optional(lambda: int(torch.mps.recommended_max_memory()))
        facts["mps_num_cores"] = _optional(lambda: int(torch.backends.mps.get_core_count()))


def _optional(query: Callable[[], Any]) -> Any:
    """Return the result of a query, or None if this version of torch does not support it."""
    try:
        return query()
    except Exception:
        return None


def _error_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
