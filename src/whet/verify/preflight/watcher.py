"""What a watcher of a trace is told: every call of an operator, and every call of a function that leads to some."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from whet.verify.preflight.finding import Sighting

Phase = Literal["making", "training", "updating"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator, after it was made."""

    func: torch._ops.OpOverload
    name: str
    """With its overload: "add.Tensor"."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    outputs: list[Tensor]
    phase: Phase
    is_backward: bool

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]

    @property
    def new_outputs(self) -> Iterator[Tensor]:
        """Those that are no views of what went in."""
        given = {tensor.untyped_storage()._cdata for tensor in self.inputs}
        return (tensor for tensor in self.outputs if tensor.untyped_storage()._cdata not in given)


class Watcher:
    """Looks at calls; the base sees nothing."""

    def operator(self, call: Call) -> Iterable[Sighting]:  # noqa: ARG002
        return ()

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Sighting]:  # noqa: ARG002
        """A function of torch that is about to be called, before it is taken apart into operators."""
        return ()
