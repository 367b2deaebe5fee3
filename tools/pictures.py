"""Takes the pictures of the docs: the tests in a real browser, with whole trainings, and a few of what they saw.

python tools/pictures.py        writes docs/pictures/*.png (some minutes; best on a machine that does nothing else)
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from whet.base import env

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
KEPT = {
    "live": "live-run",
    "evidence": "evidence",
    "compare": "comparison",
    "night-run": "at-night",
    "phone-run": "on-a-phone",
    "terminal": "terminal",
    "play": "hex",
}
"""What a test calls a picture, and what the docs call it."""
MOST_BYTES = 1_500_000


def main() -> None:
    """Takes them all, or leaves those that are there."""
    with tempfile.TemporaryDirectory() as taken:
        environment = env.child_environment(WHET_SCREENSHOTS=taken, WHET_FOR_SHOW="1")
        command = [sys.executable, "-m", "pytest", "-q", "tests/browser"]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            sys.exit("the tests did not pass: the pictures stay as they are")
        files = {name: Path(taken) / f"{test_name}.png" for test_name, name in KEPT.items()}
        missing = sorted(file.name for file in files.values() if not file.exists())
        if missing:
            sys.exit(f"not taken: {', '.join(missing)} (is there a browser?)")
        size = sum(file.stat().st_size for file in files.values())
        if size > MOST_BYTES:
            sys.exit(f"{size:,} bytes are more than the {MOST_BYTES:,} that pictures may take")
        FOLDER.mkdir(exist_ok=True)
        for name, file in files.items():
            shutil.copy(file, FOLDER / f"{name}.png")
    print(f"{len(files)} pictures, {size:,} bytes, in {FOLDER.relative_to(ROOT)}: look at them")


if __name__ == "__main__":
    main()
