"""Checks that compare an operator on the device with the CPU, forward and backward."""

import copy
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.device.operators import mps_kernels, torch_operators
from whet.doctor.check import Check, CheckFinding, DeviceUnderTest, differs, failed, first_line, good, not_applicable
from whet.verify.tolerance import FP32_TOLERANCE, relative_error, tensor_leaves


def compare_results(
    found: Any, expected: Any, *, tolerance: float = FP32_TOLERANCE, right: str, wrong: str
) -> CheckFinding:
    """A finding from one comparison."""
    error = relative_error(found, expected)
    if error <= tolerance:
        return good(right, error=error)
    return differs(f"{wrong}: largest relative error {error:.2g}", error=error, tolerance=tolerance)


Inputs = Callable[[], tuple[Any, ...]]
_MISSING = "is not currently implemented for the MPS device"
_NO_FLOAT64 = "MPS framework doesn't support float64"


def operator(
    name: str,
    compute: Callable[..., Any],
    *inputs: Tensor,
    tolerance: float = FP32_TOLERANCE,
    is_quick: bool = False,
) -> Check:
    """A case for a function of tensors; those with a fraction get a gradient."""
    return Check(name=name, run=partial(_try_function, compute, inputs, tolerance), is_quick=is_quick)


def layer(
    name: str,
    make: Callable[[], nn.Module],
    *inputs: Tensor,
    tolerance: float = FP32_TOLERANCE,
    is_quick: bool = False,
) -> Check:
    """A case for a module: its output, and the gradients of inputs and parameters."""
    return Check(name=name, run=partial(_try_module, make, inputs, tolerance), is_quick=is_quick)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Ordinary numbers, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_integers(*shape: int, below: int, seed: int = 0) -> Tensor:
    """Whole numbers from 0, the same every time."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def _try_function(
    compute: Callable[..., Any], inputs: tuple[Tensor, ...], tolerance: float, place: DeviceUnderTest
) -> CheckFinding:
    expected = forward_and_backward(compute, inputs, torch.device("cpu"))
    return _compare_operator(
        lambda: forward_and_backward(compute, inputs, place.device.torch_device), expected, tolerance
    )


def _try_module(
    make: Callable[[], nn.Module], inputs: tuple[Tensor, ...], tolerance: float, place: DeviceUnderTest
) -> CheckFinding:
    torch.manual_seed(0)
    on_cpu = make()

    def run(where: torch.device) -> Any:
        module = copy.deepcopy(on_cpu).to(where)
        found = forward_and_backward(module, inputs, where)
        return found, [p.grad for p in module.parameters() if p.grad is not None], list(module.buffers())

    expected = run(torch.device("cpu"))
    return _compare_operator(lambda: run(place.device.torch_device), expected, tolerance)


def forward_and_backward(compute: Callable[..., Any], inputs: tuple[Tensor, ...], where: torch.device) -> Any:
    """The outputs, and the gradients of the inputs for fixed gradients of the outputs."""
    # Copies, on the CPU too: the inputs stay as they are for the other device.
    moved = [t.clone().to(where).requires_grad_(t.is_floating_point()) for t in inputs]
    # Through an operator that owns no memory, so that one in place does not meet a leaf.
    outputs = tensor_leaves(compute(*[t.view_as(t) if t.requires_grad else t for t in moved]))
    roots = [output for output in outputs if output.requires_grad]
    if roots:
        seeds = [draw(*root.shape, seed=7 + place).to(where, root.dtype) for place, root in enumerate(roots)]
        torch.autograd.backward(roots, seeds)
    return outputs, [t.grad for t in moved if t.requires_grad and t.grad is not None]


def _compare_operator(run: Callable[[], Any], expected: Any, tolerance: float) -> CheckFinding:
    try:
        found = run()
    except Exception as error:
        return explain_error(error)
    return compare_results(found, expected, tolerance=tolerance, right="equal", wrong="differs from the CPU")


def explain_error(error: Exception) -> CheckFinding:
    """What an operator that raises means: missing as torch's own list says, or a surprise."""
    text = str(error)
    if isinstance(error, NotImplementedError) and _MISSING in text:
        name = text.partition("'aten::")[2].partition("'")[0]
        if name and name not in _with_kernel():
            return not_applicable(f"missing, as torch's list says: aten::{name}", outcome="missing", operator=name)
        return failed(f"missing, although torch's list has it: aten::{name}", outcome="missing", operator=name)
    if isinstance(error, TypeError) and _NO_FLOAT64 in text:
        return not_applicable("Metal has no float64", outcome="refused")
    return failed(first_line(error), outcome="refused")


@lru_cache(maxsize=1)
def _with_kernel() -> frozenset[str]:
    return frozenset(operator.name for operator in mps_kernels(torch_operators()))
