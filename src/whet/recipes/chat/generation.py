"""Generate tokens for a batch of prompts: key-value cache, sampling and decoding loop."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.recipes.chat.model import CausalModel


class PreallocatedCache:
    """A cache of the keys and values of earlier positions, with one entry per application of an attention layer.

    A recursive model applies the same weights many times to different states, so every application has separate keys
    and values. Nothing else has to be cached, because the states of all positions start from the same vectors. The rows
    of a batch may be at different positions.
    """

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._next = 0
        self._positions: Tensor | None = None
        self._num_keys = 0

    def expect(self, positions: Tensor, *, num_keys: int) -> None:
        """Prepare for a forward pass. Set the positions of its tokens, (B, S), and the number of visible positions."""
        self._positions, self._num_keys = positions, num_keys
        self._next = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the next attention layer.

        Return the keys and values of all visible positions.
        """
        assert self._positions is not None
        if self._next == len(self._layers):
            self._layers.append((self._allocate(keys), self._allocate(values)))
        layer = self._layers[self._next]
        self._next += 1
        index = self._positions[:, None, :, None].expand_as(keys)
        for cached, new in zip(layer, (keys, values), strict=True):
            # Rows may be at different positions, so scatter by position instead of appending.
            cached.scatter_(2, index, new)
        return layer[0][:, :, : self._num_keys], layer[1][:, :, : self._num_keys]

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        self._layers = [(keys[rows], values[rows]) for keys, values in self._layers]

    def _allocate(self, like: Tensor) -> Tensor:
        rows, heads, _, size = like.shape
        # Use zeros instead of uninitialized memory, because a masked position could hold NaN, and 0 * NaN is NaN.
        return torch.zeros(rows, heads, self._context_length, size, dtype=like.dtype, device=like.device)


# --- Sampling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Parameters for sampling the next token."""

    temperature: float = 0.7
    """Divisor of the logits. 0 selects the most likely token."""
    top_k: int = 50
    """Number of most likely tokens to sample from. 0 means all."""
    top_p: float = 0.9
    """Sample from the smallest set of most likely tokens with at least this total probability. 1 means all tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, is_valid, rule in (
            ("temperature", self.temperature, 0 <= self.temperature <= 100, "from 0 to 100"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
        ):
            if not is_valid:
                default = getattr(_DEFAULT_SAMPLING, name)
                raise UsageError(f"{name} must be {rule}", got=value, try_=f"{name} {default}")

    def generator(self) -> Random:
        """Create the random generator of one row, which does not depend on the rest of the batch."""
        return Random(self.seed)


_DEFAULT_SAMPLING = Sampling()


def sample_token(logits: Tensor, sampling: Sampling, generator: Random) -> int:
    """Choose the next token from its logits, (V,) on the CPU."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    ids, probabilities = distribution(logits, sampling)
    # Inverse transform sampling. Clamp the index, because a rounding error may lead past the last token.
    index = int(torch.searchsorted(probabilities.cumsum(0), generator.random(), right=True))
    return int(ids[min(index, len(ids) - 1)])


