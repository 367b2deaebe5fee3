"""Checks and fixes of a single text: emptiness, control characters, HTML, mojibake and script."""

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping

ONE_MB = 1_000_000

# Whitespace, and invisible characters such as zero-width spaces and soft hyphens.
_INVISIBLE = " \t\r\n\f\v\u00a0\u00ad\u200b\u200c\u200d\u2060\ufeff\u3000\x00"
_WORD = re.compile(r"\w")
_NUL, _BOM, _REPLACEMENT = "\x00", "\ufeff", "\ufffd"
# Control characters except tab, line feed, form feed and carriage return.
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
    """Return the kind of defect if a text has no content, else None.

    >>> [emptiness(text) for text in ("", " \\u200b\\n", "?! ...", "no", "\\N{THUMBS UP SIGN}")]
    ['empty', 'spaces', 'punctuation', None, None]
    """
    if _WORD.search(text):
        return None
    if not text:
        return "empty"
    if not text.strip(_INVISIBLE):
        return "spaces"
    return None if any(unicodedata.category(char) == "So" for char in text) else "punctuation"


def text_defects(text: str) -> list[str]:
    """Return the kinds of defects in a text that has content."""
    kinds = []
    if not text.isprintable():
        if _NUL in text:
            kinds.append("nul")
        if _CONTROL.search(text):
            kinds.append("control")
    if not text.isascii():
        if _BOM in text:
            kinds.append("bom")
        if _REPLACEMENT in text:
            kinds.append("lost-characters")
        if has_mojibake(text):
            kinds.append("mojibake")
    if ("<" in text and _TAG.search(text)) or ("&" in text and _ENTITY.search(text)):
        kinds.append("html")
    return kinds


