"""Remove personal data from free text: names, folders, serial numbers and other identifiers."""

import getpass
import os
import platform
import pwd
import re
from functools import lru_cache
from pathlib import Path

# The name of a folder may contain up to three spaces, as in "/Volumes/My disk/x.pt". With more, it is probably a
# sentence.
_FOLDER = r"/[^\s/:'\"<>,;()~]+(?: [^\s/:'\"<>,;()~]+){0,3}(?=/)"
_PATH = re.compile(rf"(?<![\w:/.])(?:~|[A-Za-z]:)?(?:(?:{_FOLDER})+|(?<=~))/[^\s/:'\"<>,;()]+/?")
# A quoted path may contain spaces anywhere.
_QUOTED_PATH = re.compile(r"""(['"`])(?:~|/)[^'"`\n]*/([^'"`/\n]*)/?\1""")
_HOME = re.compile(r"/(?:Users|home)/[^\s/:'\"<>,;()]+")
_IDENTIFIERS = (
    # UUIDs of a Mac, a disk or a GPU.
    ("(id)", re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE)),
    ("(address)", re.compile(r"\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b", re.IGNORECASE)),
    ("(address)", re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")),
    (r"\1(serial)", re.compile(r"(serial(?:[ _]?number)?['\"]?\s*[:=]?\s*['\"]?)(?=\w*\d)\w{5,}", re.IGNORECASE)),
    # Serial numbers of Apple are ten to twelve capital letters and digits.
    ("(serial)", re.compile(r"\b(?=[A-Z]*\d)(?=\d*[A-Z])[A-Z0-9]{10,12}\b")),
)
# Replacing a one-letter name would garble the text.
_MIN_NAME_LENGTH = 2


def redact(text: str) -> str:
    """Shorten paths to their last component, and remove names of the user and the host, addresses and serial numbers.

    >>> redact("dlopen(/Users/anna/venv/lib/libtorch.dylib) failed")
    'dlopen(.../libtorch.dylib) failed'
    """
    for replacement, pattern in _name_patterns():
        text = pattern.sub(replacement, text)
    return redact_identifiers(text)


def redact_identifiers(text: str) -> str:
    """Redact everything except names, for text from another computer. Text that is already redacted is unchanged."""
    for replacement, pattern in (*_IDENTIFIERS, ("~", _HOME)):
        text = pattern.sub(replacement, text)
    text = _QUOTED_PATH.sub(r"\1.../\2\1", text)
    return _PATH.sub(lambda match: ".../" + match[0].rstrip("/").rsplit("/", 1)[-1], text)


@lru_cache(maxsize=1)
def _name_patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    host = platform.node()
    # Replace the home folder first, because its components may be names that are replaced later.
    names = [("~", str(Path.home())), ("(host)", host), ("(host)", host.split(".")[0])]
    names += [("(user)", name) for name in _user_names()]
    return tuple(
        (replacement, re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE))
        for replacement, name in names
        if len(name) >= _MIN_NAME_LENGTH
    )


def _user_names() -> tuple[str, ...]:
    """Return the full name and the login name of the user, or nothing if they are unknown."""
    try:
        return pwd.getpwuid(os.getuid()).pw_gecos.split(",")[0], getpass.getuser()
    except (OSError, KeyError):
        return ()
