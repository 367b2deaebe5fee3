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

_MAX_REAL_ELEMENTS = 2**24
_MAX_READS = 2_000
"""Numbers that Python may ask for in one trace: a loop that ends with a number would never end."""
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What fake tensors raise where only real ones could go on."""
_READ_FUNCTIONS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, torch.equal, torch.allclose)
"""Functions that read numbers past all operators, or compare them."""


def fake_mode() -> FakeTensorMode:
    """Fake tensors that never compute: torch would run an operator without a fake form for real, at full size."""
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


class FakeExecutor:
    """Calls operators and functions; of real tensors the answer is the true one."""

    def __init__(self, mode: FakeTensorMode | None, *, truth: bool = False) -> None:
        self._mode = mode
        self._truth = truth
        """What a condition is taken to be."""
        self._num_asked = 0

    @property
    def are_fake(self) -> bool:
        return self._mode is not None

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result; of ones where fake tensors cannot tell: that is in range, and masks nothing."""
        if self._mode is not None and func._schema.name.startswith("aten::_fused_") and func._schema.is_mutable:
            # They update in place and give nothing; torch would run them for real, for want of a fake form.
            return None
        try:
            return func(*args, **kwargs)
        except DATA_DEPENDENT_ERRORS:
            if func is torch.ops.aten._local_scalar_dense.default:
                return self._number(args[0])
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

    def value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function that asks for a value gives."""
        tensor = args[0]
        if func in (Tensor.cpu, Tensor.to):
            # On the CPU, where the trace is made, it would be the same tensor, and then the host's.
            copy = tensor.clone()
            return func(copy, *args[1:], **kwargs)
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return func(*args, **kwargs)
        if func is Tensor.tolist:
            return np.full(tensor.shape, self._number(tensor)).tolist()
        if func in (Tensor.numpy, Tensor.__array__):
            with _disable_current_modes():
                return _ones(tensor).numpy()
        if func in (torch.equal, torch.allclose):
            return self._asked(self._truth)
        number = self._number(tensor)
        return {Tensor.__bool__: bool, Tensor.__int__: int, Tensor.__index__: int, Tensor.__float__: float}.get(
            func, lambda same: same
        )(number)

    def to_readers(self) -> TorchFunctionMode:
        """While entered, whoever reads numbers past all operators gets an answer too."""
        return _ReadFunctionMode(self)

    def _number(self, tensor: Tensor) -> Any:
        if tensor.dtype == torch.bool:
            return self._asked(self._truth)
        if tensor.dtype.is_complex:
            return self._asked(1 + 0j)
        return self._asked(1.0 if tensor.dtype.is_floating_point else 1)

    def _asked(self, answer: Any) -> Any:
        self._num_asked += 1
        if self._num_asked > _MAX_READS:
            raise RuntimeError(f"Python asked for more than {_MAX_READS:,} numbers: a loop may wait for one of them")
        return answer


class _ReadFunctionMode(TorchFunctionMode):
    def __init__(self, answers: FakeExecutor) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_FUNCTIONS:
            return self._answers.value(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _ones(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.ones(tuple(value.shape), dtype=value.dtype)