def fix_text(text: str, kinds: set[str]) -> str:
    """Remove the defects of these kinds from a text.

    >>> fix_text("it\\u00e2\\u20ac\\u2122s a caf\\u00c3\\u00a9<br />&amp; bar\\x00", {"mojibake", "html", "nul"})
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
        # Repeat for tags that were escaped several times, such as "&amp;lt;br&amp;gt;".
        while _TAG.search(text) or _ENTITY.search(text):
            text = _ENTITY.sub(lambda match: html.unescape(match[0]), _TAG.sub(" ", text))
    return text


def fix_pair(text: str, pair: str | None) -> tuple[str, str | None]:
    """Fix all defects of a text and its second text, so that broken characters do not hide duplicates."""
    return _fix_all(text), None if pair is None else _fix_all(pair)


def _fix_all(text: str) -> str:
    kinds = text_defects(text)
    return fix_text(text, set(kinds)) if kinds else text


def snippet(text: str, *, max_length: int = 60) -> str:
    """Shorten a text to one line for a report.

    >>> snippet("a\\n b", max_length=9), snippet("a long text", max_length=8)
    ('a b', 'a lon...')
    """
    line = " ".join(text[: 4 * max_length].split())
    is_whole = len(line) <= max_length and len(text) <= 4 * max_length
    return line if is_whole else line[: max_length - 3].rstrip() + "..."


# --- mojibake: UTF-8 decoded in another encoding ----------------------------------------------------------------------

# Match only sequences that rarely occur in correct texts: a character whose byte starts a UTF-8 sequence, followed by
# characters whose bytes continue it. Windows-1252 (with Latin-1 for undefined bytes) and Mac Roman are recognized.

_WINDOWS = {chr(code): code for code in range(256)}
_WINDOWS |= {char: byte for byte in range(0x80, 0xA0) if (char := bytes([byte]).decode("cp1252", "ignore"))}
_MAC = {bytes([byte]).decode("mac_roman"): byte for byte in range(256)}
_QUOTES = "\u2018\u2019\u201c\u201d\u2026\u2013\u2014\u2022"
"""Quotation marks, dashes, ellipses and bullets, which may follow these letters in correct texts."""
_MATH = "\u03c0\u03a9\u221e\u2211\u220f\u222b\u00b1\u2264\u2265\u00b5\u2260\u2202"
"""Symbols that may follow a root or negation sign in correct texts."""


def _between(table: Mapping[str, int], low: int, high: int, *, without: str = "") -> str:
    """Return a regular expression for the characters that the bytes from `low` to `high` decode to."""
    return f"[{re.escape(''.join(c for c, byte in table.items() if low <= byte <= high and c not in without))}]"


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
    f"|[\u221a\u00ac]{_between(_MAC, 0x80, 0xBF, without=_MATH)}"
    f"|[\u0152\u0153]{_M}"
)


def has_mojibake(text: str) -> bool:
    """Return whether a text contains characters decoded in the wrong encoding.

    >>> [has_mojibake(text) for text in ("caf\\u00c3\\u00a9", "it\\u201a\\u00c4\\u00f4s", "\\u00e9 2\\u221a\\u03c0")]
    [True, True, False]
    """
    return _FROM_WINDOWS.search(text) is not None or _FROM_MAC.search(text) is not None


def fix_mojibake(text: str) -> str:
    """Restore the characters that were decoded in the wrong encoding.

    >>> fix_mojibake("caf\\u00c3\\u00a9"), fix_mojibake("it\\u201a\\u00c4\\u00f4s")
    ('caf\\xe9', 'it\\u2019s')
    """
    # Try Mac Roman first: its three-character sequences contain pairs that match the Windows pattern.
    from_mac = _repeat_until_stable(text, _FROM_MAC, _MAC)
    return from_mac if from_mac != text else _repeat_until_stable(text, _FROM_WINDOWS, _WINDOWS)


def _repeat_until_stable(text: str, pattern: re.Pattern[str], table: Mapping[str, int]) -> str:
    """Replace matches until the text does not change: some texts were decoded incorrectly more than once.

    The loop terminates because each replacement shortens the text.
    """
    while (fixed := pattern.sub(lambda match: _decode(match[0], table), text)) != text:
        text = fixed
    return text


def _decode(text: str, table: Mapping[str, int]) -> str:
    try:
        return bytes(table[char] for char in text).decode()
    except UnicodeDecodeError:
        return text


# --- scripts: enough to detect Cyrillic among Latin texts, not to identify languages ----------------------------------

# Only the beginning of a text is examined.
_SAMPLED_CHARACTERS = 400
_NOT_LATIN = re.compile("[^\0-\u036f\u1e00-\u1eff\u2000-\u2bff]")
_LETTER_NAME = re.compile(r"(?!MODIFIER|MATHEMATICAL)([A-Z]+).* (?:LETTER|LIGATURE|SYLLABLE|CHARACTER)|(CJK|FULLWIDTH)")
"""Matches the Unicode name of a letter, which starts with its script. Symbols are excluded: they have no script."""
_SCRIPTS = dict.fromkeys(("Cjk", "Hiragana", "Katakana", "Fullwidth", "Halfwidth", "Bopomofo"), "Chinese or Japanese")


def script_of(text: str) -> str:
    """Return the most frequent script of the letters in a text; empty for a text without letters.

    >>> [script_of(text) for text in ("a cat", "\\u043a\\u043e\\u0442", "\\u732b", "12", "\\u03b1-helix")]
    ['Latin', 'Cyrillic', 'Chinese or Japanese', '', 'Latin']
    """
    sample = text[:_SAMPLED_CHARACTERS]
    if text.isascii() or not _NOT_LATIN.search(text):
        return "Latin" if any(map(str.isalpha, sample)) else ""
    seen: Counter[str] = Counter()
    for char in filter(str.isalpha, sample):
        if name := _LETTER_NAME.match(unicodedata.name(char, "")):
            script = (name[1] or name[2]).capitalize()
            seen[_SCRIPTS.get(script, script)] += 1
    return max(seen, key=lambda script: seen[script], default="")
