"""What must not be in a file that is shared: names of the user and the computer, and where things lie on its disk."""

import getpass
import platform
import re
from functools import lru_cache
from pathlib import Path

_PATH = re.compile(r"(?<![\w:/.])(?:~|[A-Za-z]:)?(?:/[^\s/:'\"<>,;()]+){2,}/?")
_QUOTED = re.compile(r"""(['"`])(?:~|/)[^'"`\n]*/([^'"`/\n]*)/?\1""")
"""In quotes a path may hold blanks."""
_SHORTEST_NAME = 2


def without_names(text: str) -> str:
    """The text with paths cut down to their last part, and without the user's and the computer's name.

    >>> without_names("dlopen(/Users/anna/venv/lib/libtorch.dylib) failed")
    'dlopen(.../libtorch.dylib) failed'
    """
    for shown, pattern in _patterns():
        text = pattern.sub(shown, text)
    text = _QUOTED.sub(r"\1.../\2\1", text)
    return _PATH.sub(lambda found: ".../" + found[0].rstrip("/").rsplit("/", 1)[-1], text)


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    host = platform.node()
    # The home first: its parts may be names too.
    names = [("~", str(Path.home())), ("(host)", host), ("(host)", host.split(".")[0]), ("(user)", _user())]
    return tuple(
        (shown, re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE))
        for shown, name in names
        if len(name) >= _SHORTEST_NAME
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
