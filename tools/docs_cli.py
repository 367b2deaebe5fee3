"""Generate docs/cli.md: the help of every command."""

import contextlib
import io
from unittest import mock

from whet.cli.main import GROUPS, run

_HEAD = """# Command line

What `whet COMMAND --help` prints. Settings are given as `key=value` ([keys.md](keys.md)). MODEL and FILE are `path.py`,
`path.py:function` or `module:function`.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | failed, or something was found |
| 2 | the command is wrong |
| 130, 143 | stopped by Ctrl-C or SIGTERM; saved |

"""


def cli_page() -> str:
    """Return the page: the commands in the groups of `whet --help`."""
    text = _HEAD
    for group, commands in GROUPS.items():
        text += f"## {group}\n\n"
        for name in commands:
            text += f"### whet {name}\n\n```text\n{_help(name)}\n```\n\n"
    return text.rstrip() + "\n"


def _help(name: str) -> str:
    out = io.StringIO()
    # The width of the page, whatever the terminal has.
    with mock.patch.dict("os.environ", COLUMNS="100"), contextlib.redirect_stdout(out):
        run([*name.split(), "--help"])
    kept, _, _ = out.getvalue().partition("\n  Every command takes --quiet")
    return "\n".join(line.rstrip() for line in kept.strip().splitlines())
