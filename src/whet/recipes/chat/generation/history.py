"""What is left out where a conversation is longer than the model can look back? Its oldest turns, never the system's.

The system turn and the last question stay. Turns go as wholes, and what is left begins with a question again.
"""

from collections.abc import Sequence

from whet.base.errors import UsageError
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.template import prompt
from whet.recipes.chat.tokenizer import ChatTokenizer


def fitting_prompt(turns: Sequence[Turn], tokenizer: ChatTokenizer, *, most_tokens: int) -> tuple[list[int], int]:
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
