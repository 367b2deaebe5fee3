"""Which parts of a model repeat?"""

from collections.abc import Iterator

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: what the outermost lists of modules hold, else what the outermost sequences do."""
    for kind in (nn.ModuleList, nn.Sequential):
        found = (block for group in _outermost(model, kind) for block in group.children())
        blocks = list(dict.fromkeys(found))
        if any(True for block in blocks for _ in block.parameters()):
            return blocks
    return []


def _outermost(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    if isinstance(module, kind):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, kind)
