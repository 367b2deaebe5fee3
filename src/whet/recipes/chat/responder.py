"""Answer conversations with a trained model."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from whet.base.errors import UsageError
from whet.recipes.chat.architecture import ChatArch
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.generation import DecodingRules, GenerationRequest, Sampling, generate
from whet.recipes.chat.model import CausalModel, build_model
from whet.recipes.chat.template import TurnIds, encode_turns
from whet.recipes.chat.tokenizer import ChatTokenizer


def truncate_history(turns: Sequence[Turn], tokenizer: ChatTokenizer, *, max_tokens: int) -> tuple[list[int], int]:
    """Encode turns as a prompt of at most `max_tokens` tokens. Return its ids and the number of dropped turns.

    The system turn and the last question are always kept. The oldest of the turns between them are dropped first, and
    the first of the remaining ones is a question.
    """
    encoded = [TurnIds(role, tokenizer.encode(text)) for role, text in turns]
    # One more token marks the start of the assistant's turn.
    length = 1 + sum(turn.length for turn in encoded)
    first = start = 1 if encoded and encoded[0].role == "system" else 0
    while length > max_tokens:
        end = next((index for index in range(start + 1, len(encoded)) if encoded[index].role == "user"), None)
        if end is None:
            raise UsageError(
                "the question is longer than the model's context",
                got=f"{length:,} tokens with the system turn, of at most {max_tokens:,}",
                try_="a shorter question, or a model with a larger arch.seq_len",
            )
        length -= sum(turn.length for turn in encoded[start:end])
        start = end
    ids, _ = encode_turns([*encoded[:first], *encoded[start:]], tokenizer)
    return [*ids, tokenizer.role_ids["assistant"]], start - first


ANSWER_SHARE = 4
"""Up to 1 / ANSWER_SHARE of the context is reserved for the answer when old turns are dropped."""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A chunk of an answer that is being generated."""

    text: str
    num_tokens: int
    """Number of tokens generated so far."""
    finish_reason: str | None = None
    """The finish reason, "stop" or "length", in the last chunk, otherwise None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The token ids that an answer is generated from."""

    ids: tuple[int, ...]
    num_dropped_turns: int = 0
    """Number of old turns that did not fit into the context."""


class Responder:
    """Generates answers with a model. The model must be in eval mode."""

    def __init__(self, model: CausalModel, tokenizer: ChatTokenizer, *, context_length: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._rules = DecodingRules(
            stops=frozenset([tokenizer.end_id]),
            forbidden=(tokenizer.pad_id, *tokenizer.role_ids.values()),
            context_length=context_length,
        )

    def prompt(self, turns: Sequence[Turn], *, max_new_tokens: int) -> Prompt:
        """Encode turns. Drop the oldest ones if the conversation and an answer do not fit into the context."""
        reserved = min(max_new_tokens, max(1, self.context_length // ANSWER_SHARE))
        ids, num_dropped = truncate_history(turns, self.tokenizer, max_tokens=self.context_length - reserved)
        return Prompt(ids=tuple(ids), num_dropped_turns=num_dropped)

    def text_prompt(self, text: str) -> Prompt:
        """Encode a plain text as a prompt for the model to continue."""
        return Prompt(ids=(self.tokenizer.role_ids["assistant"], *self.tokenizer.encode(text)))

    def respond(self, prompt: Prompt, *, max_new_tokens: int, sampling: Sampling) -> Iterator[TextChunk]:
        """Yield an answer chunk by chunk. Generation stops when iteration stops."""
        request = GenerationRequest(prompt=prompt.ids, max_new_tokens=max_new_tokens, sampling=sampling)
        stream, ids, num_characters = self.tokenizer.stream(), list[int](), 0
        for step in generate(self.model, [request], self._rules):
            if step.token is None:
                # Flush the decoder. An incomplete character becomes a replacement character.
                rest = self.tokenizer.decode(ids)[num_characters:]
                yield TextChunk(rest, len(ids), step.finish_reason)
                return
            ids.append(step.token)
            text = stream.push(step.token)
            num_characters += len(text)
            yield TextChunk(text, len(ids))

    def respond_all(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, sampling: Sampling, max_seconds: float = math.inf
    ) -> list[tuple[str, str]]:
        """Generate several answers in one batch, without changing any of them. Return their texts and finish reasons.

        After `max_seconds`, unfinished answers are truncated, and their finish reason is empty.
        """
        requests = [
            GenerationRequest(prompt=prompt.ids, max_new_tokens=max_new_tokens, sampling=sampling) for prompt in prompts
        ]
        ids: list[list[int]] = [[] for _ in requests]
        reasons = [""] * len(requests)
        deadline = time.monotonic() + max_seconds
        for step in generate(self.model, requests, self._rules):
            if step.token is not None:
                ids[step.row].append(step.token)
            elif step.finish_reason is not None:
                reasons[step.row] = step.finish_reason
            if time.monotonic() > deadline:
                break
        return [(self.tokenizer.decode(row), reason) for row, reason in zip(ids, reasons, strict=True)]


def responder_metadata(tokenizer: ChatTokenizer, arch: ChatArch) -> dict[str, Any]:
    """Return the JSON data that `restore_responder` needs in addition to the weights."""
    return {"arch": arch.model_dump(mode="json"), "vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.to_json()}


def restore_responder(metadata: dict[str, Any]) -> Responder:
    """Create a responder from saved metadata. The caller then loads the weights into its model."""
    arch = ChatArch.model_validate(metadata["arch"])
    tokenizer = ChatTokenizer.from_json(metadata["tokenizer"])
    if tokenizer.vocab_size != metadata["vocab_size"] or not isinstance(arch.seq_len, int):
        raise ValueError("the tokenizer does not belong to the model")
    model = build_model(arch, vocab_size=tokenizer.vocab_size)
    model.eval()
    return Responder(model, tokenizer, context_length=arch.seq_len)
