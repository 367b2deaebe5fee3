"""Which shape do the records of a file have?"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from whet.base.errors import UsageError
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.reading import Record, read_records
from whet.recipes.chat.shapes import alpaca, openai, openassistant, sharegpt, trm_folder

_LOOKED_AT = 64


class Shape(NamedTuple):
    """How records become turns."""

    name: str
    fits: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any]], tuple[Turn, ...]]
    gather: Callable[[Iterable[Record]], Iterator[Record]] = iter
    """Puts records together that are one conversation only together."""
    records: Callable[[Path], Iterator[Record]] = read_records
    """Reads a file."""


# The order decides where two fit: lists of messages are OpenAssistant's only where they say so.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("sharegpt", sharegpt.fits, sharegpt.read),
        Shape("alpaca", alpaca.fits, alpaca.read),
        Shape("openassistant", openassistant.fits, openassistant.read, openassistant.gather),
        Shape("openai", openai.fits, openai.read),
    )
}

TRM_FOLDER = Shape("trm-folder", trm_folder.fits, trm_folder.read, records=trm_folder.records)
"""Found by its files, not by records."""


def detect(path: Path) -> Shape:
    """The shape that most of the first records have."""
    looked = list(islice(read_records(path), _LOOKED_AT))
    seen = [record.value for record in looked if isinstance(record.value, dict)]
    fitting = Counter(name for value in seen for name, shape in SHAPES.items() if shape.fits(value))
    if not fitting:
        raise UsageError(
            f"the records of {path} have no known shape",
            got=_first(looked),
            try_="conversations (sharegpt), instruction and output (alpaca), messages (openai, openassistant)",
        )
    return max((SHAPES[name] for name in SHAPES), key=lambda shape: fitting[shape.name])


def _first(looked: Sequence[Record]) -> str:
    """The first record as far as it says why nothing fits."""
    record = next((record for record in looked if isinstance(record.value, dict)), next(iter(looked), None))
    if record is None:
        return "no records"
    if isinstance(record.value, dict):
        return ascii(f"the first has the keys {', '.join(map(str, list(record.value)[:8]))}"[:200])[1:-1]
    return f"record {record.number}: {record.fault or 'no object'}"
