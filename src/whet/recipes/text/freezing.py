"""Which layers of a pretrained model stay as they are?"""

from typing import Any, Literal

from torch import nn

from whet.base.errors import UsageError

Freeze = Literal["none", "embeddings", "encoder"] | int
"""A number: the embeddings and so many of the first layers."""


def freeze(network: Any, what: Freeze) -> None:
    """Stops the gradient at some of the weights; the head always learns, and a pooler belongs to it."""
    if what == "none":
        return
    layers = _layers(network.base_model)
    if isinstance(what, int) and what > len(layers):
        raise UsageError("freeze counts more layers than the model has", got=f"freeze={what}", try_=f"{len(layers)}")
    num_frozen = {"embeddings": 0, "encoder": len(layers)}.get(str(what), what)
    assert isinstance(num_frozen, int)
    learning = {id(parameter) for layer in layers[num_frozen:] for parameter in layer.parameters()}
    pooler = getattr(network.base_model, "pooler", None)
    learning |= {id(parameter) for parameter in (pooler.parameters() if isinstance(pooler, nn.Module) else ())}
    for parameter in network.base_model.parameters():
        parameter.requires_grad_(id(parameter) in learning)


def _layers(encoder: nn.Module) -> nn.ModuleList:
    """The stack of blocks: the longest list of modules that an encoder has."""
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UsageError("the model's layers cannot be told apart", got=type(encoder).__name__, try_="freeze=none")
    return max(lists, key=len)
