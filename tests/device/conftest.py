"""Each device that is there: a new one inherits every promise in this folder."""

from collections.abc import Iterator

import pytest
import torch

from whet.device.abstract import AbstractDevice
from whet.device.open import _UNAVAILABLE_REASONS, open_device

KINDS = ("cpu", "fake", "cuda", "mps")


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[AbstractDevice]:
    why_not = _UNAVAILABLE_REASONS.get(request.param, lambda: None)()
    if why_not is not None:
        pytest.skip(f"no {request.param}: {why_not}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield open_device(request.param).device
    torch.set_num_threads(before)
