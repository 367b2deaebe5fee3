"""Activation checkpointing: activations inside a model's blocks are computed again in the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from whet.base.errors import WhetError


@contextmanager
def recompute_blocks(model: nn.Module) -> Iterator[None]:
    """While entered, only the inputs of blocks are kept. The model stays the user's: no name and no weight changes.

    Draws are repeated too, so that dropout is the same in both passes and the gradient stays what it was.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise WhetError(
            "this model has no blocks whose activations could be computed again",
            got=type(model).__name__,
            try_="an nn.ModuleList or nn.Sequential of blocks, or a smaller micro_batch",
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            # The class's own forward shows again.
            del block.forward


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: what the outermost lists of modules hold, else what the outermost sequences do."""
    for kind in (nn.ModuleList, nn.Sequential):
        blocks = [block for group in _outermost(model, kind) for block in group.children()]
        if any(True for block in blocks for _ in block.parameters()):
            return blocks
    return []


def _outermost(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    if isinstance(module, kind):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, kind)
