"""A training pass without dropout: generators differ between devices, so what they draw cannot be compared."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import functional as f
from torch.overrides import TorchFunctionMode

_IDENTITIES = {
    f.dropout, f.dropout1d, f.dropout2d, f.dropout3d, f.alpha_dropout, f.feature_alpha_dropout
}  # fmt: skip


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout does nothing inside, as a module, as a function or within attention; all else stays in its mode."""
    switched: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            switched.append((module, "training", module.training))
            module.training = False
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            switched.append((module, "dropout", module.dropout))
            module.dropout = 0.0
    try:
        with _FunctionsWithoutDropout():
            yield
    finally:
        for module, name, value in switched:
            setattr(module, name, value)


class _FunctionsWithoutDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _IDENTITIES:
            return args[0] if args else kwargs["input"]
        if func is f.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif not math.isclose(kwargs.get("dropout_p", 0.0), 0.0):
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
