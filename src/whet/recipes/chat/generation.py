"""Generate tokens for a batch of prompts: sampling, key-value cache and the decoding loop."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.recipes.chat.model import CausalModel


class PreallocatedCache:
    """Room for `num_places` places of rows of one batch. Rows may stand at different places."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._next = 0
        self._positions: Tensor | None = None
        self._num_keys = 0

    def expect(self, positions: Tensor, *, num_keys: int) -> None:
        """Before a forward pass: the places of its tokens, (B, S), and how many places are looked at."""
        self._positions, self._num_keys = positions, num_keys
        self._next = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the next attention: new places are written, and all that may be looked at are given."""
        assert self._positions is not None
        if self._next == len(self._kept):
            self._kept.append((self._room(keys), self._room(values)))
        kept = self._kept[self._next]
        self._next += 1
        where = self._positions[:, None, :, None].expand_as(keys)
        for room, new in zip(kept, (keys, values), strict=True):
            room.scatter_(2, where, new)
        return kept[0][:, :, : self._num_keys], kept[1][:, :, : self._num_keys]

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows alone."""
        self._kept = [(keys[rows], values[rows]) for keys, values in self._kept]

    @property
    def num_attentions(self) -> int:
        """How many keys and values there are for each place."""
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        return sum(t.numel() * t.element_size() for pair in self._kept for t in pair)

    def _room(self, like: Tensor) -> Tensor:
        rows, heads, _, size = like.shape
        # Zero, not empty: a place that is masked counts nothing, unless it happens to hold a NaN.
        return torch.zeros(rows, heads, self._num_places, size, dtype=like.dtype, device=like.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to choose."""

    temperature: float = 0.7
    """What scores are divided by before they become probabilities; 0 takes the likeliest."""
    top_k: int = 50
    """Only so many of the likeliest; 0 for all."""
    top_p: float = 0.9
    """Only the smallest set of the likeliest that has this much of the probability; 1 for all."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, is_right, law in (
            ("temperature", self.temperature, 0 <= self.temperature <= 100, "from 0 to 100"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
        ):
            if not is_right:
                raise UsageError(f"{name} must be {law}", got=value, try_=f"{name} {getattr(_DEFAULT_SAMPLING, name)}")

    def draws(self) -> Random:
        """Where the numbers for one row come from: from its seed alone, whoever else is in the batch."""
        return Random(self.seed)


def sample_token(logits: Tensor, how: Sampling, draws: Random) -> int:
    """The next token from its scores, (V) on the CPU; minus infinity for what must not be said."""
    if how.temperature == 0:
        return int(logits.argmax())
    ids, shares = distribution(logits, how)
    # The first place where the sum of shares passes the draw; rounding must not lead beyond the last.
    place = int(torch.searchsorted(shares.cumsum(0), draws.random(), right=True))
    return int(ids[min(place, len(ids) - 1)])


def distribution(logits: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that may be taken, likeliest first, and their probabilities, float64.

    Top-k comes first, and top-p is of what that leaves: as few tokens as have at least that much, the one that passes
    the threshold among them.
    """
    scores, ids = logits.double().sort(descending=True, stable=True)
    num_said = int((scores > -torch.inf).sum())
    count = min(how.top_k, num_said) if how.top_k else num_said
    # From the likeliest on: scores themselves, divided by almost nothing, would be infinite, and shares no numbers.
    shares = ((scores[:count] - scores[0]) / how.temperature).softmax(0)
    if how.top_p < 1:
        before = shares.cumsum(0) - shares
        count = max(1, int((before < how.top_p).sum()))
    shares = shares[:count]
    return ids[:count], shares / shares.sum()


def mask_tokens(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """The scores with these tokens made impossible."""
    logits = logits.clone()
    logits[..., list(ids)] = -torch.inf
    return logits


_DEFAULT_SAMPLING = Sampling()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One row: what is read, and how it goes on."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingRules:
    """What holds for every answer."""

    stops: frozenset[int]
    """Tokens that end an answer; they are not part of it."""
    forbidden: tuple[int, ...]
    """Tokens that are never said: padding and the starts of turns."""
    num_places: int
    """Tokens of prompt and answer together that the model can look back on."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """What a row said in one step: a token, or why it ends."""

    row: int
    token: int | None
    end: str | None = None
    """"stop": the answer is complete; "length": there is no room, or no more was asked for."""


def generate(model: CausalModel, asks: Sequence[GenerationRequest], rules: DecodingRules) -> Iterator[GeneratedToken]:
    """Tokens as they are chosen, row by row; each row ends with a reason. Stop iterating, and it stops."""
    _check_prompts(asks, rules)
    rows = list(range(len(asks)))
    lengths = [len(ask.prompt) for ask in asks]
    draws = [ask.sampling.draws() for ask in asks]
    for row in rows:
        if asks[row].max_new_tokens == 0:
            yield GeneratedToken(row, None, "length")
    rows = [row for row in rows if asks[row].max_new_tokens]
    if not rows:
        return
    room = max(min(rules.num_places, lengths[row] + asks[row].max_new_tokens) for row in rows)
    memory = PreallocatedCache(room)
    tokens, positions = _pad_prompts([asks[row].prompt for row in rows], model_device(model))
    last = torch.tensor([lengths[row] - 1 for row in rows], device=positions.device)
    num_said = 0
    while rows:
        logits = _next_logits(model, memory, tokens, positions, last)
        num_said += 1
        going: list[tuple[int, int]] = []
        for place, row in enumerate(rows):
            token, end = _sample_next(logits[place], asks[row], draws[row], rules)
            if end is not None:
                yield GeneratedToken(row, None, end)
                continue
            yield GeneratedToken(row, token)
            if num_said == asks[row].max_new_tokens or lengths[row] + num_said == rules.num_places:
                yield GeneratedToken(row, None, "length")
            else:
                going.append((place, token))
        if len(going) < len(rows):
            memory.keep(torch.tensor([place for place, _ in going], dtype=torch.long, device=positions.device))
        rows = [rows[place] for place, _ in going]
        tokens = torch.tensor([[token] for _, token in going], dtype=torch.long, device=positions.device)
        positions = torch.tensor([[lengths[row] + num_said - 1] for row in rows], device=positions.device)
        last = torch.zeros(len(rows), dtype=torch.long, device=positions.device)


def _sample_next(logits: Tensor, ask: GenerationRequest, draws: Random, rules: DecodingRules) -> tuple[int, str | None]:
    token = sample_token(mask_tokens(logits, rules.forbidden), ask.sampling, draws)
    return token, "stop" if token in rules.stops else None


@torch.no_grad()
def _next_logits(
    model: CausalModel, memory: PreallocatedCache, tokens: Tensor, positions: Tensor, last: Tensor
) -> Tensor:
    """The scores of what comes behind place `last` of each row, (B, V), on the CPU."""
    num_keys = int(positions.max()) + 1
    memory.expect(positions, num_keys=num_keys)
    states = model.go_on(tokens, positions, memory=memory, num_keys=num_keys)
    return model.logits(states[torch.arange(len(last), device=last.device), last]).float().cpu()


def _pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens filled up on the right, and the place of each: what fills up comes after all that is real."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    return tokens, torch.arange(longest, device=device).expand(len(prompts), -1)


def model_device(model: torch.nn.Module) -> torch.device:
    """Where its weights lie."""
    return next(model.parameters()).device


def _check_prompts(asks: Sequence[GenerationRequest], rules: DecodingRules) -> None:
    for ask in asks:
        if not ask.prompt:
            raise UsageError("there is nothing to go on from", got="an empty prompt", try_="at least one token")
        if len(ask.prompt) >= rules.num_places:
            raise UsageError(
                "the prompt is longer than the model can look back",
                got=f"{len(ask.prompt):,} tokens; it has room for {rules.num_places:,} with the answer",
                try_="a shorter one",
            )
