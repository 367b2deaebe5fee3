"""Take the screenshots of the docs by running the browser tests with full trainings.

`python tools/pictures.py` writes all of docs/pictures/*.png. A measurement and two trainings of the default length,
of which the first is killed and resumes, take several minutes; use an idle machine.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from whet.base import env

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
NAMES = {
    "live": "live-run",
    "evidence": "evidence",
    "compare": "comparison",
    "night-run": "at-night",
    "phone-run": "on-a-phone",
    "terminal": "terminal",
    "play": "hex",
}
"""Screenshot name in the tests -> name in the docs."""
MAX_BYTES = 1_500_000


def main() -> None:
    """Replace all screenshots, or none if anything fails."""
    with tempfile.TemporaryDirectory() as taken:
        environment = env.child_environment(WHET_SCREENSHOTS=taken, WHET_FOR_SHOW="1")
        command = [sys.executable, "-m", "pytest", "-q", "tests/browser"]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            sys.exit("the tests failed: the screenshots are unchanged")
        files = {name: Path(taken) / f"{test_name}.png" for test_name, name in NAMES.items()}
        missing = sorted(file.name for file in files.values() if not file.exists())
        if missing:
            sys.exit(f"missing: {', '.join(missing)} (is a browser installed?)")
        size = sum(file.stat().st_size for file in files.values())
        if size > MAX_BYTES:
            sys.exit(f"{size:,} bytes exceed the limit of {MAX_BYTES:,}")
        FOLDER.mkdir(exist_ok=True)
        for name, file in files.items():
            shutil.copy(file, FOLDER / f"{name}.png")
    print(f"{len(files)} screenshots, {size:,} bytes, in {FOLDER.relative_to(ROOT)}: review them")


if __name__ == "__main__":
    main()
