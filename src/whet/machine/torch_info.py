"""torch's version and devices, queried in a child process because importing torch may be slow or fail."""

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from whet.base import env
from whet.base.model import FrozenModel
from whet.machine.facts import TorchFacts
from whet.machine.programs import clean_name

TIMEOUT_SECONDS = 60.0
_MARK = "whet-torch-answer "
_LONGEST_ANSWER = 1_000_000
_LONGEST_ERROR = 300
_CHUNK = 65_536
_PAUSE_SECONDS = 0.01

# The child first points stdout at stderr, so that nothing torch or its libraries print mixes with the answer; the
# mark finds the answer behind what a start-up file of the user's may have printed before that.
_SOURCE = r"""
import os
answer_to = os.dup(1)
os.dup2(2, 1)
import json

def in_one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())

def ask(question):
    try:
        return question()
    except Exception:
        return None

def ask_cuda(torch, answer):
    answer["cuda_build"] = ask(lambda: torch.version.cuda)
    try:
        answer["cuda_available"] = bool(torch.cuda.is_available())
        if answer["cuda_available"]:
            answer["cuda_devices"] = [describe(torch.cuda.get_device_properties(index))
                                      for index in range(torch.cuda.device_count())]
        elif answer["cuda_build"]:
            torch.cuda.init()
    except Exception as error:
        answer["cuda_available"] = False
        answer["cuda_error"] = in_one_line(error)

def describe(device):
    return {
        "name": device.name,
        "memory_bytes": device.total_memory,
        "capability": f"{device.major}.{device.minor}",
        "num_multiprocessors": device.multi_processor_count,
    }

def ask_mps(torch, answer):
    answer["mps_built"] = ask(lambda: bool(torch.backends.mps.is_built()))
    answer["mps_available"] = ask(lambda: bool(torch.backends.mps.is_available()))
    if answer["mps_available"]:
        answer["mps_recommended_bytes"] = ask(lambda: int(torch.mps.recommended_max_memory()))
        answer["mps_num_cores"] = ask(lambda: int(torch.backends.mps.get_core_count()))

answer = {}
try:
    import torch
    answer["version"] = str(torch.__version__)
    answer["num_threads"] = ask(lambda: int(torch.get_num_threads()))
    ask(lambda: ask_mps(torch, answer))
    ask_cuda(torch, answer)
except BaseException as error:
    answer = {"error": in_one_line(error)}
os.write(answer_to, ("\n" + MARK + json.dumps(answer) + "\n").encode())
os._exit(0)
"""


class CudaInfo(FrozenModel):
    name: str | None = None
    memory_bytes: int | None = None
    capability: str | None = None
    num_multiprocessors: int | None = None


class TorchInfo(FrozenModel):
    """What the child wrote; `error` stands alone when torch could not be asked."""

    version: str | None = None
    num_threads: int | None = None
    cuda_build: str | None = None
    cuda_available: bool | None = None
    cuda_devices: tuple[CudaInfo, ...] = ()
    cuda_error: str | None = None
    """What torch says when CUDA does not start."""
    mps_built: bool | None = None
    mps_available: bool | None = None
    mps_recommended_bytes: int | None = None
    mps_num_cores: int | None = None
    error: str | None = None

    def facts(self) -> TorchFacts:
        """The part that belongs to the machine's record."""
        if self.error is not None:
            return TorchFacts(error=self.error)
        return TorchFacts(
            version=self.version, cuda_build=self.cuda_build, mps_built=self.mps_built, num_threads=self.num_threads
        )


def installed_version() -> str | None:
    """torch's version as its installer wrote it down, without importing it; None when nothing is written."""
    try:
        return clean_name(importlib.metadata.version("torch"))
    except (importlib.metadata.PackageNotFoundError, ValueError, OSError):
        return None


def is_installed() -> bool:
    """Whether `import torch` would find something."""
    try:
        return installed_version() is not None or importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def torch_query(*, timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[Callable[[], TorchInfo]]:
    """Starts the question at once and yields the function that waits for the answer: ask other things meanwhile."""
    if not is_installed():
        yield lambda: TorchInfo(error="torch is not installed")
        return
    deadline = time.monotonic() + timeout_seconds
    try:
        child = _start_child()
    except OSError as error:
        reason = _one_line(f"Python could not be started to ask torch: {error.strerror}")
        yield lambda: TorchInfo(error=reason)
        return
    try:
        yield lambda: _read_child(child, deadline=deadline)
    finally:
        _end_child(child)


def query_torch(*, timeout_seconds: float = TIMEOUT_SECONDS) -> TorchInfo:
    """Asks and waits."""
    with torch_query(timeout_seconds=timeout_seconds) as answer:
        return answer()


def _start_child() -> subprocess.Popen[bytes]:
    # -P: a file named torch.py in the working folder is not torch.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"MARK = {_MARK!r}{_SOURCE}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env.c_locale_environment(),
        bufsize=0,
    )


def _read_child(child: subprocess.Popen[bytes], *, deadline: float) -> TorchInfo:
    """Reads until the child has ended, not until the pipe is closed: a process it left behind may keep it open."""
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    written = b""
    while len(written) < _LONGEST_ANSWER:
        code = child.poll()
        chunk = child.stdout.read(_CHUNK)
        written += chunk or b""
        if chunk:
            continue
        if code is not None:
            how = f"{describe_exit(code)} when it was asked"
            return parse_torch_info(written) or TorchInfo(error=f"{_torch_name()} {how}")
        if time.monotonic() > deadline:
            return TorchInfo(error=f"{_torch_name()} did not answer in time")
        time.sleep(_PAUSE_SECONDS)
    return TorchInfo(error=f"{_torch_name()} wrote without end when it was asked")


def _end_child(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def parse_torch_info(raw: bytes) -> TorchInfo | None:
    """The answer in what the child wrote, or None if there is none that can be believed."""
    marked = [line for line in raw.decode("utf-8", errors="replace").splitlines() if line.startswith(_MARK)]
    try:
        answer = TorchInfo.model_validate(json.loads(marked[-1].removeprefix(_MARK)))
    except (IndexError, ValueError, RecursionError, ValidationError):
        return None
    if answer.error is None:
        return answer
    return TorchInfo(error=_one_line(f"{_torch_name()} cannot be imported: {answer.error}"))


def describe_exit(code: int) -> str:
    """The end of a process in words: "was killed by SIGSEGV", "ended with exit code 3"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _torch_name() -> str:
    return f"torch {installed_version() or ''}".strip()


def _one_line(text: str) -> str:
    shown = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return shown if len(shown) <= _LONGEST_ERROR else shown[: _LONGEST_ERROR - 3] + "..."
