"""Kernels in triton's interpreter, in a separate process: their results can be tested without a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def complaints(program: str) -> str:
    """Run a program in a separate process and return the end of its error, if any; skip if triton cannot interpret."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in sys.path)  # noqa: PTH100
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this triton's interpreter cannot count loops with this numpy")
    return done.stderr[-2000:] if done.returncode else ""
