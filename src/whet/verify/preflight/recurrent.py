"""How is a recurrent layer traced in short? By two of its places: the others ask for the same operators again."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_PLACES = 2
_BATCH_FIRST = 8
"""Where the arguments say so; packed sequences have another order and are traced as they are."""


def is_long_recurrence(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is a recurrent layer over more places than need to be seen."""
    if getattr(function, "__name__", "") not in _LAYERS or len(args) != _BATCH_FIRST + 1:
        return False
    sequence = args[0]
    return sequence.dim() == 3 and isinstance(args[1], Tensor | tuple | list) and sequence.shape[_time(args)] > _PLACES


def in_short(
    function: Callable[..., Any], args: tuple[Any, ...], unseen: Callable[[], AbstractContextManager[None]]
) -> tuple[Any, ...]:
    """What the layer gives, from its first places; the rest of the output is a copy, which belongs to no device."""
    time, sequence = _time(args), args[0]
    with unseen():
        start = sequence.narrow(time, 0, _PLACES)
    output, *state = function(start, *args[1:])
    with unseen():
        rest = output.narrow(time, 0, 1)
        shape = [sequence.shape[time] - _PLACES if axis == time else -1 for axis in range(3)]
        output = torch.cat((output, rest.expand(shape)), dim=time)
    return (output, *state)


def _time(args: tuple[Any, ...]) -> int:
    return 1 if args[_BATCH_FIRST] else 0
