"""Which letters are UTF-8 that some program read in another encoding, and what did they say?

Only what can hardly be meant is taken: a letter that begins a character in UTF-8, followed by signs that continue it.
Windows-1252 (with Latin-1 where that has no letter) and Mac Roman are known.
"""

import re
from collections.abc import Mapping

_WINDOWS = {chr(code): code for code in range(256)}
_WINDOWS |= {char: byte for byte in range(0x80, 0xA0) if (char := bytes([byte]).decode("cp1252", "ignore"))}
_MAC = {bytes([byte]).decode("mac_roman"): byte for byte in range(256)}
_QUOTES = "\u2018\u2019\u201c\u201d\u2026\u2013\u2014\u2022"
"""Quotes, dashes and dots: they also follow such letters in texts that are right."""
_MATHS = "\u03c0\u03a9\u221e\u2211\u220f\u222b\u00b1\u2264\u2265\u00b5\u2260\u2202"
"""What may follow a root or a negation."""


def _between(table: Mapping[str, int], least: int, most: int, *, without: str = "") -> str:
    """A class of characters that stand for these bytes."""
    return f"[{re.escape(''.join(c for c, byte in table.items() if least <= byte <= most and c not in without))}]"


_W = _between(_WINDOWS, 0x80, 0xBF)
_FROM_WINDOWS = re.compile(
    f"[\u00c2\u00c3]{_W}"
    f"|[\u00c4\u00c5]{_between(_WINDOWS, 0x80, 0xBF, without=_QUOTES)}"
    f"|(?:[\u00ce-\u00d1]{_W}){{2,}}"
    f"|\u00e2{_between(_WINDOWS, 0x80, 0x9F, without=_QUOTES)}{_W}"
    f"|\u00e3{_between(_WINDOWS, 0x81, 0x83)}{_W}"
    f"|\u00f0{_between(_WINDOWS, 0x9F, 0x9F)}{_W}{{2}}"
    f"|\u00ef(?:\u00bb\u00bf|\u00ac{_W})"
)
_M = _between(_MAC, 0x80, 0xBF)
_FROM_MAC = re.compile(
    f"\u201a{_between(_MAC, 0x80, 0x9F)}{_M}"
    f"|(?<=[^\\W\\d_])\u221a{_M}"
    f"|(?<=[\u0080-\uffff])\u00ac{_M}"
    f"|[\u221a\u00ac]{_between(_MAC, 0x80, 0xBF, without=_MATHS)}"
    f"|[\u0152\u0153]{_M}"
)


def has_mojibake(text: str) -> bool:
    """Whether a text holds letters that were read wrongly.

    >>> [has_mojibake(text) for text in ("caf\\u00c3\\u00a9", "it\\u201a\\u00c4\\u00f4s", "\\u00e9 2\\u221a\\u03c0")]
    [True, True, False]
    """
    return _FROM_WINDOWS.search(text) is not None or _FROM_MAC.search(text) is not None


def read_again(text: str) -> str:
    """The text as it was written.

    >>> read_again("caf\\u00c3\\u00a9"), read_again("it\\u201a\\u00c4\\u00f4s")
    ('caf\\xe9', 'it\\u2019s')
    """
    # Mac Roman first: its three letters contain two that look like the other.
    from_mac = _until_it_stays(text, _FROM_MAC, _MAC)
    return from_mac if from_mac != text else _until_it_stays(text, _FROM_WINDOWS, _WINDOWS)


def _until_it_stays(text: str, pattern: re.Pattern[str], table: Mapping[str, int]) -> str:
    """Some was read wrongly twice; each pass makes it shorter."""
    while (better := pattern.sub(lambda found: _decoded(found[0], table), text)) != text:
        text = better
    return text


def _decoded(text: str, table: Mapping[str, int]) -> str:
    try:
        return bytes(table[char] for char in text).decode()
    except UnicodeDecodeError:
        return text
