"""Random draws of a computation: recorded once, and repeated for some of its samples.

Two computations of the same samples can be compared only if dropout and noise are the same in both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_IN_PLACE = {
    _aten.bernoulli_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_,
}  # fmt: skip
_NEW = {
    _aten.rand, _aten.randn, _aten.randint, _aten.rand_like, _aten.randn_like, _aten.randint_like, _aten.bernoulli,
    _aten.normal, _aten.poisson, _aten.multinomial,
}  # fmt: skip


class UnrepeatableDrawError(Exception):
    """Raised for random numbers that do not belong to single samples, or that cannot be repeated."""


class RecordedDraws:
    """The random draws of a computation over `num_samples` samples."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.drawn: list[tuple[Any, Tensor]] = []
        """Operators and what they drew, in order."""

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record all draws while entered."""
        with _Recorder(self):
            yield

    @contextmanager
    def repeat(self, rows: slice) -> Iterator[None]:
        """Draw the recorded numbers of these samples while entered."""
        replayer = _Replayer(self, rows)
        with replayer:
            yield
        if replayer.number != len(self.drawn):
            raise UnrepeatableDrawError("the number of random draws depends on the number of samples")


def _is_random(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    # Attention kernels draw only with dropout.
    for number, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[number] if number < len(args) else (kwargs or {}).get("dropout_p", argument.default_value)
            return bool(given)
    return True


class _Recorder(TorchDispatchMode):
    def __init__(self, draws: RecordedDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_random(func, args, kwargs):
            # native_dropout returns its output and the mask, which is what it drew.
            drawn = result[1] if func.overloadpacket is _aten.native_dropout else result
            if not isinstance(drawn, Tensor) or func.overloadpacket not in _IN_PLACE | _NEW | {_aten.native_dropout}:
                raise UnrepeatableDrawError(f"{func.overloadpacket} draws inside a kernel")
            if drawn.dim() == 0 or drawn.shape[0] != self._draws.num_samples:
                raise UnrepeatableDrawError(f"random numbers of shape {tuple(drawn.shape)} for the whole batch")
            self._draws.drawn.append((func.overloadpacket, drawn.clone()))
        return result


class _Replayer(TorchDispatchMode):
    def __init__(self, draws: RecordedDraws, rows: slice) -> None:
        super().__init__()
        self._draws, self._rows = draws, rows
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_random(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        if self.number >= len(self._draws.drawn) or self._draws.drawn[self.number][0] is not func.overloadpacket:
            raise UnrepeatableDrawError("the random draws depend on the number of samples")
        drawn = self._draws.drawn[self.number][1][self._rows]
        self.number += 1
        if func.overloadpacket is _aten.native_dropout:
            share = args[1]
            return args[0] * drawn / (1 - share) if share < 1 else torch.zeros_like(args[0]), drawn
        if func.overloadpacket in _IN_PLACE:
            return args[0].copy_(drawn)
        return drawn.clone()
