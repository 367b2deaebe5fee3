"""How is a conversation written as tokens, and which of them are learned?

    <|system|> text <|end|> <|user|> text <|end|> <|assistant|> text <|end|>

A place of the mask is 1 where the token at that place is to be predicted: by default the text of the assistant and
the <|end|> behind it. A model that answers is given everything up to <|assistant|>, and stops at <|end|>.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from whet.recipes.chat.conversation import Loss, Role, Turn
from whet.recipes.chat.tokenizer import ChatTokenizer

TEMPLATE = "<|role|> text <|end|>"
"""Its name in a manifest; another layout gets another one."""


class TurnIds(NamedTuple):
    """A turn as token ids."""

    role: Role
    ids: Sequence[int]
    is_whole: bool = True
    """An answer that was cut has no end mark: it did not end there."""
    num_bytes: int | None = None
    """Of its text; None where that was cut and has to be looked up."""

    @property
    def length(self) -> int:
        """Tokens with the marks."""
        return len(self.ids) + 1 + self.is_whole


def write(turns: Iterable[TurnIds], tokenizer: ChatTokenizer, *, loss: Loss = "assistant") -> tuple[list[int], bytes]:
    """The ids of a conversation, and a byte for each: whether it is learned."""
    ids: list[int] = []
    mask = bytearray()
    for role, text, is_whole, _ in turns:
        is_learned = loss == "all" or role == "assistant"
        ids.append(tokenizer.role_ids[role])
        ids += text
        if is_whole:
            ids.append(tokenizer.end_id)
        # Who speaks is decided by the one who asks, so a role's mark is learned only where all is.
        mask.append(loss == "all")
        mask += (b"\1" if is_learned else b"\0") * (len(text) + is_whole)
    if mask:
        mask[0] = 0  # Nothing stands before it that could foretell it.
    return ids, bytes(mask)


def loss_bytes(turns: Iterable[TurnIds], tokenizer: ChatTokenizer, *, loss: Loss = "assistant") -> int:
    """Bytes of the text that is learned."""
    learned = [turn for turn in turns if loss == "all" or turn.role == "assistant"]
    return sum(
        len(tokenizer.decode(turn.ids).encode()) if turn.num_bytes is None else turn.num_bytes for turn in learned
    )


def prompt(turns: Iterable[Turn], tokenizer: ChatTokenizer) -> list[int]:
    """The ids that an answer is asked for with: the turns so far, then the assistant's mark."""
    ids, _ = write((TurnIds(role, tokenizer.encode(text)) for role, text in turns), tokenizer)
    return [*ids, tokenizer.role_ids["assistant"]]
