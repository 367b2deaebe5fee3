"""Perplexity, bits per byte and sample answers of a chat model."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from whet.data.batch import MicroBatch
from whet.recipes.chat.data import ChatData, Question
from whet.recipes.chat.generation import DecodingRules, GenerationRequest, Sampling, generate
from whet.recipes.chat.model import CausalModel, model_inputs, next_tokens, summed_cross_entropy
from whet.recipes.chat.tokenizer import ChatTokenizer

_MOST_TOKENS = 48
_MOST_SECONDS = 5.0
_MOST_NATS = 50.0
"""Beyond it a perplexity says nothing, and soon is no number."""


def evaluate(model: CausalModel, micro_batches: Iterator[MicroBatch], data: ChatData | None) -> dict[str, Any]:
    """Over all tokens that count, each weighing the same; and answers to the data's questions, the likeliest ones."""
    return conclude(model, [tally(model, micro_batches)], data)


def tally(model: CausalModel, micro_batches: Iterator[MicroBatch]) -> list[float]:
    """Nats, tokens, right ones and bytes of these rows: several processes may tally a part each."""
    nats = tokens = right = num_bytes = 0.0
    for micro in micro_batches:
        targets = next_tokens(micro)
        logits = model.logits(model(*model_inputs(micro))[-1])
        is_counted = targets >= 0
        is_right = (logits.argmax(-1) == targets) & is_counted
        counts = (is_counted.sum(), is_right.sum(), micro.loss_bytes.sum())
        found = torch.stack([summed_cross_entropy(logits, targets), *(count.float() for count in counts)]).tolist()
        nats, tokens, right, num_bytes = nats + found[0], tokens + found[1], right + found[2], num_bytes + found[3]
    return [nats, tokens, right, num_bytes]


def conclude(model: CausalModel, tallies: list[list[float]], data: ChatData | None) -> dict[str, Any]:
    """What tallies over different rows say together, and answers by the model."""
    nats, tokens, right, num_bytes = (sum(column) for column in zip(*tallies, strict=True))
    mean = nats / max(1.0, tokens)
    told: dict[str, Any] = {
        "bits_per_byte": nats / math.log(2) / max(1.0, num_bytes),
        "perplexity": math.exp(min(mean, _MOST_NATS)),
        "cross_entropy": mean,
        "accuracy": right / max(1.0, tokens),
    }
    if data is not None and data.questions:
        told["samples"] = sample_answers(model, data.tokenizer, data.questions, num_places=data.num_places)
    return told


def sample_answers(
    model: CausalModel, tokenizer: ChatTokenizer, questions: Sequence[Question], *, num_places: int
) -> list[dict[str, Any]]:
    """What the model says to each question, as far as a few seconds go."""
    rules = DecodingRules(
        stops=frozenset([tokenizer.end_id]),
        forbidden=(tokenizer.pad_id, *tokenizer.role_ids.values()),
        num_places=num_places,
    )
    greedy = Sampling(temperature=0)
    asks = [
        GenerationRequest(prompt=question.prompt, max_new_tokens=_MOST_TOKENS, sampling=greedy)
        for question in questions
    ]
    said: list[list[int]] = [[] for _ in asks]
    ends_at = time.monotonic() + _MOST_SECONDS
    for step in generate(model, asks, rules):
        if step.token is not None:
            said[step.row].append(step.token)
        if time.monotonic() > ends_at:
            break
    return [
        {
            "input": tokenizer.spell(question.prompt),
            "expected": tokenizer.decode(question.answer),
            "predicted": tokenizer.decode(ids),
        }
        for question, ids in zip(questions, said, strict=True)
    ]
