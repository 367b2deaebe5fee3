"""Names that several test folders share."""

import subprocess
from collections.abc import Callable
from pathlib import Path

SUPPORT = Path(__file__).parent
"""Helpers of the tests, and programs that tests start."""
ROOT = SUPPORT.parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]
"""Runs `whet WORDS` and returns the completed process."""

ReportCount = Callable[[str], None]
"""Shows a line at the end of the test run."""
