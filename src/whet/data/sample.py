"""Single samples: seeded reading, transport between processes, and hashing."""

import contextlib
import hashlib
import random
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.data.order import sample_seed

_WHET_ROOT = str(Path(__file__).parent.parent)


class BadSampleError(WhetError):
    """Raised if the dataset fails to return a sample. The original error is the cause, or a note from a worker."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (self.what, self.got, self.try_)


def _rebuild_error(what: str, got: str | None, try_: str | None) -> BadSampleError:
    return BadSampleError(what, got=got, try_=try_)


class DatasetReader:
    """Reads samples with generators seeded by (seed, epoch, sample), and restores the generators afterwards."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __call__(self, request: tuple[int, int]) -> Any:
        epoch, sample = request
        with seeded_rng(sample_seed(self._seed, epoch, sample)):
            try:
                return self._dataset[sample]
            except WhetError:
                raise
            except Exception as error:
                raise _explain(error, sample) from error


def _explain(error: Exception, sample: int) -> BadSampleError:
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (_WHET_ROOT, "<", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    user_frames = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames[-1:]
    frame = user_frames[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}()"
    what = f"{type(error).__name__}: {error}"[:300]
    explained = BadSampleError(
        f"sample {sample} could not be read",
        got=f"{what} ({where})",
        try_=f"dataset[{sample}] in a Python shell, or exclude the sample",
    )
    explained.add_note("".join(traceback.format_exception(error)))
    return explained


@contextlib.contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's generators while entered, and restore them on exit."""
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    # Datasets may use any of the three generators for augmentation.
    random.seed(seed)
    # NumPy accepts 32-bit seeds only.
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.set_rng_state(saved[2])


# --- transport -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PackedTensor:
    """A tensor as bytes. torch would send it through a file in /dev/shm, which is small in containers."""

    data: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack_sample(value: Any) -> Any:
    """Convert the tensors of a sample to plain bytes."""
    if type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu":
        flat = value.detach().contiguous().reshape(-1)
        return _PackedTensor(flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))
    return _map_nested(pack_sample, value)


def unpack_sample(value: Any) -> Any:
    """Undo `pack_sample`."""
    if isinstance(value, _PackedTensor):
        if not value.data.size:
            return torch.empty(value.shape, dtype=value.dtype)
        return torch.from_numpy(value.data).view(value.dtype).reshape(value.shape)
    return _map_nested(unpack_sample, value)


def _map_nested(change: Any, value: Any) -> Any:
    if type(value) is dict:
        return {name: change(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    return value


# --- identity --------------------------------------------------------------------------------------------------------


def sample_digest(value: Any) -> bytes:
    """Hash a sample: tensors, numbers, strings and collections by value, other objects by type."""
    digest = hashlib.sha256()
    _digest(digest, value)
    return digest.digest()


def _digest(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor | np.ndarray):
        tensor = value if isinstance(value, Tensor) else None
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if tensor is not None and tensor.layout == torch.strided:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for name, item in value.items():
            digest.update(f"{name}=".encode())
            _digest(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}:".encode())
        for item in value:
            _digest(digest, item)
    elif isinstance(value, bool | int | float | complex | str | bytes | None):
        digest.update(f"{type(value).__name__} {value!r}".encode())
    else:
        digest.update(type(value).__name__.encode())
