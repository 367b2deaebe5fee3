"""Make checks that compare an operator on the device with the CPU, forward and backward."""

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.errors import describe_error
from whet.device.operators import mps_kernels, torch_operators
from whet.doctor.check import Check, CheckFinding, DeviceUnderTest, differs, failed, good, not_applicable
from whet.verify.tolerance import FP32_TOLERANCE, relative_error, tensor_leaves

_MISSING = "is not currently implemented for the MPS device"
_NO_FLOAT64 = "MPS framework doesn't support float64"


def operator(
    name: str,
    compute: Callable[..., Any],
    *inputs: Tensor,
    tolerance: float = FP32_TOLERANCE,
    is_quick: bool = False,
) -> Check:
    """Return a check of a function of tensors: its outputs, and the gradients of floating-point inputs."""

    def run(target: DeviceUnderTest) -> CheckFinding:
        return compare_with_cpu(lambda where: forward_and_backward(compute, inputs, where), target, tolerance=tolerance)

    return Check(name=name, run=run, is_quick=is_quick)


def layer(
    name: str,
    make: Callable[[], nn.Module],
    *inputs: Tensor,
    tolerance: float = FP32_TOLERANCE,
    is_quick: bool = False,
) -> Check:
    """Return a check of a module: its output, its buffers, and the gradients of its inputs and parameters."""

    def run(target: DeviceUnderTest) -> CheckFinding:
        torch.manual_seed(0)
        on_cpu = make()

        def compute(where: torch.device) -> Any:
            module = copy.deepcopy(on_cpu).to(where)
            result = forward_and_backward(module, inputs, where)
            return result, [p.grad for p in module.parameters() if p.grad is not None], list(module.buffers())

        return compare_with_cpu(compute, target, tolerance=tolerance)

    return Check(name=name, run=run, is_quick=is_quick)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normally distributed numbers that are the same on every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_integers(*shape: int, below: int, seed: int = 0) -> Tensor:
    """Return integers in [0, below) that are the same on every call."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def forward_and_backward(compute: Callable[..., Any], inputs: tuple[Tensor, ...], where: torch.device) -> Any:
    """Return the outputs, and the gradients of the inputs for fixed gradients of the outputs."""
    # Copy the inputs, on the CPU too, because an in-place operator would change them for the other device.
    moved = [t.clone().to(where).requires_grad_(t.is_floating_point()) for t in inputs]
    # Pass views, because autograd forbids in-place operators on leaf tensors.
    outputs = tensor_leaves(compute(*[t.view_as(t) if t.requires_grad else t for t in moved]))
    roots = [output for output in outputs if output.requires_grad]
    if roots:
        seeds = [draw(*root.shape, seed=7 + index).to(where, root.dtype) for index, root in enumerate(roots)]
        torch.autograd.backward(roots, seeds)
    return outputs, [t.grad for t in moved if t.requires_grad and t.grad is not None]


def compare_with_cpu(
    compute: Callable[[torch.device], Any], target: DeviceUnderTest, *, tolerance: float = FP32_TOLERANCE
) -> CheckFinding:
    """Compute on the CPU and on the device, and compare the results. Convert errors on the device to findings."""
    expected = compute(torch.device("cpu"))
    try:
        result = compute(target.torch_device)
    except Exception as error:
        return _explain_error(error)
    return compare_results(result, expected, tolerance=tolerance, right="equal", wrong="differs from the CPU")


def compare_results(result: Any, expected: Any, *, tolerance: float, right: str, wrong: str) -> CheckFinding:
    """Compare a result with the expected one, and return a finding with the text `right` or `wrong`."""
    error = relative_error(result, expected)
    if error <= tolerance:
        return good(right, error=error)
    return differs(f"{wrong}: largest relative error {error:.2g}", error=error, tolerance=tolerance)


def _explain_error(error: Exception) -> CheckFinding:
    """Return a finding for an error. An operator without an MPS kernel in torch's operator list is not a problem."""
    text = str(error)
    if isinstance(error, NotImplementedError) and _MISSING in text:
        name = text.partition("'aten::")[2].partition("'")[0]
        if name and name not in _mps_kernel_names():
            return not_applicable(f"missing, as torch's list says: aten::{name}", outcome="missing", operator=name)
        return failed(f"missing, although torch's list has it: aten::{name}", outcome="missing", operator=name)
    if isinstance(error, TypeError) and _NO_FLOAT64 in text:
        return not_applicable("Metal has no float64", outcome="refused")
    return failed(describe_error(error), outcome="refused")


@lru_cache(maxsize=1)
def _mps_kernel_names() -> frozenset[str]:
    return frozenset(operator.name for operator in mps_kernels(torch_operators()))
