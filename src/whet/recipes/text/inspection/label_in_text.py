"""Does a text give its own label away: written beside it like a tag, or by a name that no other text holds?"""

import re
from collections import Counter
from functools import lru_cache

_KEYS = "label|class|category|intent|sentiment|topic|tag|target|answer|gold"
_WORDS = re.compile(r"\w+")
_LONGEST = 5_000
_MOST_LABELS = 2_000
_ENOUGH_OTHERS = 200
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


def says_label(text: str, label: str) -> bool:
    """Whether a folded text carries its folded label as a tag.

    >>> says_label("we won the match (sport)", "sport"), says_label("sport: we won", "sport")
    (True, True)
    >>> says_label("a sport for all", "sport"), says_label("see [1]", "1"), says_label("label=1 see", "1")
    (False, False, True)
    """
    return label in text and _tag(label).search(text) is not None


class Names:
    """Counts which labels' names stand in texts of their own label, and in others'."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self.own: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.first_own: dict[str, list[int]] = {}

    def know(self, label: str) -> None:
        """Takes a label's name in, if it is one word that a text could hold."""
        word = label.casefold()
        if len(word) >= 3 and not word.isdigit() and _WORDS.fullmatch(word) and len(self._known) < _MOST_LABELS:
            self._known[word] = label

    def look(self, text: str, labels: tuple[str, ...], *, row: int) -> None:
        """Counts the names in a folded text with these labels."""
        for word in self._known.keys() & set(_WORDS.findall(text[:_LONGEST])):
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
            if not self.others[label] and total - counts[label] >= _ENOUGH_OTHERS
        }
