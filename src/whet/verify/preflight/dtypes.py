"""Are all numbers of a format that MPS has?"""

from collections.abc import Iterable

import torch
from torch import Tensor

from whet.verify.preflight.finding import Sighting
from whet.verify.preflight.watcher import Call, Watcher

WIDE = {torch.float64: "float32", torch.complex128: "complex64"}
_HALF = (torch.float16, torch.bfloat16)


def wide(name: str, dtype: torch.dtype) -> Sighting:
    return Sighting(
        "float64",
        "error",
        f"{name} is {_short(dtype)}, which MPS does not have",
        f"dtype=torch.{WIDE[dtype]}, or .to(torch.{WIDE[dtype]}); numpy's numbers are float64 unless told",
    )


def is_unsupported(dtype: torch.dtype) -> bool:
    """Formats of 8 bits for floating point: Metal has none."""
    return "float8" in str(dtype) or "float4" in str(dtype)


class DtypeWatcher(Watcher):
    """The first operator that makes a number of a format that MPS lacks; those that only go on with it are not told."""

    def __init__(self) -> None:
        self._seen: set[torch.dtype] = set()

    def operator(self, call: Call) -> Iterable[Sighting]:
        if call.phase == "making":
            return
        for dtype in {tensor.dtype for tensor in call.outputs}:
            if not (dtype in WIDE or is_unsupported(dtype)) or any(t.dtype == dtype for t in call.inputs):
                continue
            # A number of Python may have any width: it is the host's.
            if all(tensor.dim() == 0 for tensor in call.outputs) and not call.inputs:
                continue
            # Gradients have the format of what they belong to, and that was told.
            if call.is_backward and dtype in self._seen:
                continue
            self._seen.add(dtype)
            if dtype in WIDE:
                yield wide("a tensor that is made here", dtype)
            else:
                yield Sighting("unsupported-dtype", "error", f"MPS has no {_short(dtype)}", "float16 or bfloat16")
        if call.base == "convolution" and _is_half_transposed_3d(call):
            yield Sighting(
                "unsupported-dtype", "error", "MPS has no transposed conv3d in half precision", "float32 for it"
            )


def _is_half_transposed_3d(call: Call) -> bool:
    weight = call.args[1]
    return isinstance(weight, Tensor) and bool(call.args[6]) and weight.dim() == 5 and weight.dtype in _HALF


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
