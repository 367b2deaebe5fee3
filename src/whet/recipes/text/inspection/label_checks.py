"""Which labels are probably not meant: headers, typing errors, seen once, or in one part only?"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from whet.recipes.text.rows.columns import LABEL_NAMES, TEXT_NAMES

_RARE_SHARE = 0.01
_RARE_ROWS = 3
_HEADER_SHARE = 0.001
_MOST_LABELS = 3_000
"""Each is compared with each: with more labels only spelling is compared."""
_LONGEST_NAME = 100
_SIGNS = re.compile(r"[\s_\-./]+")


def is_header(text: str, label: str, *, columns: Sequence[str]) -> bool:
    """Whether a row holds the names of its own columns, or names such as columns have.

    >>> is_header("text", "label", columns=("text", "label")), is_header("Sentence", "Category", columns=("a", "b"))
    (True, True)
    """
    if len(text) > _LONGEST_NAME:
        return False
    own = {name.casefold() for name in columns}
    text, label = text.strip().casefold(), label.strip().casefold()
    return (text in own or text in TEXT_NAMES) and (label in own or label in LABEL_NAMES)


def header_labels(counts: Mapping[str, int], *, label_column: str | None) -> list[str]:
    """Rare labels that are named as columns are: a header slipped in, though its text is not one."""
    total = sum(counts.values())
    names = {*LABEL_NAMES, (label_column or "label").casefold()}
    return [label for label, count in counts.items() if label.casefold() in names and count <= _HEADER_SHARE * total]


def misspelt(counts: Mapping[str, int]) -> dict[str, str]:
    """Labels that are probably another one: written alike but for case and signs, or rare and a slip away.

    >>> misspelt({"positive": 500, "postive": 2, "Negative": 5, "negative": 480, "type 1": 400, "type 2": 1})
    {'Negative': 'negative', 'postive': 'positive'}
    """
    often = sorted(counts, key=lambda label: (-counts[label], label))
    meant: dict[str, str] = {}
    plain: dict[str, str] = {}
    for label in often:
        first = plain.setdefault(_plain(label), label)
        if first != label and _plain(label):
            meant[label] = first
    if len(often) <= _MOST_LABELS:
        for label in often:
            if label not in meant and (found := _slip_of(label, often, counts=counts)) is not None:
                meant[label] = meant.get(found, found)
    return meant


def _plain(label: str) -> str:
    return _SIGNS.sub("", label.casefold())


def _slip_of(label: str, often: Sequence[str], *, counts: Mapping[str, int]) -> str | None:
    for other in often:
        if counts[label] > max(_RARE_ROWS, _RARE_SHARE * counts[other]) or counts[other] < 10 * counts[label]:
            return None
        if other != label and _is_slip(label.casefold(), other.casefold()):
            return other
    return None


def _is_slip(one: str, other: str) -> bool:
    """Whether two names are a typing error apart: one slip from four letters on, two from eight."""
    most = 2 if min(len(one), len(other)) >= 8 else 1 if min(len(one), len(other)) >= 4 else 0
    if abs(len(one) - len(other)) > most or [c for c in one if c.isdigit()] != [c for c in other if c.isdigit()]:
        return False
    # "relevant" and "irrelevant" are two labels.
    if one.endswith(other) or other.endswith(one):
        return False
    return most > 0 and _distance(one, other, most=most) <= most


def _distance(one: str, other: str, *, most: int) -> int:
    """Letters to insert, leave out, change or swap with their neighbour; no further than needed."""
    before: list[int] = []
    line = list(range(len(other) + 1))
    for row, letter in enumerate(one, start=1):
        earlier, before, line = before, line, [row]
        for column, its in enumerate(other, start=1):
            cost = min(before[column] + 1, line[-1] + 1, before[column - 1] + (letter != its))
            if row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == its:
                cost = min(cost, earlier[column - 2] + 1)
            line.append(cost)
        if min(line) > most:
            return most + 1
    return line[-1]


def one_part_labels(counts: Mapping[tuple[str, str], int]) -> dict[str, str]:
    """Labels that only one of several parts has, with that part; `counts` by label and part."""
    parts = {part for _, part in counts}
    if len(parts) < 2:
        return {}
    seen: dict[str, set[str]] = {}
    for label, part in counts:
        seen.setdefault(label, set()).add(part)
    totals: Counter[str] = Counter()
    for (label, _), count in counts.items():
        totals[label] += count
    return {label: next(iter(where)) for label, where in seen.items() if len(where) == 1 and totals[label] > 1}
