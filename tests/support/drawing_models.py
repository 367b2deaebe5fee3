"""Ten small models that draw random numbers, each in another way. Their losses take the model and a tensor."""

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as f

WIDTH = 12
NUM_SAMPLES = 8


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 8))
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return f.mse_loss(self.decode(z), x) + 0.1 * divergence


class Diffusion(nn.Module):
    """Predicts the noise that was added at a random time. The last layer is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.time = nn.Linear(WIDTH, 24), nn.Linear(8, 24)
        self.norm, self.last = nn.LayerNorm(24), nn.Linear(24, WIDTH)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.randint(0, 100, (len(x),), device=x.device)
        noise = torch.randn(x.shape, device=x.device, dtype=x.dtype)
        share = torch.cos(times.to(x.dtype) / 100 * math.pi / 2).unsqueeze(-1)
        noisy = share * x + torch.sqrt(1 - share.square()) * noise
        angles = times.to(x.dtype).unsqueeze(-1) * torch.exp(-torch.arange(4, device=x.device, dtype=x.dtype))
        hidden = self.inside(noisy) + self.time(torch.cat([angles.sin(), angles.cos()], -1))
        return f.mse_loss(self.last(f.silu(self.norm(hidden))), noise)


class Dropouts(nn.Module):
    """Dropout as a module, as a function, of channels, and inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        self.norm, self.drop, self.alpha = nn.LayerNorm(WIDTH), nn.Dropout(0.3), nn.AlphaDropout(0.1)
        self.wide, self.narrow = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) * torch.linspace(0.5, 1.5, 3, device=x.device, dtype=x.dtype).view(1, 3, 1)
        x = x + self.drop(self.attention(x, x, x)[0])
        x = x + f.dropout(self.narrow(self.alpha(f.gelu(self.wide(self.norm(x))))), 0.2)
        return f.dropout1d(x, 0.3).square().mean()


class Policy(nn.Module):
    """A squashed Gaussian policy, reparametrised, with its entropy, as soft actor-critic has it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread = nn.Linear(WIDTH, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.critic = nn.Sequential(nn.Linear(WIDTH + 3, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x))
        normal = Normal(self.mean(hidden), self.spread(hidden).clamp(-5, 2).exp(), validate_args=False)
        drawn = normal.rsample()
        action = torch.tanh(drawn)
        log_prob = (normal.log_prob(drawn) - torch.log(1 - action.square() + 1e-4)).sum(-1)
        return (0.2 * log_prob - self.critic(torch.cat([x, action], -1)).squeeze(-1)).mean()


class Gumbel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.encode(x)
        usual = -logits.log_softmax(-1)[:, 0].mean()
        return f.l1_loss(self.decode(f.gumbel_softmax(logits, tau=0.7)), x) + 0.1 * usual


class Reinforce(nn.Module):
    """A categorical policy whose samples come from probabilities that the device computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        policy = Categorical(logits=self.head(f.elu(self.body(x))), validate_args=False)
        action = policy.sample()
        reward = x.gather(1, action.unsqueeze(1)).squeeze(1)
        return -(policy.log_prob(action) * reward).mean() - 0.01 * policy.entropy().mean()


class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        probability = torch.sigmoid(self.encode(x))
        code = torch.bernoulli(probability) + probability - probability.detach()
        return f.smooth_l1_loss(self.decode(code), x)


class NoisyNet(nn.Module):
    """Factorised noise on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.spread = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6, bias=False)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (torch.randn(n, device=x.device, dtype=x.dtype) for n in (6, WIDTH))
        noise = torch.outer(rows.sign() * rows.abs().sqrt(), columns.sign() * columns.abs().sqrt())
        hidden = f.linear(x, self.weight.weight + self.spread.weight * noise, self.weight.bias)
        return f.huber_loss(self.last(f.softplus(hidden)), x[:, :1])


class StochasticDepth(nn.Module):
    """Samples skip layers at random; whole layers are skipped by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            if random.random() < 0.8:
                kept = torch.rand(len(y), 1, device=y.device, dtype=y.dtype) < 0.7
                y = y + f.leaky_relu(layer(y)) * kept / 0.7
        return f.mse_loss(y, x.flip(-1))


class Mixup(nn.Module):
    """Mixed samples, by torch's permutation and NumPy's generator, with masked fields."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        share = float(np.random.beta(0.4, 0.4))
        mixed = share * x + (1 - share) * x[torch.randperm(len(x), device=x.device)]
        hidden = torch.empty_like(mixed).uniform_()
        mixed = mixed.masked_fill(hidden < 0.2, 0.0)
        return f.cross_entropy(self.last(f.hardswish(self.inside(mixed))), x[:, :4].argmax(-1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vae": Vae,
    "diffusion": Diffusion,
    "dropout": Dropouts,
    "policy": Policy,
    "gumbel": Gumbel,
    "reinforce": Reinforce,
    "straight through": StraightThrough,
    "noisy net": NoisyNet,
    "stochastic depth": StochasticDepth,
    "mixup": Mixup,
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """Return a model and its samples."""
    torch.manual_seed(seed)
    return MODELS[name](), torch.randn(NUM_SAMPLES, WIDTH)
