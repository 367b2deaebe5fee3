"""Few rows that cover every pair of choices of many factors."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], *, at_least: int = 0, seed: int = 0) -> list[Row]:
    """Rows in which each pair of choices occurs; more rows at random up to `at_least`."""
    draw = random.Random(seed)
    names = list(factors)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    rows: list[Row] = []
    while missing or len(rows) < at_least:
        candidates = [{name: draw.choice(factors[name]) for name in names} for _ in range(60)]
        row = max(candidates, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(row)
        rows.append(row)
    return rows


def pairs_of(row: Row) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))
