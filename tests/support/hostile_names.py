"""Run folders with control characters in their names, which whet refuses to create and must still show safely."""

from pathlib import Path
from typing import Any

from whet.run.folder import Run, create_run


def create_renamed_run(path: Path, **fields: Any) -> Run:
    """Create a run under an ordinary name, and rename its folder as somebody else may do."""
    created = create_run(path.parent / "created", **fields)
    created.path.rename(path)
    return created.model_copy(update={"path": path})
