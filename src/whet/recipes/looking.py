"""What does a look at data give, whatever the recipe? Lines for a person, JSON for a program, and how much is wrong."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLook:
    """A data report, ready to be shown."""

    lines: tuple[str, ...]
    as_json: dict[str, Any]
    num_findings: int


class LooksAtData(Protocol):
    """A recipe that can look at data before it trains on it."""

    def look_at_data(self, config: Any, path: Path, *, fix: Path | None, leave: tuple[str, ...]) -> DataLook:
        """What `path` holds and what is wrong with it; a cleaned copy at `fix`, with the kinds in `leave` left in."""
