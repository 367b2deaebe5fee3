"""Errors for users, in three lines: what went wrong, with which values, and what to try.

WhetError                     something failed; exit code 1
+-- UsageError                a command, key or file from the user is invalid; exit code 2
|   +-- DataChangedError      the data differs from the data that the run started with
+-- InsufficientMemoryError   training does not fit in memory, however the batch is split
+-- DivergedError             the loss is NaN or Inf, and no fallback is left
+-- LostRankError             another rank ended or hangs; exit code 75
"""

import difflib
from collections.abc import Iterable


class WhetError(Exception):
    """An error in three lines: what, got, try.

    >>> print(WhetError("no such machine", got="m9-air", try_="m2-air-8gb"))
    no such machine
      got: m9-air
      try: m2-air-8gb
    """

    exit_code = 1

    def __init__(self, what: str, *, got: object = None, try_: str | None = None) -> None:
        # Pass all three lines to Exception.args, so that repr() shows them.
        super().__init__(what, got, try_)
        self.what = what
        self.got: str | None = None if got is None else str(got)
        self.try_ = try_

    def __str__(self) -> str:
        lines = [self.what]
        if self.got is not None:
            lines.append(f"  got: {self.got}")
        if self.try_ is not None:
            lines.append(f"  try: {self.try_}")
        return "\n".join(lines)


class UsageError(WhetError):
    """Invalid input from the user, such as a wrong command, key or file."""

    exit_code = 2


class DataChangedError(UsageError):
    """The data of a run has changed since the run started. The recipe may explain the change."""


class InsufficientMemoryError(WhetError):
    """Training does not fit in memory, and no plan that needs less is left."""


class DivergedError(WhetError):
    """The loss or the weights are NaN or Inf, and no fallback is left."""


class LostRankError(WhetError):
    """Another rank ended or hangs. A restart may help."""

    exit_code = 75


def first_line(error: BaseException, *, limit: int = 200) -> str:
    """Return the first line of an exception's message, or the name of its class if it has none.

    >>> first_line(ValueError("no such column\\n  in texts.csv")), first_line(TimeoutError())
    ('no such column', 'TimeoutError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:limit]


def describe_error(error: BaseException, *, limit: int = 300) -> str:
    """Return the class of an exception and the first line of its message.

    >>> describe_error(KeyError("tokenizer")), describe_error(TimeoutError())
    ("KeyError: 'tokenizer'", 'TimeoutError')
    """
    name = type(error).__name__
    return f"{name}: {first_line(error)}"[:limit] if str(error).strip() else name


def closest_match(word: str, options: Iterable[str]) -> str | None:
    """Return the option that `word` is probably a misspelling of, or None.

    >>> closest_match("epcohs", ["epochs", "lr"])
    'epochs'
    """
    # 0.6 is difflib's default: "epcohs" matches "epochs", unrelated words do not.
    matches = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return matches[0] if matches else None


def nearest_names(word: str, options: Iterable[str], *, count: int = 3) -> list[str]:
    """Return the options most similar to the last dotted part of `word`, most similar first.

    An option is compared by its full name and by its own last part.

    >>> nearest_names("accuracy", ["arch.vocab_size", "lr", "arch.accuracies", "seed"], count=1)
    ['arch.accuracies']
    """
    word = word.rpartition(".")[2].lower()

    def likeness(option: str) -> float:
        names = (option.lower(), option.rpartition(".")[2].lower())
        return max(difflib.SequenceMatcher(None, word, name).ratio() for name in names)

    return sorted(options, key=likeness, reverse=True)[:count]
