"""How are answers written? Prompts are read once, all rows at a time; then each row gets one token after another.

Rows are filled up on the right, and every row has places of its own from 0 on. So what a row says depends neither on
padding nor on its neighbours nor on their order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.recipes.chat.generation.memory import KeyValues
from whet.recipes.chat.generation.sampling import Sampling, choose, forbid
from whet.recipes.chat.model.causal import CausalModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One row: what is read, and how it goes on."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What holds for every answer."""

    stops: frozenset[int]
    """Tokens that end an answer; they are not part of it."""
    forbidden: tuple[int, ...]
    """Tokens that are never said: padding and the starts of turns."""
    num_places: int
    """Tokens of prompt and answer together that the model can look back on."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a row said in one step: a token, or why it ends."""

    row: int
    token: int | None
    end: str | None = None
    """"stop": the answer is complete; "length": there is no room, or no more was asked for."""


def decode(model: CausalModel, asks: Sequence[Ask], rules: Rules) -> Iterator[Said]:
    """Tokens as they are chosen, row by row; each row ends with a reason. Stop iterating, and it stops."""
    _refuse_unusable(asks, rules)
    rows = list(range(len(asks)))
    lengths = [len(ask.prompt) for ask in asks]
    draws = [ask.sampling.draws() for ask in asks]
    for row in rows:
        if asks[row].max_new_tokens == 0:
            yield Said(row, None, "length")
    rows = [row for row in rows if asks[row].max_new_tokens]
    if not rows:
        return
    room = max(min(rules.num_places, lengths[row] + asks[row].max_new_tokens) for row in rows)
    memory = KeyValues(room)
    tokens, positions = _rectangle([asks[row].prompt for row in rows], device_of(model))
    last = torch.tensor([lengths[row] - 1 for row in rows], device=positions.device)
    num_said = 0
    while rows:
        logits = _next_logits(model, memory, tokens, positions, last)
        num_said += 1
        going: list[tuple[int, int]] = []
        for place, row in enumerate(rows):
            token, end = _say(logits[place], asks[row], draws[row], rules)
            if end is not None:
                yield Said(row, None, end)
                continue
            yield Said(row, token)
            if num_said == asks[row].max_new_tokens or lengths[row] + num_said == rules.num_places:
                yield Said(row, None, "length")
            else:
                going.append((place, token))
        if len(going) < len(rows):
            memory.keep(torch.tensor([place for place, _ in going], dtype=torch.long, device=positions.device))
        rows = [rows[place] for place, _ in going]
        tokens = torch.tensor([[token] for _, token in going], dtype=torch.long, device=positions.device)
        positions = torch.tensor([[lengths[row] + num_said - 1] for row in rows], device=positions.device)
        last = torch.zeros(len(rows), dtype=torch.long, device=positions.device)


def _say(logits: Tensor, ask: Ask, draws: Random, rules: Rules) -> tuple[int, str | None]:
    token = choose(forbid(logits, rules.forbidden), ask.sampling, draws)
    return token, "stop" if token in rules.stops else None


@torch.no_grad()
def _next_logits(model: CausalModel, memory: KeyValues, tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor:
    """The scores of what comes behind place `last` of each row, (B, V), on the CPU."""
    num_keys = int(positions.max()) + 1
    memory.expect(positions, num_keys=num_keys)
    states = model.go_on(tokens, positions, memory=memory, num_keys=num_keys)
    return model.logits(states[torch.arange(len(last), device=last.device), last]).float().cpu()


def _rectangle(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens filled up on the right, and the place of each: what fills up comes after all that is real."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    return tokens, torch.arange(longest, device=device).expand(len(prompts), -1)


def device_of(model: torch.nn.Module) -> torch.device:
    """Where its weights lie."""
    return next(model.parameters()).device


def _refuse_unusable(asks: Sequence[Ask], rules: Rules) -> None:
    for ask in asks:
        if not ask.prompt:
            raise UsageError("there is nothing to go on from", got="an empty prompt", try_="at least one token")
        if len(ask.prompt) >= rules.num_places:
            raise UsageError(
                "the prompt is longer than the model can look back",
                got=f"{len(ask.prompt):,} tokens; it has room for {rules.num_places:,} with the answer",
                try_="a shorter one",
            )
