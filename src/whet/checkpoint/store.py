"""Checkpoints on disk: folders step-NNNNNNNNN of safetensors and JSON files, and a manifest, written last, that vouches
for all of them. A folder that its manifest does not vouch for is never used."""

import errno
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from whet.base.errors import WhetError
from whet.checkpoint import plain_json
from whet.checkpoint.layout import dtype_name, file_pieces, read_tensors
from whet.checkpoint.manifest import (
    FACTS,
    MANIFEST,
    TENSORS,
    DamagedCheckpointError,
    File,
    Manifest,
    SavedTensor,
    damaged,
    read_manifest,
)
from whet.checkpoint.snapshot import Snapshot
from whet.run import durable

__all__ = ["FACTS", "MANIFEST", "TENSORS", "DamagedCheckpointError", "Found", "Snapshot"]

_NAME = re.compile(r"step-(\d{9,12})")
_READ_AT_ONCE = 16 * 1024**2


class Found(NamedTuple):
    """The newest checkpoint that can be trusted."""

    step: int
    snapshot: Snapshot
    refused: list[str]
    """What was wrong with newer ones."""


# --- writing ---------------------------------------------------------------------------------------------------------


def save(folder: Path, snapshot: Snapshot, *, step: int) -> int:
    """Writes the checkpoint of a step; when this returns it survives a power cut. The bytes it takes."""
    path = folder / name_of(step)
    num_bytes = 0

    def fill(draft: Path) -> None:
        nonlocal num_bytes
        written = {
            TENSORS: durable.write_draft(draft / TENSORS, data=file_pieces(snapshot.tensors)),
            FACTS: durable.write_draft(draft / FACTS, data=_facts_bytes(snapshot)),
        }
        manifest = Manifest(
            step=step,
            files={name: File(size=file.size, sha256=file.sha256) for name, file in written.items()},
            tensors={name: _entry(name, tensor) for name, tensor in snapshot.tensors.items()},
            about=snapshot.about,
        ).to_bytes()
        durable.write_draft(draft / MANIFEST, data=manifest, is_last=True)
        num_bytes = sum(file.size for file in written.values()) + len(manifest)

    if not folder.exists() and folder.parent.exists():
        durable.make_directory(folder)
    # A folder of this step can only be one that could not be trusted: the run went on from before it.
    in_the_way = durable.set_aside(path) if path.exists() or path.is_symlink() else None
    durable.publish_directory(path, fill=fill)
    if in_the_way is not None:
        durable.remove(in_the_way)
    return num_bytes


def name_of(step: int) -> str:
    """The folder's name; names sort by step."""
    return f"step-{step:09d}"


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint folder, oldest first."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name[1]) for name in found if name)


def discard(folder: Path, *, step: int) -> None:
    """Removes the checkpoint of a step, if there is one."""
    if (folder / name_of(step)).exists():
        durable.remove(folder / name_of(step))


def _facts_bytes(snapshot: Snapshot) -> bytes:
    try:
        return plain_json.dump(snapshot.facts)
    except (TypeError, ValueError) as error:
        what = "the state of the optimizer or of the data cannot be written as JSON"
        raise WhetError(what, got=str(error), try_="numbers, text, lists and maps of them") from None


def _entry(name: str, tensor: Tensor) -> SavedTensor:
    role = name.partition("/")[0]
    return SavedTensor(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), role=role, file=TENSORS)


# --- reading ---------------------------------------------------------------------------------------------------------


def newest(folder: Path, *, run_id: str | None = None) -> Found | None:
    """The newest checkpoint that can be trusted; None without any. `run_id` refuses those of another run."""
    refused: list[str] = []
    for step in reversed(steps(folder)):
        try:
            snapshot = load(folder / name_of(step))
            if run_id is not None and snapshot.about.run_id != run_id:
                raise damaged("the checkpoint is of another run", folder / name_of(step), snapshot.about.run_id[:80])
            return Found(step, snapshot, refused)
        except DamagedCheckpointError as error:
            refused.append(f"step {step}: {error.what}: {error.got}")
    if refused:
        raise DamagedCheckpointError(
            "no checkpoint of this run can be used", got="; ".join(refused), try_="a new run folder"
        )
    return None


