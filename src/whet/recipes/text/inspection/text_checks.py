"""What is wrong with one text by itself, and how is it put right?"""

import html
import re
import unicodedata

from whet.recipes.text.inspection.mojibake import has_mojibake, read_again

ONE_MB = 1_000_000

_NOTHING = " \t\r\n\f\v\u00a0\u00ad\u200b\u200c\u200d\u2060\ufeff\u3000\x00"
_WORD = re.compile(r"\w")
_NUL, _BOM, _LOST = "\x00", "\ufeff", "\ufffd"
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


def hollow(text: str) -> str | None:
    """The kind of a text that says nothing, or None.

    >>> hollow(""), hollow(" \\u200b\\n"), hollow("?! ..."), hollow("no"), hollow("\\N{THUMBS UP SIGN}")
    ('empty', 'spaces', 'punctuation', None, None)
    """
    if _WORD.search(text):
        return None
    if not text:
        return "empty"
    if not text.strip(_NOTHING):
        return "spaces"
    return None if any(unicodedata.category(char) == "So" for char in text) else "punctuation"


def blemishes(text: str) -> list[str]:
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
        if _LOST in text:
            found.append("lost-characters")
        if has_mojibake(text):
            found.append("mojibake")
    if ("<" in text and _TAG.search(text)) or ("&" in text and _ENTITY.search(text)):
        found.append("html")
    return found


def cleaned(text: str, kinds: set[str]) -> str:
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
        text = read_again(text)
    if "html" in kinds:
        # "&amp;lt;br&amp;gt;" hides a tag twice.
        while _TAG.search(text) or _ENTITY.search(text):
            text = _ENTITY.sub(lambda found: html.unescape(found[0]), _TAG.sub(" ", text))
    return text


def put_right(text: str, pair: str | None) -> tuple[str, str | None]:
    """A text and its second half without blemishes, as repeats are looked for: broken characters hide them."""
    return _without_blemishes(text), None if pair is None else _without_blemishes(pair)


def _without_blemishes(text: str) -> str:
    found = blemishes(text)
    return cleaned(text, set(found)) if found else text


def snippet(text: str, *, most: int = 60) -> str:
    """A text as it is shown in a report: one line, short.

    >>> snippet("a\\n b", most=9), snippet("a long text", most=8)
    ('a b', 'a lon...')
    """
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 3].rstrip() + "..."
