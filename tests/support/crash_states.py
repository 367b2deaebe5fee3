"""A model of a disk after a power cut: synced data is kept, other data may be complete, torn or missing.

A recorded trace of calls is played into the model up to any point. Then any choice of what was not synced may have
reached the medium: data of a file wholly, in part or not at all, and changes of a folder's names in any subset.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.run.disk import Disk

SECTOR = 512
Change = Callable[[dict[str, int]], None]
"""A change of the names in one folder; atomic."""


class Recorder(Disk):
    """Records the real calls as they return."""

    def __init__(self, root: Path) -> None:
        self.trace: list[tuple[Any, ...]] = []
        self._root = root
        self._names: dict[int, str] = {}

    def _place(self, path: Path) -> str:
        return str(path.relative_to(self._root))

    def acknowledge(self, step: int) -> None:
        self.trace.append(("acknowledge", step))

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        self._names[descriptor] = self._place(path)
        if flags & os.O_CREAT:
            self.trace.append(("create", self._place(path)))
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        count = super().write(descriptor, data)
        self.trace.append(("write", self._names[descriptor], bytes(data[:count])))
        return count

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.trace.append(("sync", self._names[descriptor]))

    def full_sync(self, descriptor: int) -> None:
        super().full_sync(descriptor)
        self.trace.append(("sync", self._names[descriptor]))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.trace.append(("make_folder", self._place(path)))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.trace.append(("rename", self._place(source), self._place(target)))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.trace.append(("remove", self._place(path)))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.trace.append(("remove", self._place(path)))


@dataclass
class Node:
    """A file or folder; `names` and `data` are certainly on the medium."""

    is_folder: bool
    data: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    pending_data: bytes = b""
    pending_names: list[Change] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    """The names as the running system sees them."""


class Model:
    """The disk, from an empty root on."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {0: Node(is_folder=True)}

    def play(self, call: tuple[Any, ...]) -> None:
        """Apply one call of the trace."""
        what, *arguments = call
        if what in ("create", "make_folder"):
            folder, name = self._split(arguments[0])
            number = len(self.nodes)
            self.nodes[number] = Node(is_folder=what == "make_folder")
            self._change(folder, lambda names: names.update({name: number}))
        elif what == "write":
            self.nodes[self._find(arguments[0])].pending_data += arguments[1]
        elif what == "sync":
            node = self.nodes[self._find(arguments[0])]
            node.data, node.pending_data = node.data + node.pending_data, b""
            for change in node.pending_names:
                change(node.names)
            node.pending_names = []
        elif what == "remove":
            folder, name = self._split(arguments[0])
            self._change(folder, lambda names: names.pop(name, None))
        elif what == "rename":
            (folder, old), (same, new) = map(self._split, arguments)
            assert folder is same, "whet renames within a folder only"
            number = folder.seen[old]
            self._change(folder, lambda names: (names.pop(old, None), names.update({new: number})))

    def crash(self, draw: random.Random, *, keeps: float | None) -> "Model":
        """Return a legal state after a cut. Unsynced data stays with probability `keeps`; None draws it per node."""
        after = Model()
        after.nodes = {}
        for number, node in self.nodes.items():
            chance = draw.choice((0.0, 0.5, 1.0)) if keeps is None else keeps
            left = Node(is_folder=node.is_folder, data=node.data, names=dict(node.names))
            for change in node.pending_names:
                if draw.random() < chance:
                    change(left.names)
            if draw.random() < chance:
                whole = len(node.pending_data)
                left.data += node.pending_data[: draw.choice((whole, draw.randrange(0, whole + SECTOR, SECTOR)))]
            after.nodes[number] = left
        return after

    def materialise(self, place: Path, number: int = 0) -> None:
        """Write the data that is certainly on the medium to a real folder."""
        place.mkdir()
        for name, inside in self.nodes[number].names.items():
            if self.nodes[inside].is_folder:
                self.materialise(place / name, inside)
            else:
                (place / name).write_bytes(self.nodes[inside].data)

    def _find(self, place: str) -> int:
        number = 0
        for name in Path(place).parts:
            number = self.nodes[number].seen[name]
        return number

    def _split(self, place: str) -> tuple[Node, str]:
        return self.nodes[self._find(str(Path(place).parent))], Path(place).name

    def _change(self, folder: Node, change: Change) -> None:
        change(folder.seen)
        folder.pending_names.append(change)