def load(path: Path) -> Snapshot:
    """The checkpoint in a folder, every byte of it checked; or DamagedCheckpointError."""
    manifest = check_sizes(path)
    try:
        data = {name: read_vouched(path / name, vouched=file) for name, file in manifest.files.items()}
        facts = plain_json.load(data.pop(FACTS))
        tensors: dict[str, Tensor] = {}
        for name in sorted(data):
            if name.endswith(".safetensors"):
                tensors |= read_tensors(data[name])
        _compare(manifest, tensors)
        if facts["step"] != manifest.step:
            raise ValueError(f"its facts are of step {facts['step']}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise damaged("the checkpoint cannot be read", path, f"{type(error).__name__} {error}") from None
    return Snapshot(tensors=tensors, facts=facts, about=manifest.about)


def check_sizes(path: Path) -> Manifest:
    """The manifest of a folder in which every file it names, and no other, has its size; contents are not read."""
    manifest = read_manifest(path, read_vouched(path / MANIFEST))
    if name_of(manifest.step) != path.name:
        raise damaged("the checkpoint is not what its name says", path, f"step {manifest.step}")
    try:
        there = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(path)}
    except OSError as error:
        raise damaged("the checkpoint cannot be read", path, error.strerror) from None
    unlike = there.keys() ^ {MANIFEST, *manifest.files}
    if unlike:
        raise damaged("the checkpoint has other files than its manifest says", path, sorted(unlike)[0][:80])
    for name, file in manifest.files.items():
        if not stat.S_ISREG(there[name].st_mode) or there[name].st_size != file.size:
            got = f"{there[name].st_size} bytes; expected {file.size}"
            raise damaged("a file of the checkpoint is damaged", path / name, got)
    return manifest


def _compare(manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    """The manifest's table and the files' own headers must say the same."""
    unlike = tensors.keys() ^ manifest.tensors.keys()
    if unlike:
        raise ValueError(f"{sorted(unlike)[0][:80]!r} is in the manifest or in a file, not in both")
    for name, tensor in tensors.items():
        said = manifest.tensors[name]
        if (said.dtype, said.shape) != (dtype_name(tensor.dtype), tuple(tensor.shape)):
            raise ValueError(f"{name[:80]!r} is not what the manifest says")


def read_vouched(path: Path, *, vouched: File | None = None) -> bytearray:
    """A file's bytes: of an ordinary file only, and only if they are those that were vouched for."""
    digest = hashlib.sha256()
    try:
        # Neither a link, nor a pipe that would let us wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            most = plain_json.MOST_BYTES if path.suffix == ".json" else 2**53
            if not stat.S_ISREG(found.st_mode) or found.st_size > most:
                raise damaged("a file of the checkpoint is no ordinary file", path, f"{found.st_size} bytes")
            if vouched is not None and found.st_size != vouched.size:
                got = f"{found.st_size} bytes; expected {vouched.size}"
                raise damaged("a file of the checkpoint is damaged", path, got)
            data = bytearray(found.st_size)
            view, filled = memoryview(data), 0
            while filled < len(data):
                count = file.readinto(view[filled : filled + _READ_AT_ONCE]) or 0
                if count == 0:
                    raise damaged("a file of the checkpoint has become shorter", path, f"{filled} bytes")
                digest.update(view[filled : filled + count])
                filled += count
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM):
            # Not the checkpoint's fault: it must not be passed over for an older one.
            raise durable.explain(error, doing="read", path=path) from error
        raise damaged("a file of the checkpoint cannot be read", path, error.strerror) from None
    if vouched is not None and digest.hexdigest() != vouched.sha256:
        got = f"sha256 {digest.hexdigest()}; expected {vouched.sha256}"
        raise damaged("a file of the checkpoint is damaged", path, got)
    return data
