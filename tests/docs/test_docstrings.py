"""Examples in docstrings are correct."""

import doctest
import importlib
import pkgutil

import pytest

import whet

pytestmark = pytest.mark.torch

MODULES = [result.name for result in pkgutil.walk_packages(whet.__path__, "whet.") if result.name != "whet.__main__"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    if name.startswith("whet.device.kernels.") and name.endswith("_triton"):
        pytest.importorskip("triton", reason="triton comes with torch for CUDA")
    assert doctest.testmod(importlib.import_module(name)).failed == 0
