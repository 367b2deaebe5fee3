"""Checks for labels that are headers or typos, and for labels that appear in the texts."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from whet.recipes.text.readers.samples import LABEL_NAMES, TEXT_NAMES

# A label is rare if it has at most _RARE_ROWS rows, or this fraction of the rows of the similar label.
_RARE_SHARE = 0.01
_RARE_ROWS = 3
_HEADER_SHARE = 0.001
_MAX_HEADER_LENGTH = 100
_MAX_COMPARED_LABELS = 3_000
"""The maximum number of labels for detecting typos, which compares all pairs of labels."""
_PUNCTUATION = re.compile(r"[\s_\-./]+")

_TAG_KEYS = "label|class|category|intent|sentiment|topic|tag|target|answer|gold"
_WORDS = re.compile(r"\w+")
_MAX_TEXT_LENGTH = 5_000
_MAX_MENTIONED_LABELS = 2_000
_MIN_OTHER_TEXTS = 200
"""The minimum number of texts with other labels. With fewer, a name that none of them contains may be chance."""


# --- label cells ------------------------------------------------------------------------------------------------------


def is_header(text: str, label: str, *, columns: Sequence[str]) -> bool:
    """Return whether text and label of a row are the names of its columns, or common column names.

    >>> is_header("text", "label", columns=("text", "label")), is_header("Sentence", "Category", columns=("a", "b"))
    (True, True)
    """
    if len(text) > _MAX_HEADER_LENGTH:
        return False
    own = {name.casefold() for name in columns}
    text, label = text.strip().casefold(), label.strip().casefold()
    return (text in own or text in TEXT_NAMES) and (label in own or label in LABEL_NAMES)


def header_labels(counts: Mapping[str, int], *, label_column: str | None) -> list[str]:
    """Return rare labels that are column names, probably from the headers of concatenated files."""
    total = sum(counts.values())
    names = {*LABEL_NAMES, (label_column or "label").casefold()}
    return [label for label, count in counts.items() if label.casefold() in names and count <= _HEADER_SHARE * total]


def misspelled(counts: Mapping[str, int]) -> dict[str, str]:
    """Map labels that are probably misspelled to the correct label.

    A label is misspelled if it differs from a more frequent label only in case and punctuation, or if it is rare and
    differs only by a typo.

    >>> misspelled({"positive": 500, "postive": 2, "Negative": 5, "negative": 480, "type 1": 400, "type 2": 1})
    {'Negative': 'negative', 'postive': 'positive'}
    """
    by_frequency = sorted(counts, key=lambda label: (-counts[label], label))
    corrections: dict[str, str] = {}
    first_spelling: dict[str, str] = {}
    for label in by_frequency:
        first = first_spelling.setdefault(_normalized(label), label)
        if first != label and _normalized(label):
            corrections[label] = first
    if len(by_frequency) <= _MAX_COMPARED_LABELS:
        for label in by_frequency:
            if label not in corrections and (typo_of := _typo_of(label, by_frequency, counts=counts)) is not None:
                corrections[label] = corrections.get(typo_of, typo_of)
    return corrections


def single_split_labels(counts: Mapping[tuple[str, str], int]) -> dict[str, str]:
    """Map labels that occur more than once, but only in one of several splits, to that split."""
    if len({split for _, split in counts}) < 2:
        return {}
    splits: dict[str, set[str]] = {}
    totals: Counter[str] = Counter()
    for (label, split), count in counts.items():
        splits.setdefault(label, set()).add(split)
        totals[label] += count
    return {label: next(iter(names)) for label, names in splits.items() if len(names) == 1 and totals[label] > 1}


def _normalized(label: str) -> str:
    return _PUNCTUATION.sub("", label.casefold())


def _typo_of(label: str, by_frequency: Sequence[str], *, counts: Mapping[str, int]) -> str | None:
    """Return the frequent label that a rare label is probably a typo of, or None."""
    for other in by_frequency:
        # Labels are sorted by frequency: if this one is too rare, so are all later ones.
        if counts[label] > max(_RARE_ROWS, _RARE_SHARE * counts[other]) or counts[other] < 10 * counts[label]:
            return None
        if other != label and _is_typo(label.casefold(), other.casefold()):
            return other
    return None


def _is_typo(one: str, other: str) -> bool:
    """Return whether two names differ by a typo: one edit for names of four letters or more, two edits from eight."""
    shorter = min(len(one), len(other))
    max_edits = 2 if shorter >= 8 else 1 if shorter >= 4 else 0
    if abs(len(one) - len(other)) > max_edits or [c for c in one if c.isdigit()] != [c for c in other if c.isdigit()]:
        return False
    # "relevant" and "irrelevant" are different labels, not typos.
    if one.endswith(other) or other.endswith(one):
        return False
    return max_edits > 0 and _edit_distance(one, other, limit=max_edits) <= max_edits


def _edit_distance(one: str, other: str, *, limit: int) -> int:
    """Return the optimal string alignment distance: insertions, deletions, substitutions and adjacent transpositions.

    Return `limit` + 1 as soon as the distance exceeds `limit`.
    """
    before: list[int] = []
    line = list(range(len(other) + 1))
    for row, char in enumerate(one, start=1):
        earlier, before, line = before, line, [row]
        for column, other_char in enumerate(other, start=1):
            cost = min(before[column] + 1, line[-1] + 1, before[column - 1] + (char != other_char))
            if row > 1 and column > 1 and char == other[column - 2] and one[row - 2] == other_char:
                cost = min(cost, earlier[column - 2] + 1)
            line.append(cost)
        if min(line) > limit:
            return limit + 1
    return line[-1]


# --- labels in texts --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4_096)
def _tag_pattern(label: str) -> re.Pattern[str]:
    name = re.escape(label)
    patterns = [rf"__label__{name}(?!\w)", rf"\b(?:{_TAG_KEYS})\s*[:=]\s*[\"'\[(]?{name}(?!\w)"]
    # Do not search for short labels and numbers in brackets, which may be citations.
    if len(label) >= 3 and any(map(str.isalpha, label)):
        opening, closing = r"[\[(<{#]", r"[\])>}]"
        patterns += [
            rf"\A\W*{opening}{name}(?!\w)",
            rf"\A{name}\s*[:|>]",
            rf"{opening}{name}{closing}?\W*\Z",
            rf"(?:[|=]|->|=>|\u2192)\s*{name}\W*\Z",
            rf"\A{name}\Z",
        ]
    return re.compile("|".join(patterns))


def states_label(text: str, label: str) -> bool:
    """Return whether a normalized text states its normalized label as a tag, for example as "[label]" or "label: ".

    >>> states_label("we won the match (sport)", "sport"), states_label("sport: we won", "sport")
    (True, True)
    >>> states_label("a sport for all", "sport"), states_label("see [1]", "1"), states_label("label=1 see", "1")
    (False, False, True)
    """
    return label in text and _tag_pattern(label).search(text) is not None


class LabelMentions:
    """Counts how often texts contain the name of their own label, and the names of other labels."""

    def __init__(self) -> None:
        self._label_of_word: dict[str, str] = {}
        self.own: Counter[str] = Counter()
        self._others: Counter[str] = Counter()
        self._first_rows: dict[str, list[int]] = {}

    def add_label(self, label: str) -> None:
        """Register a label to search for. Only labels that are a single word are supported."""
        word = label.casefold()
        is_word = len(word) >= 3 and not word.isdigit() and _WORDS.fullmatch(word)
        if is_word and len(self._label_of_word) < _MAX_MENTIONED_LABELS:
            self._label_of_word[word] = label

    def add_text(self, text: str, labels: tuple[str, ...], *, row: int) -> None:
        """Count the labels whose names occur in a normalized text."""
        for word in self._label_of_word.keys() & set(_WORDS.findall(text[:_MAX_TEXT_LENGTH])):
            label = self._label_of_word[word]
            if label in labels:
                self.own[label] += 1
                rows = self._first_rows.setdefault(label, [])
                if len(rows) < 3:
                    rows.append(row)
            else:
                self._others[label] += 1

    def only_own(self, counts: Counter[str]) -> dict[str, list[int]]:
        """Map labels whose names occur only in texts with the same label to the first of these rows."""
        total = sum(counts.values())
        return {
            label: rows
            for label, rows in self._first_rows.items()
            if not self._others[label] and total - counts[label] >= _MIN_OTHER_TEXTS
        }
