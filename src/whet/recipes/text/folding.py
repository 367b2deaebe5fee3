"""When are two texts the same to a reader? When only case and spaces differ."""


def folded(text: str, pair: str | None = None) -> str:
    """A text, with its second half if it has one, as it is compared.

    >>> folded("  The  Fox\\n") == folded("the fox"), folded("a", "B")
    (True, 'a\\x00b')
    """
    whole = " ".join(text.casefold().split())
    return whole if pair is None else f"{whole}\0{' '.join(pair.casefold().split())}"
