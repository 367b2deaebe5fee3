"""Find a browser to drive. `python tests/support/chromium.py` prints its path, or fails.

Playwright would download its own; the tests use what the system has, so that they need no network.
"""

import os
import shutil
import sys
from pathlib import Path

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MAC_APPS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
MISSING = "no chromium or chrome is installed: try `apt-get install chromium`, on a Mac `brew install --cask chromium`"


def find_chromium() -> str | None:
    """The browser to drive, or None."""
    on_path = next((result for name in _PROGRAMS if (result := shutil.which(name))), None)
    return on_path or next((app for app in _MAC_APPS if os.access(app, os.X_OK) and Path(app).is_file()), None)


if __name__ == "__main__":
    print(find_chromium() or sys.exit(MISSING))
