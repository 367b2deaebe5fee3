"""A pass without dropout: generators differ between devices, so what they draw cannot be compared."""

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
# cuDNN has no backward pass for a recurrent layer in eval mode.
_DRAW_NOTHING = (nn.RNNBase, nn.modules.batchnorm._BatchNorm)


@contextmanager
def without_dropout(model: nn.Module, *, is_quiet: bool = False) -> Iterator[None]:
    """Dropout does nothing inside, as a module, as a function or within attention; all else stays in its mode.

    If it is to be quiet, modules are in eval mode too, so that those that draw by themselves do not, such as stochastic
    depth; but for layers that compute otherwise in training and draw nothing.
    """
    kept: list[tuple[nn.Module, str, Any]] = []

    def switch(module: nn.Module, name: str, value: Any) -> None:
        kept.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            switch(module, "dropout", 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd) or (is_quiet and not isinstance(module, _DRAW_NOTHING)):
            switch(module, "training", False)
    try:
        with _FunctionsWithoutDropout():
            yield
    finally:
        for module, name, value in kept:
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
