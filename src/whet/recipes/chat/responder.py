"""Answer conversations with a trained model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from whet.base.errors import UsageError
from whet.recipes.chat.architecture import ChatArch
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.generation import DecodingRules, GenerationRequest, Sampling, generate
from whet.recipes.chat.model import CausalModel, build_model
from whet.recipes.chat.template import prompt
from whet.recipes.chat.tokenizer import ChatTokenizer


def truncate_history(turns: Sequence[Turn], tokenizer: ChatTokenizer, *, most_tokens: int) -> tuple[list[int], int]:
    """The ids that ask for an answer to the last turn, and how many turns were left out; at most `most_tokens`."""
    kept = list(turns)
    first = 1 if kept and kept[0].role == "system" else 0
    while True:
        ids = prompt(kept, tokenizer)
        if len(ids) <= most_tokens:
            return ids, len(turns) - len(kept)
        end = next((place for place in range(first + 1, len(kept)) if kept[place].role == "user"), None)
        if end is None:
            raise UsageError(
                "the question is longer than the model can look back",
                got=f"{len(ids):,} tokens with the system turn; there is room for {most_tokens:,}",
                try_="a shorter one, or a model with a larger arch.seq_len",
            )
        del kept[first:end]


ANSWER_SHARE = 4
"""One part of so many is kept free for the answer, where a conversation is too long."""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A bit of an answer."""

    text: str
    num_tokens: int
    end: str | None = None
    """On the last piece why it is the last: "stop" or "length"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What is read before an answer."""

    ids: tuple[int, ...]
    num_left_out: int = 0
    """Turns that there was no room for."""


class Responder:
    """Answers with one model. The model is in eval mode, with its weights, where it should compute."""

    def __init__(self, model: CausalModel, tokenizer: ChatTokenizer, *, num_places: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.num_places = num_places
        self._rules = DecodingRules(
            stops=frozenset([tokenizer.end_id]),
            forbidden=(tokenizer.pad_id, *tokenizer.role_ids.values()),
            num_places=num_places,
        )

    def prompt(self, turns: Sequence[Turn], *, max_new_tokens: int) -> Prompt:
        """The turns as the model reads them, without the oldest where there is no room for them and an answer."""
        room = min(max_new_tokens, max(1, self.num_places // ANSWER_SHARE))
        ids, left_out = truncate_history(turns, self.tokenizer, most_tokens=self.num_places - room)
        return Prompt(ids=tuple(ids), num_left_out=left_out)

    def plain_prompt(self, text: str) -> Prompt:
        """A text that is simply gone on with, inside an answer."""
        return Prompt(ids=(self.tokenizer.role_ids["assistant"], *self.tokenizer.encode(text)))

    def say(self, prompt: Prompt, *, max_new_tokens: int, sampling: Sampling) -> Iterator[TextChunk]:
        """One answer as it is written. Stop iterating, and it is not written on."""
        ask = GenerationRequest(prompt=prompt.ids, max_new_tokens=max_new_tokens, sampling=sampling)
        stream, ids, told = self.tokenizer.stream(), list[int](), 0
        for said in generate(self.model, [ask], self._rules):
            if said.token is None:
                # A sign whose last token never came is shown as far as it goes.
                rest = self.tokenizer.decode(ids)[told:]
                yield TextChunk(rest, len(ids), said.end)
                return
            ids.append(said.token)
            text = stream.push(said.token)
            told += len(text)
            yield TextChunk(text, len(ids))

    def answer_all(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, samplings: Sequence[Sampling]
    ) -> list[tuple[str, str]]:
        """Several answers at a time, each as if it were alone: text, and why it ends."""
        asks = [
            GenerationRequest(prompt=prompt.ids, max_new_tokens=max_new_tokens, sampling=sampling)
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        ids: list[list[int]] = [[] for _ in asks]
        ends = [""] * len(asks)
        for said in generate(self.model, asks, self._rules):
            if said.token is not None:
                ids[said.row].append(said.token)
            elif said.end is not None:
                ends[said.row] = said.end
        return [(self.tokenizer.decode(row), end) for row, end in zip(ids, ends, strict=True)]


def responder_metadata(tokenizer: ChatTokenizer, arch: ChatArch) -> dict[str, Any]:
    """What `restore_responder` needs besides weights, as plain JSON."""
    return {"arch": arch.model_dump(mode="json"), "vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.to_json()}


def restore_responder(kept: dict[str, Any]) -> Responder:
    """A speaker whose model has no weights yet."""
    arch = ChatArch.model_validate(kept["arch"])
    tokenizer = ChatTokenizer.from_json(kept["tokenizer"])
    if tokenizer.vocab_size != kept["vocab_size"] or not isinstance(arch.seq_len, int):
        raise ValueError("the tokenizer and the model do not belong together")
    model = build_model(arch, vocab_size=tokenizer.vocab_size)
    model.eval()
    return Responder(model, tokenizer, num_places=arch.seq_len)
