"""Check a GPT for a Mac on any computer: it reads its loss in every step, which makes Python wait for the GPU.

whet check examples/check_gpt.py --machine m2-air-8gb
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import whet


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention_in(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.inner(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


losses: list[float] = []


def loss(gpt: nn.Module, tokens: Tensor) -> Tensor:
    value = functional.cross_entropy(gpt(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    losses.append(value.item())
    return value


def model():
    gpt = Gpt(vocabulary=16_000, width=768, layers=12, heads=12, length=512)
    return gpt, (torch.randint(0, 16_000, (8, 512)),), loss


if __name__ == "__main__":
    for finding in whet.check(model, machine="m2-air-8gb").findings:
        print(f"{finding.severity}, line {finding.place.line}: {finding.what}")
