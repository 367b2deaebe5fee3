"""The tiny recursive model as a language model: two states per place, refined again and again by one small network.

A chain of causal maps is causal, so this is a language model for any number of cycles as long as attention is. All
places are refined at once; a place's states begin from the same two vectors and depend on earlier tokens only.
"""

import torch
from torch import Tensor, nn

from whet.recipes.chat.arch import Arch
from whet.recipes.chat.model.causal import CausalModel
from whet.recipes.layers import AttentionArgs, PostNormBlock, refine, truncated_normal_


class RecursiveModel(CausalModel):
    """N passes of T outer cycles of n + 1 applications of L blocks; the states go on, gradients do not."""

    answer: Tensor
    latent: Tensor

    def __init__(self, arch: Arch, *, vocab_size: int, dropout: float) -> None:
        super().__init__(arch, vocab_size=vocab_size, dropout=dropout)
        self.blocks = nn.ModuleList(
            PostNormBlock(arch.hidden_size, num_heads=arch.num_heads, expansion=arch.expansion, dropout=dropout)
            for _ in range(arch.L_layers)
        )
        for name in ("answer", "latent"):
            self.register_buffer(name, truncated_normal_(torch.empty(arch.hidden_size), deviation=1.0))

    def states(self, x: Tensor, look: AttentionArgs) -> tuple[Tensor, ...]:
        def net(state: Tensor, added: Tensor) -> Tensor:
            state = state + added
            for block in self.blocks:
                state = block(state, look)
            return state

        y, z = (start.to(x.dtype).expand_as(x) for start in (self.answer, self.latent))
        found = []
        for _ in range(self.arch.supervision):
            y, z = refine(net, y.detach(), z.detach(), x, outer=self.arch.H_cycles, inner=self.arch.L_cycles)
            found.append(y)
        return tuple(found)
