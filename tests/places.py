"""Names that several test folders share."""

import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]
"""Runs `whet WORDS` and gives what came out."""

Tell = Callable[[str], None]
"""Shows a line at the end of the test run."""
