"""Small real models for tests of the core."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.batch import MicroBatch, Packed, Padded, Ragged

VOCABULARY = 31
WIDTH = 8


class TokenModel(nn.Module):
    """Predicts a token from the two before it in its own sample, on padded or packed samples; tokens count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """(sum over tokens, number of tokens), from either form."""
        values, starts = _as_packed(micro.tokens)
        place = torch.arange(len(values), device=values.device)
        since_start = place - starts[torch.bucketize(place, starts[1:], right=True)]
        one_before = self.embed(values.roll(1))
        two_before = self.embed(values.roll(2)) * (since_start >= 2)[:, None]
        logits = self.out(self.norm(torch.tanh(one_before + 0.5 * two_before)))
        is_target = since_start >= 1
        losses = functional.cross_entropy(logits, values, reduction="none")
        return (losses * is_target).sum(), is_target.sum()


def _as_packed(tokens: Padded | Packed) -> tuple[Tensor, Tensor]:
    if isinstance(tokens, Packed):
        return tokens.values, tokens.starts.long()
    is_real = torch.arange(tokens.values.shape[1], device=tokens.values.device) < tokens.lengths[:, None]
    return tokens.values[is_real], functional.pad(tokens.lengths.cumsum(0), (1, 0))


def ragged_tokens(num_samples: int, *, longest: int, seed: int) -> Ragged:
    """Samples of unequal token counts, at least two tokens each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (num_samples,), generator=generator).tolist()
    return Ragged.of([torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths])


def convnet(*, dropout: float = 0.0) -> nn.Module:
    """A small convolutional net on 1 x 8 x 8 images, four classes."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * 3 * 3, 4),
    )


def images(num_samples: int, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, 1, 8, 8, generator=generator), torch.randint(
        0, 4, (num_samples,), generator=generator
    )
