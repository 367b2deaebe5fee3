"""A port: a script of another project, and the edits that make it train with whet.

The repository holds no code of other projects. An edit names the first and the last line that it replaces by how they
begin; the lines are looked up in a copy of the project.
"""

import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ports.record import PortRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Replaces the lines from `first` to `last` of a file by new ones."""

    first: str
    """How the first replaced line begins, without indentation."""
    last: str | None = None
    """How the last replaced line begins; None to replace one line."""
    new: str = ""
    """The new lines. They get the indentation of the first replaced line."""
    file: str | None = None
    """The file; the script by default."""
    skip: int = 0
    """How many lines that begin like `first` are passed over."""
    skip_last: int = 0
    """How many lines after the first one that begin like `last` are passed over."""

    def apply(self, path: Path) -> tuple[int, int]:
        """Edit a file. Return how many lines that are not empty were removed and added."""
        lines = path.read_text(encoding="utf-8").splitlines()
        start = end = _matches(lines, self.first)[self.skip]
        if self.last is not None:
            end = [number for number in _matches(lines, self.last) if number >= start][self.skip_last]
        indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
        new = textwrap.indent(textwrap.dedent(self.new).strip("\n"), indent).splitlines()
        old = lines[start : end + 1]
        path.write_text("\n".join([*lines[:start], *new, *lines[end + 1 :], ""]), encoding="utf-8")
        return sum(bool(line.strip()) for line in old), sum(bool(line.strip()) for line in new)


def _matches(lines: list[str], beginning: str) -> list[int]:
    return [number for number, line in enumerate(lines) if line.lstrip().startswith(beginning)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A training loop of another project and its port."""

    name: str
    repository: str
    """The owner and name on GitHub. `--code` has a folder with the name."""
    files: tuple[str, ...]
    """The files and folders that are copied from the repository."""
    script: str
    """The file that is run."""
    arguments: tuple[str, ...] = ()
    driver: str | None = None
    """A script of ours that is written to `script`, for projects that are a library and have no script."""
    edits: tuple[Edit, ...]
    prepare: Callable[[], None] = lambda: None
    """Replaces downloads by stand-ins, in this process and in the current folder."""
    replay: Callable[[PortRecord], None] | None = None
    """Gives the recorded samples to an original loop that has no DataLoader."""
    num_backwards: int = 1
    """How often the original loop calls backward() in a step."""
    paths: tuple[str, ...] = ()
    """Folders of the copy that belong on sys.path, besides the folder of the script."""

    def copy_code(self, code: Path, target: Path, *, is_ported: bool) -> tuple[int, int]:
        """Copy the project to `target` and edit it. Return how many lines were removed and added."""
        source = code / self.repository.partition("/")[2]
        for name in self.files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if (source / name).is_dir():
                shutil.copytree(source / name, target / name)
            else:
                shutil.copy(source / name, target / name)
        if self.driver is not None:
            (target / self.script).write_text(textwrap.dedent(self.driver).lstrip(), encoding="utf-8")
        counts = [edit.apply(target / (edit.file or self.script)) for edit in self.edits] if is_ported else []
        return sum(removed for removed, _ in counts), sum(added for _, added in counts)
