"""What happened in a run, page by page, the newest first? A place in the log is a block and a number in it, so that a
page of a run of millions costs no more than one of a short run."""

import re
from collections.abc import Collection
from typing import Any

from whet.report.watch.shorten import shorten
from whet.run import strict_json
from whet.run.events import History
from whet.web.refusal import RefusedError

MOST_EVENTS = 500
_MOST_BLOCKS = 400
"""Read for one page: where events of the wanted kinds are rare, a page may be short or empty and the next goes on."""
_LEFT_OUT = frozenset(("step", "health"))


def page_of_events(
    history: History, *, before: str | None, kinds: Collection[str] | None, most: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Up to `most` events before a place, and the place from which to go on (None: that was all).

    Without `kinds` all but steps and health, which curves show.
    """
    until, number = _place(before)
    found: list[dict[str, Any]] = []
    num_read = 0
    for block in reversed(history.layout.blocks):
        if until is not None and block.start > until:
            continue
        if not _is_wanted(block.kinds, kinds):
            continue
        if num_read == _MOST_BLOCKS:
            return found, f"{block.end - 1}.0"
        num_read += 1
        events = [event for event in history.read(block) if _is_wanted((event.kind,), kinds)]
        if until is not None and block.start == until:
            events = events[:number]
        for position in reversed(range(len(events))):
            event = events[position]
            fields = strict_json.strict(dict(event.fields))
            found.append(shorten({"kind": event.kind, "time": event.time, "step": event.step, "fields": fields}))
            if len(found) == most:
                return found, f"{block.start}.{position}"
    return found, None


def _is_wanted(there: Collection[str], kinds: Collection[str] | None) -> bool:
    return any((kind in kinds) if kinds is not None else (kind not in _LEFT_OUT) for kind in there)


def _place(before: str | None) -> tuple[int | None, int]:
    if before is None:
        return None, 0
    told = re.fullmatch(r"(\d{1,15})\.(\d{1,6})", before, re.ASCII)
    if told is None:
        raise RefusedError(400, "no such place in a log", got=before, try_="the `before` of the page before")
    return int(told[1]), int(told[2])
