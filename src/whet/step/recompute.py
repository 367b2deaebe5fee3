"""Activation checkpointing: activations inside a model's blocks are computed again in the backward pass."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from whet.base.errors import WhetError
from whet.step.blocks import find_blocks


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
    before = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        # Only where it is needed: torch does not compile what has contexts of its own.
        again = partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = partial(again, context_fn=partial(_contexts, block)) if _norms(block) else again
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            # The class's own forward shows again, or the one that the user had put before it.
            del block.forward
            if own is not None:
                block.forward = own


def has_statistics(model: nn.Module) -> bool:
    """Whether a block takes running statistics, which the repeated pass must leave alone."""
    return any(_norms(block) for block in find_blocks(model))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For the first pass and for the repeated one, which must not count in running statistics again."""
    return nullcontext(), _statistics_left_alone(block)


@contextmanager
def _statistics_left_alone(block: nn.Module) -> Iterator[None]:
    norms = _norms(block)
    kept = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: b if b is None else b.clone() for name, b in norm._buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)


def _norms(block: nn.Module) -> list[nn.Module]:
    return [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
