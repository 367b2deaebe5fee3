"""What do layers that GPUs compute in one kernel keep for the backward pass? Stand-ins that compute nothing."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_KEPT = {"lstm": 5, "gru": 6}
"""Vectors of the hidden size that cuDNN keeps for each layer and step in time, besides what goes to the next layer.

From two sizes in pytorch/pytorch#2895: 736,000,000 bytes for an LSTM of 4 layers, 864,000,000 for the GRU, both of 320
over 25,000 steps. The workspace there was the weights' size and little more. MPS is taken to be alike."""


class Recurrent(Function):
    """An LSTM or GRU as cuDNN and MPS compute it: all steps in time at once, with one reserve for the way back."""

    @staticmethod
    def lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """In place of torch.lstm, with padded or packed inputs."""
        output, *states = _recur("lstm", args)
        return output, states[0], states[1]

    @staticmethod
    def gru(*args: Any) -> tuple[Tensor, Tensor]:
        """In place of torch.gru."""
        output, *states = _recur("gru", args)
        return output, states[0]

    @staticmethod
    def forward(ctx: Any, kind: str, directions: int, layers: int, data: Tensor, *rest: Tensor) -> Any:
        states, weights = rest[: 2 if kind == "lstm" else 1], rest[2 if kind == "lstm" else 1 :]
        hidden = weights[1].shape[1]
        places = data.numel() // data.shape[-1]
        output = data.new_empty((*data.shape[:-1], hidden * directions))
        reserve = data.new_empty(places * directions * hidden * (_KEPT[kind] * layers + layers - 1))
        ctx.workspace = sum(weight.numel() for weight in weights)
        data.new_empty(ctx.workspace)
        ctx.save_for_backward(data, output, reserve, *states, *weights)
        return output, *(state.new_empty(state.shape) for state in states)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        data, _, _, *rest = ctx.saved_tensors
        workspace = data.new_empty(ctx.workspace)
        given = tuple(torch.empty_like(tensor) for tensor in (data, *rest))
        del workspace, gradients
        return None, None, None, *given


def _recur(kind: str, args: tuple[Any, ...]) -> Any:
    """The arguments of torch.lstm and torch.gru, once for padded and once for packed samples."""
    is_packed = isinstance(args[1], Tensor) and not isinstance(args[3], bool)
    if is_packed:
        data, _, states, weights, _, layers, _, _, is_two_way = args
    else:
        data, states, weights, _, layers, _, _, is_two_way, _ = args
    states = states if isinstance(states, tuple | list) else (states,)
    tensors = (data, *states, *weights)
    if torch.is_autocast_enabled("cpu"):
        tensors = tuple(tensor.to(torch.get_autocast_dtype("cpu")) for tensor in tensors)
    return Recurrent.apply(kind, 2 if is_two_way else 1, layers, *tensors)


class RmsNorm(Function):
    """One kernel that keeps its input and a number a row."""

    @staticmethod
    def call(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:  # noqa: A002, ARG004
        """In place of torch.rms_norm."""
        return RmsNorm.apply(input, tuple(normalized_shape), weight)

    @staticmethod
    def forward(ctx: Any, data: Tensor, shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        rows = data.shape[: data.dim() - len(shape)]
        ctx.save_for_backward(data, data.new_empty(rows, dtype=torch.float32), *([] if weight is None else [weight]))
        return torch.empty_like(data)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ARG004
        data, _, *weight = ctx.saved_tensors
        return torch.empty_like(data), None, torch.empty_like(weight[0]) if weight else None
