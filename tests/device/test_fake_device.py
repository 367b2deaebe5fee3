"""The fake device, and which errors count as out of memory."""

import pytest
import torch

from fake_device import FakeDevice
from whet.device.errors import is_out_of_memory

pytestmark = pytest.mark.torch


def test_out_of_memory_is_recognized_and_similar_errors_are_not() -> None:
    device = FakeDevice()
    with pytest.raises(RuntimeError) as caught:
        device.memory.hold(10**12)
    assert is_out_of_memory(caught.value)
    with pytest.raises(RuntimeError) as on_cpu:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(on_cpu.value)
    for text, is_oom in {
        "CUDA out of memory. Tried to allocate 2.00 GiB": True,
        "Invalid buffer size: 16.00 GiB": True,
        "CUDA error: an illegal memory access was encountered": False,
        "the log says MPS backend out of memory": False,
        "not enough memory for a good joke": False,
    }.items():
        assert is_out_of_memory(RuntimeError(text)) is is_oom, text
    assert not is_out_of_memory(ValueError("CUDA out of memory"))


def test_the_fake_device_has_its_own_clock_and_memory() -> None:
    device = FakeDevice(limit_bytes=100)
    start = device.mark()
    device.pass_time(2.5)
    assert device.elapsed_seconds(start, device.mark()) == 2.5
    device.memory.hold(60)
    device.memory.release(60)
    device.memory.hold(30)
    assert (device.memory.usage().allocated, device.memory.usage().peak) == (30, 60)
