"""What went wrong, with which values, and what to try: the one shape of every error a user sees.

WhetError            something failed; exit code 1
+-- UsageError       the command, a key or a file given to it is wrong; exit code 2
|   +-- DataChangedError  a run was started with other data
+-- InsufficientMemoryError    what is to be trained does not fit, however it is cut
+-- DivergedError    the loss is not a number, and no way leads on
+-- LostRankError    another process of the training is gone, or hangs; exit code 75
"""

import difflib
from collections.abc import Iterable


class WhetError(Exception):
    """A failure told in three lines: what, got, try.

    >>> print(WhetError("no such machine", got="m9-air", try_="m2-air-8gb"))
    no such machine
      got: m9-air
      try: m2-air-8gb
    """

    exit_code = 1

    def __init__(self, what: str, *, got: object = None, try_: str | None = None) -> None:
        super().__init__(what, got, try_)
        self.what = what
        self.got = None if got is None else str(got)
        self.try_ = try_

    def __str__(self) -> str:
        lines = [self.what]
        if self.got is not None:
            lines.append(f"  got: {self.got}")
        if self.try_ is not None:
            lines.append(f"  try: {self.try_}")
        return "\n".join(lines)


class UsageError(WhetError):
    """The user asked for something that cannot be meant."""

    exit_code = 2


class DataChangedError(UsageError):
    """The data of a run is not what it was; a recipe may know why."""


class InsufficientMemoryError(WhetError):
    """No plan is left that would need less memory."""


class DivergedError(WhetError):
    """The training has no numbers any longer."""


class LostRankError(WhetError):
    """Another process of the training is gone, or hangs; trying again may help."""

    exit_code = 75


def closest_match(word: str, options: Iterable[str]) -> str | None:
    """The option that `word` was probably meant to be, or None.

    >>> nearest("epcohs", ["epochs", "lr"])
    'epochs'
    """
    found = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return found[0] if found else None
