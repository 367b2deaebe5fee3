"""Query the version and devices of torch in a child process, because importing torch may be slow or fail.

This module does not import torch. A child that hangs, crashes or sends invalid data gives `TorchInfo(error=...)`.
"""

import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from whet.base import env
from whet.base.model import FrozenModel
from whet.base.process import describe_exit_code
from whet.base.units import one_line
from whet.base.worker import JsonWorker, WorkerExitError, WorkerTimeoutError
from whet.machine.facts import TorchFacts
from whet.machine.programs import clean_name

# Importing torch can be slow if its files are not in the page cache.
TIMEOUT_SECONDS = 60.0
_TARGET = "whet.machine.torch_child:describe_torch"
_MAX_ERROR_LENGTH = 300


class CudaInfo(FrozenModel):
    name: str | None = None
    memory_bytes: int | None = None
    capability: str | None = None
    num_multiprocessors: int | None = None


class TorchInfo(FrozenModel):
    """What the child process reports about torch. Only `error` is set if torch could not be queried."""

    version: str | None = None
    num_threads: int | None = None
    cuda_build: str | None = None
    cuda_available: bool | None = None
    cuda_devices: tuple[CudaInfo, ...] = ()
    cuda_error: str | None = None
    """Reason why CUDA does not start, as reported by torch."""
    mps_built: bool | None = None
    mps_available: bool | None = None
    mps_recommended_bytes: int | None = None
    mps_num_cores: int | None = None
    error: str | None = None

    def facts(self) -> TorchFacts:
        """Return the facts about torch that are stored with a machine."""
        if self.error is not None:
            return TorchFacts(error=self.error)
        return TorchFacts(
            version=self.version, cuda_build=self.cuda_build, mps_built=self.mps_built, num_threads=self.num_threads
        )


def installed_version() -> str | None:
    """Return the version from the package metadata without importing torch, or None if torch is not installed."""
    try:
        return clean_name(importlib.metadata.version("torch"))
    except (importlib.metadata.PackageNotFoundError, ValueError, OSError):
        return None


def is_installed() -> bool:
    """Return whether a module named torch is installed, without importing it."""
    try:
        return installed_version() is not None or importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def torch_query(*, timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[Callable[[], TorchInfo]]:
    """Start the query and yield a function that waits for its result, so that the caller can read other facts first."""
    if not is_installed():
        yield lambda: TorchInfo(error="torch is not installed")
        return
    deadline = time.monotonic() + timeout_seconds
    try:
        # Discard the output, so that a torch that prints without end cannot fill the disk.
        worker = JsonWorker(_TARGET, environment=env.c_locale_environment(), log=Path(os.devnull))
    except OSError as error:
        reason = _short_line(f"Python could not be started to query torch: {error.strerror}")
        yield lambda: TorchInfo(error=reason)
        return
    with worker:
        yield lambda: _receive(worker, deadline=deadline)


def _receive(worker: JsonWorker, *, deadline: float) -> TorchInfo:
    try:
        info = TorchInfo.model_validate(worker.receive(max(0.0, deadline - time.monotonic())))
    except WorkerTimeoutError:
        return TorchInfo(error=f"{_torch_name()} did not answer in time")
    except WorkerExitError:
        code = worker.wait(1.0)
        how = "no message" if code is None else describe_exit_code(code)
        return TorchInfo(error=f"{_torch_name()} could not be queried: {how}")
    except ValidationError:
        return TorchInfo(error=f"{_torch_name()} could not be queried: its message is invalid")
    if info.error is None:
        return info
    return TorchInfo(error=_short_line(f"{_torch_name()} cannot be imported: {info.error}"))


def _torch_name() -> str:
    return f"torch {installed_version() or ''}".strip()


def _short_line(text: str) -> str:
    shown = one_line(text)
    return shown if len(shown) <= _MAX_ERROR_LENGTH else shown[: _MAX_ERROR_LENGTH - 3] + "..."
