"""Where does a run come from: which machine, which versions, and how is it done again?"""

import shlex
from pathlib import Path
from typing import Any

from whet.base.errors import WhetError
from whet.base.record import Record
from whet.run import strict_json
from whet.run.folder import Run
from whet.run.plain_file import read_plain


class Origin(Record):
    """What it takes to do a run again."""

    command: str | None
    """None: it was started from Python."""
    config: dict[str, Any]
    seed: int | None
    data: str | None
    """The fingerprint of the training data, as the newest checkpoint knows it."""
    num_samples: int | None
    versions: dict[str, str]
    machine: dict[str, Any]


def origin(run: Run) -> Origin:
    """From the files of the run; what is missing or unreadable is None."""
    seed = run.config.get("seed")
    data = _data(run.checkpoints)
    fingerprint, count = data.get("fingerprint"), data.get("num_samples")
    return Origin(
        command=shlex.join(word for word in run.header.command if word != "--fresh") or None,
        config=run.config,
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
        data=fingerprint if isinstance(fingerprint, str) else None,
        num_samples=count if isinstance(count, int) and not isinstance(count, bool) else None,
        versions={name: version for name, version in run.versions.items() if version is not None},
        machine=run.machine,
    )


def _data(checkpoints: Path) -> dict[str, Any]:
    """What the newest checkpoint that can be read says about the data."""
    try:
        manifests = sorted(checkpoints.glob("step-*/manifest.json"), reverse=True)
    except OSError:
        return {}
    for path in manifests[:3]:
        try:
            about = strict_json.decode(read_plain(path)).get("about")
        except (OSError, ValueError, WhetError):
            continue
        data = about.get("data") if isinstance(about, dict) else None
        if isinstance(data, dict):
            return data
    return {}
