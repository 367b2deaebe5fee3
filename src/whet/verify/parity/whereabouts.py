"""Where in a model is an operator at work? Its module and the line of the user's code, in the backward pass too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from whet.verify.lines import line_at_work


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a training step."""

    phase: str
    """forward, backward or update"""
    module: str | None = None
    line: str | None = None
    """file.py:42"""


class Whereabouts:
    """Follows a step: which module computes, and which forward operator a backward one belongs to."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._optimizer = optimizer
        self._open: list[str] = []
        self._is_updating = False
        self._forward: dict[int, Spot] = {}
        """By the number that autograd gives to the node of a forward operator."""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While a step is made."""
        self._forward.clear()
        hooks = []
        for module, name in self._names.items():
            hooks.append(module.register_forward_pre_hook(self._enter(name)))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        if self._optimizer is not None:
            hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._set_updating(True)))
            hooks.append(self._optimizer.register_step_post_hook(lambda *_: self._set_updating(False)))
        try:
            # One thread: what is noted on the way must be in the order of the operators.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def here(self) -> Spot:
        """The place of the operator that is at work; to be asked from a dispatch mode, once for each."""
        node = torch._C._current_autograd_node()
        if node is not None:
            forward = self._forward.get(node._sequence_nr())
            return Spot("backward") if forward is None else Spot("backward", forward.module, forward.line)
        if self._is_updating:
            return Spot("update")
        spot = Spot("forward", self._open[-1] if self._open else None, _line())
        # The node was made just before its operator runs; operators without one come later and must not replace it.
        self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, spot)
        return spot

    def _enter(self, name: str) -> Any:
        return lambda *_: self._open.append(name)

    def _leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop()

    def _set_updating(self, value: bool) -> None:
        self._is_updating = value


def _line() -> str | None:
    line = line_at_work()
    return None if line is None else f"{Path(line[0]).name}:{line[1]}"
