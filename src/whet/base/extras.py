"""Optional dependencies: the command that installs an extra of whet."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_hint(extra: str) -> str:
    """Return the pip command that installs an extra of whet, from the place where whet itself was installed from.

    That is the clone or the wheel that pip recorded, for example `pip install -e '/home/me/whet[web]'`.
    """
    try:
        recorded = json.loads(distribution("whet").read_text("direct_url.json") or "{}")
        place = Path(unquote(urlsplit(recorded["url"]).path))
        is_editable = bool(recorded.get("dir_info", {}).get("editable"))
    except (PackageNotFoundError, KeyError, ValueError, OSError):
        # Installed by name from a package index.
        return f"pip install 'whet[{extra}]'"
    if not place.exists():
        return f"pip install '.[{extra}]' in a clone of whet"
    return f"pip install {'-e ' if is_editable else ''}{shlex.quote(f'{place}[{extra}]')}"
