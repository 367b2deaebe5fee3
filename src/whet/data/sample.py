"""Single samples: seeded reading, transport between processes, and hashing."""

import contextlib
import copy
import hashlib
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils import worker as torch_worker

from whet.base.errors import WhetError
from whet.base.origin import frame_name, user_frames
from whet.data.batch import Position
from whet.data.order import collate_seed, mix_seed, sample_seed


class BadSampleError(WhetError):
    """Raised if the dataset fails to return a sample.

    The original error is its cause, or a note if it occurred in a worker.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (self.what, self.got, self.try_)


def _rebuild_error(what: str, got: str | None, try_: str | None) -> BadSampleError:
    return BadSampleError(what, got=got, try_=try_)


class DatasetReader:
    """Reads samples and collates batches, each under its own seed, and restores the generators afterward."""

    def __init__(
        self,
        dataset: Any,
        seed: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate_fn = collate_fn
        self._worker_init_fn = worker_init_fn
        self._is_initialized = worker_init_fn is None

    @property
    def has_collate(self) -> bool:
        """Whether there is a collate function for whole batches."""
        return self._collate_fn is not None

    def init_worker(self, number: int, count: int) -> None:
        """Prepare a worker process as torch's DataLoader does: set `get_worker_info()` and call worker_init_fn."""
        seed = mix_seed(self._seed, number) % 2**63
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=number, num_workers=count, seed=seed, dataset=self._dataset
        )
        self._is_initialized = True
        if self._worker_init_fn is not None:
            with seeded_rng(seed):
                try:
                    self._worker_init_fn(number)
                except Exception as error:
                    raise _explain(error, "worker_init_fn failed", f"worker_init_fn({number})") from error

    def read(self, epoch: int, sample: int, key: int) -> Any:
        """Return one sample. Its random numbers depend on (seed, epoch, key)."""
        if not self._is_initialized:
            # The plan reads in this process, but the dataset may depend on worker_init_fn, which may open files.
            info = torch_worker._worker_info
            try:
                self.init_worker(0, 1)
            finally:
                torch_worker._worker_info = info
        with seeded_rng(sample_seed(self._seed, epoch, key)):
            try:
                return self._dataset[sample]
            except WhetError:
                raise
            except Exception as error:
                raise _explain(error, f"sample {sample} could not be read", f"dataset[{sample}]") from error

    def collate(self, samples: list[Any], epoch: int, after: Position) -> Any:
        """Return the collated global batch, or None without a collate function."""
        if self._collate_fn is None:
            return None
        with seeded_rng(collate_seed(self._seed, epoch, after)):
            try:
                collated = self._collate_fn(samples)
            except WhetError:
                raise
            except Exception as error:
                raise _explain(error, "the collate function failed", "collate_fn([dataset[0], dataset[1]])") from error
        if collated is None:
            raise BadSampleError("the collate function returned nothing", got="None", try_="return the batch")
        return collated

    def identify(self, ids: list[int]) -> "SampleIdentity":
        """Read and collate a few samples twice. Return their digests, and whether both reads agree."""
        samples = [self.read(0, number, number) for number in ids]
        digests = [sample_digest(sample) for sample in samples]
        # If the results differ, the data is random and cannot be identified.
        is_repeatable = all(sample_digest(self.read(0, n, n)) == d for n, d in zip(ids, digests, strict=True))
        return SampleIdentity(tuple(digests), is_repeatable, is_repeatable and self._is_collate_repeatable(samples))

    def _is_collate_repeatable(self, samples: list[Any]) -> bool:
        if self._collate_fn is None or not samples:
            return True
        try:
            # Copy the collate function, so that its state does not change.
            collate_fn = copy.deepcopy(self._collate_fn)
            collated = []
            for _ in range(2):
                with seeded_rng(self._seed):
                    collated.append(sample_digest(collate_fn(copy.deepcopy(samples))))
        except Exception:
            # The collate function may need a full batch.
            return True
        return collated[0] == collated[1]


@dataclass(frozen=True, slots=True)
class SampleIdentity:
    """The digests of a few samples, and whether they are the same when read and collated again."""

    digests: tuple[bytes, ...] = ()
    is_repeatable: bool = True
    is_collate_repeatable: bool = True


def _explain(error: Exception, problem: str, call: str) -> BadSampleError:
    where = frame_name((user_frames(error) or traceback.extract_tb(error.__traceback__))[-1])
    what = f"{type(error).__name__}: {error}"[:300]
    explained = BadSampleError(
        problem,
        got=f"{what} ({where})",
        try_=f"{call} in a Python shell",
    )
    explained.add_note("".join(traceback.format_exception(error)))
    return explained


@contextlib.contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch on entry, and restore them on exit."""
    saved = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    # Datasets may use any of the three generators for augmentation.
    random.seed(seed)
    # NumPy accepts only 32-bit seeds.
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.set_rng_state(saved[2])


@contextlib.contextmanager
def seeded_generator(generator: Any, seed: int) -> Iterator[None]:
    """Seed the user's generator on entry, if there is one, and restore it on exit."""
    if not isinstance(generator, torch.Generator):
        yield
        return
    # Restore it, because the initial seed of the user's generator is the seed of the run.
    saved = generator.get_state()
    generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        generator.set_state(saved)


# --- transport -------------------------------------------------------------------------------------------------------


class _SamplePickler(ForkingPickler):
    """Pickles tensors as bytes. torch would send them through files in /dev/shm, which is small in containers."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        # Keep the memory format, because kernels may round differently for channels_last.
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
        if not value.permute(order).is_contiguous():
            order = list(range(value.dim()))
        data = value.detach().permute(order).contiguous()
        array = data.reshape(-1).view(torch.uint8).numpy()
        return _unpack_tensor, (array, value.dtype, tuple(data.shape), tuple(order))


def _unpack_tensor(array: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    flat = torch.from_numpy(array).view(dtype) if array.size else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).permute(tuple(np.argsort(order)))


def pack_samples(value: Any) -> memoryview:
    """Return samples or batches of any structure as bytes for another process."""
    try:
        return _SamplePickler.dumps(value)
    except Exception as error:
        raise BadSampleError(
            "a batch cannot be sent from a worker",
            got=f"{type(error).__name__}: {error}",
            try_='workers=0 (in Python: overrides={"workers": 0}), or batches that can be pickled',
        ) from error


# --- sample identity -------------------------------------------------------------------------------------------------


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