def distribution(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the candidate tokens, most likely first, and their probabilities in float64.

    Top-k is applied before top-p. The token that crosses the top-p threshold is included.
    """
    scores, ids = logits.double().sort(descending=True, stable=True)
    num_allowed = int((scores > -torch.inf).sum())
    count = min(sampling.top_k, num_allowed) if sampling.top_k else num_allowed
    # Subtract the largest score first. Otherwise, dividing by a tiny temperature would overflow to infinity.
    probabilities = ((scores[:count] - scores[0]) / sampling.temperature).softmax(0)
    if sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        count = max(1, int((before < sampling.top_p).sum()))
    probabilities = probabilities[:count]
    return ids[:count], probabilities / probabilities.sum()


def mask_tokens(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Return a copy of the logits, (..., V), with these tokens set to minus infinity."""
    logits = logits.clone()
    logits[..., list(ids)] = -torch.inf
    return logits


# --- Decoding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One row of a batch: a prompt and the sampling parameters for its continuation."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingRules:
    """Decoding rules that apply to all rows."""

    stops: frozenset[int]
    """Tokens that end an answer. They are not part of it."""
    forbidden: tuple[int, ...]
    """Tokens that are never generated, such as padding and the starts of turns."""
    context_length: int
    """Maximum number of tokens of prompt and answer together."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """The next token of a row, or the end of its answer."""

    row: int
    token: int | None
    finish_reason: str | None = None
    """At the end, "stop" (the answer is complete) or "length" (it reached max_new_tokens or the context length)."""


def generate(
    model: CausalModel, requests: Sequence[GenerationRequest], rules: DecodingRules
) -> Iterator[GeneratedToken]:
    """Yield tokens as they are generated. Each row ends with a finish reason. Stop iterating to cancel."""
    _check_prompts(requests, rules)
    lengths = [len(request.prompt) for request in requests]
    generators = [request.sampling.generator() for request in requests]
    for row, request in enumerate(requests):
        if request.max_new_tokens == 0:
            yield GeneratedToken(row, None, "length")
    rows = [row for row, request in enumerate(requests) if request.max_new_tokens]
    if not rows:
        return
    # Allocate memory for the longest possible row, which is usually shorter than the context length.
    cache = PreallocatedCache(
        max(min(rules.context_length, lengths[row] + requests[row].max_new_tokens) for row in rows)
    )
    device = next(model.parameters()).device
    # The first pass processes the prompts. Each later pass processes only the latest token of each row.
    tokens, positions = _pad_prompts([requests[row].prompt for row in rows], device)
    last = torch.tensor([lengths[row] - 1 for row in rows], device=device)
    num_generated = 0
    while rows:
        logits = _next_logits(model, cache, tokens, positions, last)
        num_generated += 1
        unfinished: list[tuple[int, int]] = []
        for index, row in enumerate(rows):
            allowed = mask_tokens(logits[index], rules.forbidden)
            token = sample_token(allowed, requests[row].sampling, generators[row])
            if token in rules.stops:
                yield GeneratedToken(row, None, "stop")
                continue
            yield GeneratedToken(row, token)
            if num_generated == requests[row].max_new_tokens or lengths[row] + num_generated == rules.context_length:
                yield GeneratedToken(row, None, "length")
            else:
                unfinished.append((index, token))
        # Drop finished rows, so that later passes do not compute them.
        if len(unfinished) < len(rows):
            cache.keep(torch.tensor([index for index, _ in unfinished], dtype=torch.long, device=device))
        rows = [rows[index] for index, _ in unfinished]
        tokens = torch.tensor([[token] for _, token in unfinished], dtype=torch.long, device=device)
        positions = torch.tensor([[lengths[row] + num_generated - 1] for row in rows], device=device)
        last = torch.zeros(len(rows), dtype=torch.long, device=device)


@torch.no_grad()
def _next_logits(
    model: CausalModel, cache: PreallocatedCache, tokens: Tensor, positions: Tensor, last: Tensor
) -> Tensor:
    """Return the logits of the token after index `last` of each row, (B, V) in float32 on the CPU."""
    num_keys = int(positions.max()) + 1
    cache.expect(positions, num_keys=num_keys)
    states = model.forward_cached(tokens, positions, cache=cache, num_keys=num_keys)
    return model.logits(states[torch.arange(len(last), device=last.device), last]).float().cpu()


def _pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prompts and their positions, (B, S). Padding is on the right, where no real token attends to it."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    return tokens, torch.arange(longest, device=device).expand(len(prompts), -1)


def _check_prompts(requests: Sequence[GenerationRequest], rules: DecodingRules) -> None:
    for request in requests:
        if not request.prompt:
            raise UsageError("the prompt is empty", got="no tokens", try_="at least one token")
        if len(request.prompt) >= rules.context_length:
            raise UsageError(
                "the prompt is longer than the model's context",
                got=f"{len(request.prompt):,} tokens; prompt and answer may have {rules.context_length:,}",
                try_="a shorter prompt",
            )
