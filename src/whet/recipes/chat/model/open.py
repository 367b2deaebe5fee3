"""Which model does a config stand for?"""

from whet.recipes.chat.arch import Arch
from whet.recipes.chat.model.causal import CausalModel
from whet.recipes.chat.model.gpt import Gpt
from whet.recipes.chat.model.trm import RecursiveModel


def open_model(arch: Arch, *, vocab_size: int, dropout: float = 0.0) -> CausalModel:
    """With its first weights, drawn from torch's generator."""
    kinds: dict[str, type[CausalModel]] = {"trm": RecursiveModel, "gpt": Gpt}
    return kinds[arch.kind](arch, vocab_size=vocab_size, dropout=dropout)
