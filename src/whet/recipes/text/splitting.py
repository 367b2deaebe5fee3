"""How is a corpus cut into train, dev and test, so that nothing of one side is known on another? No torch."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence

from whet.recipes.text.corpus import Corpus, Examples
from whet.recipes.text.folding import folded


def split(
    examples: Examples, *, classes: Sequence[str], seed: int = 0, groups: Sequence[str | None] | None = None
) -> Corpus:
    """80/10/10 in every class, decided by the texts alone; what belongs together stays on one side.

    Together belong rows of one group, and rows whose texts differ in case and spaces only. The order of rows does not
    matter, and a class of fewer than five rows is trained on whole.

    >>> rows = Examples(texts=tuple(f"text {n}" for n in range(40)), labels=(0, 1) * 20)
    >>> corpus = split(rows, classes=["even", "odd"])
    >>> len(corpus.train), len(corpus.dev), len(corpus.test), sorted(corpus.test.labels)
    (32, 4, 4, [0, 0, 1, 1])
    """
    units = _units(examples, groups=groups)
    often = Counter(examples.labels)
    hashed = {unit: min(_hashed(examples, row, seed=seed) for row in rows) for unit, rows in units.items()}
    by_class: defaultdict[int, list[int]] = defaultdict(list)
    for unit in sorted(units, key=lambda unit: hashed[unit]):
        by_class[_label_of([examples.labels[row] for row in units[unit]], often)].append(unit)
    places: dict[str, list[int]] = {"train": [], "dev": [], "test": []}
    for inside in by_class.values():
        for unit, place in zip(inside, _cut([len(units[unit]) for unit in inside]), strict=True):
            places[place] += units[unit]
    train, dev, test = (examples.at(sorted(rows)) for rows in places.values())
    return Corpus(classes=tuple(classes), train=train, dev=dev, test=test)


def _cut(sizes: Sequence[int]) -> list[str]:
    """Where units of these sizes go: of ten single rows the fifth to dev, the tenth to test.

    >>> _cut([1] * 10)
    ['train', 'train', 'train', 'train', 'dev', 'train', 'train', 'train', 'train', 'test']
    """
    places: list[str] = []
    taken = dev = test = 0
    for size in sizes:
        taken += size
        if 10 * dev + 5 * size <= taken:
            places.append("dev")
            dev += size
        elif 10 * test + 10 * size <= taken:
            places.append("test")
            test += size
        else:
            places.append("train")
    return places


def _units(examples: Examples, *, groups: Sequence[str | None] | None) -> dict[int, list[int]]:
    """The rows that must stay together, by the first row of each unit."""
    leader = list(range(len(examples)))

    def lead(row: int) -> int:
        while leader[row] != row:
            leader[row] = leader[leader[row]]
            row = leader[row]
        return row

    seen: dict[tuple[str, str], int] = {}
    for row, text in enumerate(examples.texts):
        ties = [("text", folded(text, examples.pairs[row] if examples.pairs else None))]
        if groups is not None and groups[row] is not None:
            ties.append(("group", str(groups[row])))
        for tie in ties:
            one, other = lead(row), lead(seen.setdefault(tie, row))
            leader[max(one, other)] = min(one, other)
    units: defaultdict[int, list[int]] = defaultdict(list)
    for row in range(len(examples)):
        units[lead(row)].append(row)
    return units


def _label_of(labels: Sequence[int], often: Counter[int]) -> int:
    """The class that a unit counts for: its most frequent one, of equals the rarer, so that rare ones are spread."""
    inside = Counter(labels)
    return min(inside, key=lambda label: (-inside[label], often[label], label))


def _hashed(examples: Examples, row: int, *, seed: int) -> bytes:
    text = examples.texts[row] + (f"\0{examples.pairs[row]}" if examples.pairs else "")
    return hashlib.sha256((f"{seed}\0{text}" if seed else text).encode()).digest()
