"""Data workers look like those of torch's DataLoader to datasets and to worker_init_fn."""

import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from whet.data.adapters import LoadingConfig, open_source
from whet.data.batch import Position
from whet.data.sample import BadSampleError
from whet.data.workers import _describe_exit
from whet.device.cpu import CpuDevice

pytestmark = pytest.mark.torch


class _Numbers(Dataset):
    offset = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return torch.tensor([index + self.offset, info.id, info.num_workers])


def _set_offset(number: int) -> None:
    info = get_worker_info()
    assert info.id == number
    assert info.seed >= 0
    info.dataset.offset = 10


def _fail(_number: int) -> None:
    raise RuntimeError("no library for this worker")


def _rows(worker_init_fn) -> list[list[int]]:
    loader = DataLoader(_Numbers(), batch_size=2, num_workers=2, worker_init_fn=worker_init_fn)
    loading = LoadingConfig(workers=2)
    source = open_source(loader, CpuDevice(), global_batch_size=2, seed=0, loading=loading)
    try:
        return [row for batch in source.batches(Position()) for row in batch.collated.tolist()]
    finally:
        source.close()


def test_worker_init_fn_and_dataset_see_the_worker() -> None:
    assert _rows(_set_offset) == [[10, 0, 2], [11, 0, 2], [12, 1, 2], [13, 1, 2], [14, 0, 2], [15, 0, 2]]


def test_an_error_of_worker_init_fn_is_shown() -> None:
    with pytest.raises(BadSampleError, match="worker_init_fn failed") as raised:
        _rows(_fail)
    assert "no library for this worker" in str(raised.value)


def test_the_end_of_a_worker_is_described() -> None:
    unnamed = max(signal.valid_signals()) - 1
    assert _describe_exit(-unnamed) == f"killed by signal {unnamed}", "a real-time signal"
    assert _describe_exit(-signal.SIGKILL) == "killed by SIGKILL, perhaps for lack of memory"
    assert (_describe_exit(None), _describe_exit(3)) == ("closed its pipe", "ended with exit code 3")
