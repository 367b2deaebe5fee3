"""Run operators on fake tensors, substituting plausible values where a result depends on data."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

# Raised by fake tensors where an operator needs real data.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# Maximum number of input elements for which an operator is run on real tensors instead.
_MAX_REAL_ELEMENTS = 2**24
# Maximum number of values that Python may read in one trace. A loop that waits for a certain value would never end.
_MAX_READS = 2_000
# Functions that read or compare values without dispatching an operator.
_READ_FUNCTIONS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, torch.equal, torch.allclose)
_CONVERSIONS = {Tensor.__bool__: bool, Tensor.__int__: int, Tensor.__index__: int, Tensor.__float__: float}


def fake_mode() -> FakeTensorMode:
    """Return a fake tensor mode that never computes on real tensors.

    By default, torch runs operators that have no fake kernel on real tensors.
    """
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


class FakeExecutor:
    """Runs operators and functions, with plausible values for results that depend on the data of fake tensors."""

    def __init__(self, mode: FakeTensorMode | None, *, condition: bool = False) -> None:
        self._mode = mode
        self._condition = condition
        """Value of every condition that depends on fake tensors."""
        self._num_reads = 0

    @property
    def is_fake(self) -> bool:
        return self._mode is not None

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on its arguments, or on real tensors of ones if it cannot run on fake tensors.

        Ones are valid indices, and a mask of ones selects everything.
        """
        if self._mode is not None and func._schema.name.startswith("aten::_fused_") and func._schema.is_mutable:
            # Fused optimizers update in place and return nothing. They have no fake kernel.
            return None
        try:
            return func(*args, **kwargs)
        except DATA_DEPENDENT_ERRORS:
            if func is torch.ops.aten._local_scalar_dense.default:
                return self._scalar(args[0])
            if sum(t.numel() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)) > _MAX_REAL_ELEMENTS:
                raise
        assert self._mode is not None
        mode = self._mode
        with _disable_current_modes():
            real_args, real_kwargs = tree_map(_ones, (args, kwargs))
            result = func(*real_args, **real_kwargs)
        if func._schema.is_mutable:
            return args[0] if func._schema.returns else None
        return tree_map(lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value, result)

    def read_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that reads values of a tensor, such as `Tensor.item` or `Tensor.cpu`."""
        tensor = args[0]
        if func in (Tensor.cpu, Tensor.to):
            # The trace runs on the CPU, where .cpu() would return the same tensor. Copy it, so that the recorder can
            # distinguish the host tensor from the device tensor.
            copy = tensor.clone()
            return func(copy, *args[1:], **kwargs)
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return func(*args, **kwargs)
        if func is Tensor.tolist:
            return np.full(tensor.shape, self._scalar(tensor)).tolist()
        if func in (Tensor.numpy, Tensor.__array__):
            with _disable_current_modes():
                return _ones(tensor).numpy()
        if func in (torch.equal, torch.allclose):
            return self._count_read(self._condition)
        number = self._scalar(tensor)
        return _CONVERSIONS[func](number) if func in _CONVERSIONS else number

    def read_function_mode(self) -> TorchFunctionMode:
        """Return a mode that also substitutes values in functions that read them without an operator."""
        return _ReadFunctionMode(self)

    def _scalar(self, tensor: Tensor) -> Any:
        if tensor.dtype == torch.bool:
            return self._count_read(self._condition)
        if tensor.dtype.is_complex:
            return self._count_read(1 + 0j)
        return self._count_read(1.0 if tensor.dtype.is_floating_point else 1)

    def _count_read(self, value: Any) -> Any:
        self._num_reads += 1
        if self._num_reads > _MAX_READS:
            raise RuntimeError(f"Python read more than {_MAX_READS:,} values: a loop may wait for one of them")
        return value


class _ReadFunctionMode(TorchFunctionMode):
    def __init__(self, executor: FakeExecutor) -> None:
        super().__init__()
        self._executor = executor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_FUNCTIONS:
            return self._executor.read_value(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _ones(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.ones(tuple(value.shape), dtype=value.dtype)
