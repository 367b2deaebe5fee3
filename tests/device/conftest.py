"""The device fixture: a test that uses it runs on every device of this machine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from whet.device.abstract import AbstractDevice

_KINDS = (
    "cpu",
    "fake",
    pytest.param("cuda", marks=pytest.mark.gpu("cuda")),
    pytest.param("mps", marks=pytest.mark.gpu("mps")),
)


@pytest.fixture(params=_KINDS)
def device(request: pytest.FixtureRequest) -> "Iterator[AbstractDevice]":
    # Imported here: this folder also has tests that need no torch.
    import torch

    from fake_device import FakeDevice
    from whet.device.open import open_device

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield FakeDevice() if request.param == "fake" else open_device(request.param).device
    torch.set_num_threads(before)
