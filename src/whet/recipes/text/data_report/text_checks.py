"""Checks and fixes of a single text."""

import html
import re
import unicodedata
from bisect import bisect_right
from collections import Counter
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


def fix_mojibake(text: str) -> str:
    """The text as it was written.

    >>> read_again("caf\\u00c3\\u00a9"), read_again("it\\u201a\\u00c4\\u00f4s")
    ('caf\\xe9', 'it\\u2019s')
    """
    # Mac Roman first: its three letters contain two that look like the other.
    from_mac = _repeat_until_stable(text, _FROM_MAC, _MAC)
    return from_mac if from_mac != text else _repeat_until_stable(text, _FROM_WINDOWS, _WINDOWS)


def _repeat_until_stable(text: str, pattern: re.Pattern[str], table: Mapping[str, int]) -> str:
    """Some was read wrongly twice; each pass makes it shorter."""
    while (better := pattern.sub(lambda found: _decode(found[0], table), text)) != text:
        text = better
    return text


def _decode(text: str, table: Mapping[str, int]) -> str:
    try:
        return bytes(table[char] for char in text).decode()
    except UnicodeDecodeError:
        return text


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


ONE_MB = 1_000_000

_INVISIBLE = " \t\r\n\f\v\u00a0\u00ad\u200b\u200c\u200d\u2060\ufeff\u3000\x00"
_WORD = re.compile(r"\w")
_NUL, _BOM, _REPLACEMENT = "\x00", "\ufeff", "\ufffd"
_CONTROL = re.compile(r"[\x01-\x08\x0b\x0e-\x1f\x7f]")
_TAGS = (
    "a|abbr|b|blockquote|body|br|center|code|dd|div|dl|dt|em|font|form|h[1-6]|head|hr|html|i|iframe|img|input|li|link|"
    "meta|ol|option|p|pre|script|small|span|strike|strong|style|sub|sup|table|tbody|td|th|thead|title|tr|tt|u|ul"
)
_TAG = re.compile(rf"</?(?:{_TAGS})(?:\s[^<>]{{0,300}})?\s?/?>", re.IGNORECASE)
_ENTITY = re.compile(
    r"&(?:amp|lt|gt|quot|apos|nbsp|[mn]dash|hellip|[lr][sd]quo|[lr]aquo|copy|reg|trade|euro|pound|middot|bull|times|"
    r"deg|[aeiouAEIOU](?:uml|acute|grave|circ)|#\d{2,6}|#x[0-9a-fA-F]{2,6});"
)


def emptiness(text: str) -> str | None:
    """The kind of a text that says nothing, or None.

    >>> hollow(""), hollow(" \\u200b\\n"), hollow("?! ..."), hollow("no"), hollow("\\N{THUMBS UP SIGN}")
    ('empty', 'spaces', 'punctuation', None, None)
    """
    if _WORD.search(text):
        return None
    if not text:
        return "empty"
    if not text.strip(_INVISIBLE):
        return "spaces"
    return None if any(unicodedata.category(char) == "So" for char in text) else "punctuation"


def text_defects(text: str) -> list[str]:
    """The kinds of what stands in a text and should not."""
    found = []
    if not text.isprintable():
        if _NUL in text:
            found.append("nul")
        if _CONTROL.search(text):
            found.append("control")
    if not text.isascii():
        if _BOM in text:
            found.append("bom")
        if _REPLACEMENT in text:
            found.append("lost-characters")
        if has_mojibake(text):
            found.append("mojibake")
    if ("<" in text and _TAG.search(text)) or ("&" in text and _ENTITY.search(text)):
        found.append("html")
    return found


def fix_text(text: str, kinds: set[str]) -> str:
    """The text without the blemishes of these kinds.

    >>> cleaned("it\\u00e2\\u20ac\\u2122s a caf\\u00c3\\u00a9<br />&amp; bar\\x00", {"mojibake", "html", "nul"})
    'it\\u2019s a caf\\xe9 & bar'
    """
    if "nul" in kinds:
        text = text.replace(_NUL, "")
    if "control" in kinds:
        text = _CONTROL.sub("", text)
    if "bom" in kinds:
        text = text.replace(_BOM, "")
    if "mojibake" in kinds:
        text = fix_mojibake(text)
    if "html" in kinds:
        # "&amp;lt;br&amp;gt;" hides a tag twice.
        while _TAG.search(text) or _ENTITY.search(text):
            text = _ENTITY.sub(lambda found: html.unescape(found[0]), _TAG.sub(" ", text))
    return text


def fix_pair(text: str, pair: str | None) -> tuple[str, str | None]:
    """A text and its second half without blemishes, as repeats are looked for: broken characters hide them."""
    return _fix_all(text), None if pair is None else _fix_all(pair)


def _fix_all(text: str) -> str:
    found = text_defects(text)
    return fix_text(text, set(found)) if found else text


def snippet(text: str, *, most: int = 60) -> str:
    """A text as it is shown in a report: one line, short.

    >>> snippet("a\\n b", most=9), snippet("a long text", most=8)
    ('a b', 'a lon...')
    """
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 3].rstrip() + "..."
