"""Format bytes, seconds, counts, speeds and lists as text, and replace unprintable characters."""

import math
from collections.abc import Sequence

# One GB is 2**30 bytes, as Apple and memory vendors count it: an "8 GB" Mac has 8 * GB.
GB = 1024**3

_BYTE_STEPS = (("TB", 1024**4), ("GB", GB), ("MB", 1024**2), ("kB", 1024))
_COUNT_STEPS = ((" B", 1e9), (" M", 1e6))


def format_bytes(num_bytes: float) -> str:
    """Format bytes. Values below 100 of a unit have one decimal, unless it is zero.

    >>> format_bytes(5726623061), format_bytes(8 * GB), format_bytes(6.01 * 1024**2), format_bytes(512)
    ('5.3 GB', '8 GB', '6 MB', '512 B')
    """
    for unit, size in _BYTE_STEPS:
        if abs(num_bytes) >= size:
            value = num_bytes / size
            text = f"{value:.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")
            return f"{text} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format a duration in a readable unit.

    >>> format_seconds(0.0042), format_seconds(38), format_seconds(14 * 60), format_seconds(2 * 3600 + 5 * 60)
    ('4 ms', '38 s', '14 min', '2 h 5 min')
    """
    if not math.isfinite(seconds):
        return "unknown"
    # Use milliseconds only below 0.95 s, so that 0.97 s is shown as 1.0 s and not as 970 ms.
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def format_count(count: float) -> str:
    """Format a count. Millions and billions are abbreviated.

    >>> format_count(109_482_240), format_count(7320)
    ('109.5 M', '7,320')
    """
    for unit, size in _COUNT_STEPS:
        if abs(count) >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:,.0f}"


def format_speed(samples_per_second: float) -> str:
    """Format a throughput with at least three significant digits and never as a power of ten.

    >>> format_speed(22_784.1), format_speed(81.63), format_speed(0.5)
    ('22,784 samples/s', '81.6 samples/s', '0.5 samples/s')
    """
    digits = f"{samples_per_second:,.0f}" if samples_per_second >= 999.5 else f"{samples_per_second:.3g}"
    return f"{digits} samples/s"


def format_plural(count: int, noun: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1.

    >>> format_plural(1, "row"), format_plural(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_percent(share: float, digits: int = 0) -> str:
    """Format a fraction in percent.

    >>> format_percent(0.5), format_percent(0.1304, 1)
    ('50 %', '13.0 %')
    """
    return f"{100 * share:.{digits}f} %"


def format_list(items: Sequence[str], *, most: int = 3, separator: str = ", ") -> str:
    """Join the first `most` items with commas, and add the number of omitted items.

    >>> format_list(["0.weight", "0.bias", "1.weight", "1.bias"])
    '0.weight, 0.bias, 1.weight and 1 more'
    """
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def printable(text: str) -> str:
    """Replace control characters except newlines with spaces, because names may come from untrusted files.

    >>> printable("a\\x1b[2Jb\\n")
    'a [2Jb\\n'
    """
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def printable_line(text: str) -> str:
    """Replace control characters with spaces, newlines included.

    >>> printable_line("a\\x1b[2Jb\\nc")
    'a [2Jb c'
    """
    return text if text.isprintable() else printable(text).replace("\n", " ")


def one_line(text: str) -> str:
    """Return the text as one line, without control characters and with single spaces.

    >>> one_line(" a\\x1bb\\n   c ")
    'a b c'
    """
    return " ".join(printable_line(text).split())


def valid_utf8(text: str) -> str:
    """Replace characters that UTF-8 cannot encode, such as lone surrogates from JSON or from a command line."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
