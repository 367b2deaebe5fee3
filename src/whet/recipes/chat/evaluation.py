"""Perplexity, bits per byte and sample answers of a chat model."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from whet.data.batch import DictBatch
from whet.recipes.chat.data import ChatData, Question
from whet.recipes.chat.generation import Sampling
from whet.recipes.chat.model import CausalModel, model_inputs, next_tokens, summed_cross_entropy
from whet.recipes.chat.responder import Prompt, Responder
from whet.recipes.chat.tokenizer import ChatTokenizer

# Limits for sample answers, which must not make an evaluation much slower.
_MAX_ANSWER_TOKENS = 48
_MAX_SECONDS = 5.0
_MAX_NATS = 50.0
"""The maximum exponent of the perplexity, which would otherwise overflow."""


def partial_metrics(model: CausalModel, micro_batches: Iterator[DictBatch]) -> list[float]:
    """Sum nats, tokens, correct tokens and bytes over micro-batches. Each process evaluates its share of the split."""
    totals = [0.0] * 4
    for micro in micro_batches:
        targets = next_tokens(micro)
        logits = model.logits(model(*model_inputs(micro))[-1])
        is_counted = targets >= 0
        is_correct = (logits.argmax(-1) == targets) & is_counted
        counts = (is_counted.sum(), is_correct.sum(), micro.loss_bytes.sum())
        # Transfer all sums at once, so that each micro-batch synchronizes with the device only once.
        sums = torch.stack([summed_cross_entropy(logits, targets), *(count.float() for count in counts)]).tolist()
        totals = [total + value for total, value in zip(totals, sums, strict=True)]
    return totals


def merge_metrics(model: CausalModel, parts: list[list[float]], data: ChatData | None) -> dict[str, Any]:
    """Compute the metrics from the sums of all processes, and add sample answers."""
    nats, tokens, correct, num_bytes = (sum(column) for column in zip(*parts, strict=True))
    mean = nats / max(1.0, tokens)
    metrics: dict[str, Any] = {
        "bits_per_byte": nats / math.log(2) / max(1.0, num_bytes),
        "perplexity": math.exp(min(mean, _MAX_NATS)),
        "cross_entropy": mean,
        "accuracy": correct / max(1.0, tokens),
    }
    if data is not None and data.questions:
        metrics["samples"] = sample_answers(model, data.tokenizer, data.questions, context_length=data.context_length)
    return metrics


def sample_answers(
    model: CausalModel, tokenizer: ChatTokenizer, questions: Sequence[Question], *, context_length: int
) -> list[dict[str, Any]]:
    """Return greedy answers of the model. Generation stops after a few seconds."""
    responder = Responder(model, tokenizer, context_length=context_length)
    answers = responder.respond_all(
        [Prompt(ids=question.prompt) for question in questions],
        max_new_tokens=_MAX_ANSWER_TOKENS,
        sampling=Sampling(temperature=0),
        max_seconds=_MAX_SECONDS,
    )
    return [
        {
            "input": tokenizer.decode_with_marks(question.prompt),
            "expected": tokenizer.decode(question.answer),
            "predicted": answer,
        }
        for question, (answer, _) in zip(questions, answers, strict=True)
    ]
