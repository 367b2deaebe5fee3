"""The environment of a process with a virtual Mac."""

import os
from pathlib import Path

INSTALL = 'from whet.device import virtual_mac; virtual_mac.install("m2-air-8gb")\n'


def environment(home: Path, **changes: str) -> dict[str, str]:
    """Ours, with the compiled part found in `home`."""
    return {**os.environ, "WHET_HOME": str(home), "OMP_NUM_THREADS": "1", **changes}
