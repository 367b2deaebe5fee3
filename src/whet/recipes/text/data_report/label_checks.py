"""Checks of labels: headers, typos, labels written in their own texts."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from whet.recipes.text.readers.samples import LABEL_NAMES, TEXT_NAMES

_RARE_SHARE = 0.01
_RARE_ROWS = 3
_HEADER_SHARE = 0.001
_MAX_COMPARED_LABELS = 3_000
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
        first = plain.setdefault(_normalized(label), label)
        if first != label and _normalized(label):
            meant[label] = first
    if len(often) <= _MAX_COMPARED_LABELS:
        for label in often:
            if label not in meant and (found := _typo_of(label, often, counts=counts)) is not None:
                meant[label] = meant.get(found, found)
    return meant


def _normalized(label: str) -> str:
    return _SIGNS.sub("", label.casefold())


def _typo_of(label: str, often: Sequence[str], *, counts: Mapping[str, int]) -> str | None:
    for other in often:
        if counts[label] > max(_RARE_ROWS, _RARE_SHARE * counts[other]) or counts[other] < 10 * counts[label]:
            return None
        if other != label and _is_typo(label.casefold(), other.casefold()):
            return other
    return None


def _is_typo(one: str, other: str) -> bool:
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


def single_split_labels(counts: Mapping[tuple[str, str], int]) -> dict[str, str]:
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


_KEYS = "label|class|category|intent|sentiment|topic|tag|target|answer|gold"
_WORDS = re.compile(r"\w+")
_MAX_TEXT = 5_000
_MAX_MENTIONED_LABELS = 2_000
_MIN_OTHER_TEXTS = 200
"""Texts of other labels that must be free of a name before it means anything."""


@lru_cache(maxsize=4_096)
def _tag(label: str) -> re.Pattern[str]:
    name = re.escape(label)
    ways = [rf"__label__{name}(?!\w)", rf"\b(?:{_KEYS})\s*[:=]\s*[\"'\[(]?{name}(?!\w)"]
    if len(label) >= 3 and any(map(str.isalpha, label)):
        opening, closing = r"[\[(<{#]", r"[\])>}]"
        ways += [
            rf"\A\W*{opening}{name}(?!\w)",
            rf"\A{name}\s*[:|>]",
            rf"{opening}{name}{closing}?\W*\Z",
            rf"(?:[|=]|->|=>|\u2192)\s*{name}\W*\Z",
            rf"\A{name}\Z",
        ]
    return re.compile("|".join(ways))


def states_label(text: str, label: str) -> bool:
    """Whether a folded text carries its folded label as a tag.

    >>> says_label("we won the match (sport)", "sport"), says_label("sport: we won", "sport")
    (True, True)
    >>> says_label("a sport for all", "sport"), says_label("see [1]", "1"), says_label("label=1 see", "1")
    (False, False, True)
    """
    return label in text and _tag(label).search(text) is not None


class LabelMentions:
    """Counts which labels' names stand in texts of their own label, and in others'."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self.own: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.first_own: dict[str, list[int]] = {}

    def know(self, label: str) -> None:
        """Takes a label's name in, if it is one word that a text could hold."""
        word = label.casefold()
        if (
            len(word) >= 3
            and not word.isdigit()
            and _WORDS.fullmatch(word)
            and len(self._known) < _MAX_MENTIONED_LABELS
        ):
            self._known[word] = label

    def look(self, text: str, labels: tuple[str, ...], *, row: int) -> None:
        """Counts the names in a folded text with these labels."""
        for word in self._known.keys() & set(_WORDS.findall(text[:_MAX_TEXT])):
            label = self._known[word]
            if label in labels:
                self.own[label] += 1
                rows = self.first_own.setdefault(label, [])
                if len(rows) < 3:
                    rows.append(row)
            else:
                self.others[label] += 1

    def telling(self, counts: Counter[str]) -> dict[str, list[int]]:
        """The labels whose name stands in their own texts alone, with the first of these."""
        total = sum(counts.values())
        return {
            label: rows
            for label, rows in self.first_own.items()
            if not self.others[label] and total - counts[label] >= _MIN_OTHER_TEXTS
        }
