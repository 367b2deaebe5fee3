"""In which script is a text written? Enough to tell Cyrillic among Latin, not to tell languages apart."""

import re
from bisect import bisect_right
from collections import Counter

_RANGES = (
    (0x0041, "Latin"),
    (0x0370, "Greek"),
    (0x0400, "Cyrillic"),
    (0x0530, "Armenian"),
    (0x0590, "Hebrew"),
    (0x0600, "Arabic"),
    (0x0780, "another"),
    (0x08A0, "Arabic"),
    (0x0900, "Devanagari"),
    (0x0980, "Bengali"),
    (0x0A00, "Gurmukhi"),
    (0x0A80, "Gujarati"),
    (0x0B00, "Odia"),
    (0x0B80, "Tamil"),
    (0x0C00, "Telugu"),
    (0x0C80, "Kannada"),
    (0x0D00, "Malayalam"),
    (0x0D80, "Sinhala"),
    (0x0E00, "Thai"),
    (0x0E80, "Lao"),
    (0x0F00, "Tibetan"),
    (0x1000, "Burmese"),
    (0x10A0, "Georgian"),
    (0x1100, "Hangul"),
    (0x1200, "Ethiopic"),
    (0x13A0, "another"),
    (0x1D00, "Latin"),
    (0x1F00, "Greek"),
    (0x2000, "signs"),
    (0x2E80, "Chinese or Japanese"),
    (0x3130, "Hangul"),
    (0x3190, "Chinese or Japanese"),
    (0xA000, "another"),
    (0xAC00, "Hangul"),
    (0xD7B0, "another"),
    (0xF900, "Chinese or Japanese"),
    (0xFB00, "Latin"),
    (0xFB1D, "Hebrew"),
    (0xFB50, "Arabic"),
    (0xFF00, "Chinese or Japanese"),
    (0x10000, "signs"),
    (0x20000, "Chinese or Japanese"),
)
_STARTS = [start for start, _ in _RANGES]
_LOOKED_AT = 400
_NOT_LATIN = re.compile("[^\0-\u036f\u1e00-\u1eff\u2000-\u2bff]")
_UNCOUNTED = "signs"
"""Letters of formulas and pictures: they stand in texts of every script."""

SCRIPTS = ("", *dict.fromkeys(name for _, name in _RANGES if name != _UNCOUNTED))
"""By number; 0 is for texts without letters."""
_NUMBER = {name: number for number, name in enumerate(SCRIPTS)}
LATIN = _NUMBER["Latin"]


def script_of(text: str) -> int:
    """The number of the script that most letters are of.

    >>> [SCRIPTS[script_of(text)] for text in ("a cat", "\\u043a\\u043e\\u0442", "\\u732b", "12", "\\u03b1-helix")]
    ['Latin', 'Cyrillic', 'Chinese or Japanese', '', 'Latin']
    """
    if text.isascii() or not _NOT_LATIN.search(text):
        return LATIN if any(map(str.isalpha, text[:_LOOKED_AT])) else 0
    seen: Counter[str] = Counter()
    for char in text[:_LOOKED_AT]:
        if char.isalpha():
            place = bisect_right(_STARTS, ord(char)) - 1
            if place >= 0:
                seen[_RANGES[place][1]] += 1
    seen.pop(_UNCOUNTED, None)
    return _NUMBER[max(seen, key=lambda name: seen[name])] if seen else 0
