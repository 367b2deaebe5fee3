"""What is a fact that can be asked for? An answer, and several ways to ask."""

import re
from typing import NamedTuple

LONGEST = 320
"""Characters of an answer."""


class Fact(NamedTuple):
    """One answer with the questions that it answers."""

    answer: str
    questions: tuple[str, ...]


def first_sentences(text: str, *, most: int = LONGEST) -> str:
    """The whole sentences that fit, on one line; nothing where not even one does.

    >>> first_sentences("Return it.  Then\\nstop. And a third.", most=24)
    'Return it. Then stop.'
    """
    flat = " ".join(text.split())
    if len(flat) <= most:
        return flat
    ends = [found.end() for found in re.finditer(r"[.!?](?= [A-Z`])", flat) if found.end() <= most]
    return flat[: ends[-1]] if ends else ""
