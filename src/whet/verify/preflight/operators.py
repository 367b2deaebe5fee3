"""Does the device have every operator that was seen?"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from whet.device.mps_operators import ALWAYS_ON_CPU, Status, operators_of_torch, status_of
from whet.verify.preflight.finding import Sighting
from whet.verify.preflight.watcher import Call, Watcher

_SVD = {torch.linalg.svd, torch.svd, torch.Tensor.svd}
_FALLBACK = "mps_fallback=on, which computes it on the CPU and costs two copies; or another operator there"
_ELSEWHERE = "another operator there"
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")


class OperatorWatcher(Watcher):
    """Looks every operator up in the list of the installed torch."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._statuses: dict[str, Status] = {}

    def operator(self, call: Call) -> Iterable[Sighting]:
        if call.phase == "making":
            return
        # CUDA has a fused attention of its own, where the trace meets the CPU's.
        if self._backend == "CUDA" and "_for_cpu" in call.name:
            return
        if call.func.namespace != "aten":
            if not _is_registered(str(call.func.name()), self._backend):
                yield Sighting(
                    "unknown-operator",
                    "warning",
                    f"{call.func.name()} is no operator of torch; nobody knows whether {self._backend} has it",
                    f"a kernel for {self._backend}, or a form of it in operators of torch",
                )
            return
        status = self._statuses.get(call.name)
        if status is None:
            status = self._statuses[call.name] = status_of(call.name, operators_of_torch(), backend=self._backend)
        if status.kind == "missing":
            cure = _FALLBACK if self._backend == "MPS" else _ELSEWHERE
            yield Sighting(
                "missing-operator",
                "error",
                f"{self._backend} has no operator aten::{status.named.partition('.')[0]}",
                cure,
            )
        elif status.kind == "on the CPU":
            yield _on_cpu(call.name)
        elif status.kind == "unknown":
            yield Sighting("unknown-operator", "warning", f"torch's list has no operator aten::{call.name}", _ELSEWHERE)

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Sighting]:  # noqa: ARG002
        if self._backend == "MPS" and "linalg_svd" in ALWAYS_ON_CPU and function in _SVD:
            yield _on_cpu("linalg_svd")


def _on_cpu(name: str) -> Sighting:
    return Sighting(
        "cpu-fall-back",
        "warning",
        f"MPS computes aten::{name} on the CPU: it waits for the GPU, copies there and back",
        "another operator there, or --device cpu if much of the time goes into it",
    )


@cache
def _is_registered(name: str, backend: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, key) for key in (backend, *_COMPOSITE))
