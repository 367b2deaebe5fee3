"""Small real models for tests of the core."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.batch import Micro
from whet.data.ragged import Packed, Padded, Ragged

VOCABULARY = 31
WIDTH = 8


class TokenModel(nn.Module):
    """Predicts the next token from the mean of those before it, on padded or packed samples; tokens count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, micro: Micro) -> tuple[Tensor, Tensor]:
        """(sum over tokens, number of tokens), from either form."""
        tokens = micro.tokens
        values, starts = _as_packed(tokens)
        hidden = self.norm(torch.tanh(self.embed(values)))
        sums = functional.pad(hidden.cumsum(0), (0, 0, 1, 0))
        place = torch.arange(len(values), device=values.device)
        owner = torch.bucketize(place, starts[1:], right=True)
        begin = starts[owner]
        mean = (sums[place] - sums[begin]) / (place - begin).clamp(min=1)[:, None].to(hidden.dtype)
        is_target = place > begin
        losses = functional.cross_entropy(self.out(mean), values, reduction="none")
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
