"""How are JSON lines read? One object per line; a line that is none is a fault of that line."""

import json
from collections.abc import Iterator

from whet.recipes.text.rows.lines import read_lines
from whet.recipes.text.rows.row import Fault, Row, Source


def read_json_lines(source: Source) -> Iterator[Row]:
    """Every line that is not blank."""
    for line in read_lines(source):
        if not line.text.strip() and line.fault is None:
            continue
        fault, cells = line.fault, {}
        if fault is None:
            try:
                record = json.loads(line.text)
            except (ValueError, RecursionError) as error:
                fault = _no_json(line.text, error)
            else:
                if isinstance(record, dict):
                    cells = record
                else:
                    fault = Fault(
                        kind="not-a-row",
                        what="is not an object",
                        got=line.text[:60],
                        try_='{"text": "...", "label": "..."}',
                    )
        yield Row(
            line=line.number,
            cells=cells,
            raw=line.text,
            ending=line.ending,
            num_bytes=line.num_bytes,
            fault=fault,
            has_bom=line.has_bom,
        )


def _no_json(text: str, error: Exception) -> Fault:
    """A line that stops before its object is closed was cut; any other was never JSON."""
    is_cut = text.lstrip().startswith("{") and not text.rstrip().endswith("}")
    return Fault(
        kind="truncated" if is_cut else "not-a-row",
        what="is not JSON",
        got=str(error)[:200],
        try_="one object per line",
    )
