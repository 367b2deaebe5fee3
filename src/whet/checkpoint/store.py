"""Save and load checkpoints: folders with safetensors files, JSON files and a manifest that is written last."""

import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from whet.base.errors import WhetError
from whet.checkpoint import encoding
from whet.checkpoint.encoding import decode_tensors, dtype_name, encode_tensors
from whet.checkpoint.manifest import (
    FACTS,
    FORMAT_VERSION,
    MANIFEST,
    SHARDED_VERSION,
    TENSORS,
    CheckpointManifest,
    DamagedCheckpointError,
    FileDigest,
    SavedTensor,
    damaged_error,
    read_manifest,
    read_verified,
    role_of,
)
from whet.checkpoint.shards import Shard, WantedRows, all_rows, merge_shards, read_rows, shard_files, shard_name
from whet.checkpoint.snapshot import Snapshot
from whet.run import durable

__all__ = ["FACTS", "MANIFEST", "TENSORS", "DamagedCheckpointError", "LoadedCheckpoint", "Snapshot"]

# Names have at least nine digits, so that they sort by step. The manifest allows at most twelve.
_STEP_FOLDER = re.compile(r"step-(\d{9,12})")


class LoadedCheckpoint(NamedTuple):
    """The newest checkpoint that passed verification."""

    step: int
    snapshot: Snapshot
    rejected: list[str]
    """Reasons why newer checkpoints were rejected."""


# --- writing ---------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, snapshot: Snapshot, *, step: int) -> int:
    """Write the checkpoint of a step durably, and return its size in bytes."""
    num_bytes = 0

    def fill(draft: Path) -> None:
        nonlocal num_bytes
        num_bytes = fill_draft(draft, snapshot, step=step)

    publish_checkpoint(folder, step=step, fill=fill)
    return num_bytes


def publish_checkpoint(folder: Path, *, step: int, fill: Callable[[Path], None]) -> None:
    """Call `fill` to write a draft folder, then rename the folder to the name of the step."""
    path = folder / checkpoint_name(step)
    if not folder.exists() and folder.parent.exists():
        durable.make_directory(folder)
    # An existing folder of this step has failed verification, because the run resumed from an earlier step.
    damaged = durable.move_aside(path) if path.exists() or path.is_symlink() else None
    durable.publish_directory(path, fill=fill)
    if damaged is not None:
        durable.remove(damaged)


def fill_draft(draft: Path, snapshot: Snapshot, *, step: int, shards: Sequence[Shard] = ()) -> int:
    """Write the unsharded tensors, the facts and finally the manifest. Return the size of all files in bytes.

    `shards` describes the files that other ranks have already written to the draft.
    """
    # The shards already contain the sharded tensors.
    whole = {name: tensor for name, tensor in snapshot.tensors.items() if name not in snapshot.rows}
    written = {
        TENSORS: durable.write_draft(draft / TENSORS, data=encode_tensors(whole)),
        FACTS: durable.write_draft(draft / FACTS, data=_facts_bytes(snapshot)),
    }
    files = {name: FileDigest(size=file.size, sha256=file.sha256) for name, file in written.items()}
    files |= {shard_name(rank): shard.file for rank, shard in enumerate(shards) if shard.file is not None}
    sharded = merge_shards(shards)
    manifest = CheckpointManifest(
        format_version=SHARDED_VERSION if sharded else FORMAT_VERSION,
        step=step,
        files=files,
        tensors={name: _entry(name, tensor) for name, tensor in whole.items()},
        info=snapshot.info,
        sharded=sharded,
    ).to_bytes()
    # Write the manifest last: a folder without a valid manifest is not a checkpoint.
    durable.write_draft(draft / MANIFEST, data=manifest, is_last=True)
    return sum(file.size for file in files.values()) + len(manifest)


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step. Names sort by step."""
    return f"step-{step:09d}"


def list_steps(folder: Path) -> list[int]:
    """Return the steps with a checkpoint folder, in increasing order."""
    names = (_STEP_FOLDER.fullmatch(path.name) for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def _facts_bytes(snapshot: Snapshot) -> bytes:
    try:
        data = encoding.dump_json(snapshot.facts)
    except (TypeError, ValueError) as error:
        what = "the state of the optimizer or the data is not JSON-serializable"
        raise WhetError(what, got=str(error), try_="numbers, strings, lists and dicts of them") from None
    if len(data) > encoding.MAX_FACTS_BYTES:
        # No reader would accept the file.
        raise WhetError(
            "the state is too large for a checkpoint",
            got=f"{len(data):,} bytes of numbers and text outside tensors",
            try_=f"at most {encoding.MAX_FACTS_BYTES:,}; a tensor or a NumPy array for long lists of numbers",
        )
    return data


def _entry(name: str, tensor: Tensor) -> SavedTensor:
    return SavedTensor(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), role=role_of(name), file=TENSORS)


# --- reading ---------------------------------------------------------------------------------------------------------


def load_newest(
    folder: Path,
    *,
    run_id: str | None = None,
    steps: list[int] | None = None,
    read: Callable[[Path], Snapshot] | None = None,
) -> LoadedCheckpoint | None:
    """Load the newest checkpoint that passes verification, or None if the folder has no checkpoint.

    With `run_id`, checkpoints of other runs are rejected. Ranks that must load the same checkpoint pass a `read`
    function and the `steps` to try. Raise DamagedCheckpointError if no checkpoint is usable.
    """
    rejected: list[str] = []
    for step in reversed(list_steps(folder) if steps is None else steps):
        try:
            snapshot = (read or load_checkpoint)(folder / checkpoint_name(step))
            if run_id is not None and snapshot.info.run_id != run_id:
                raise damaged_error(
                    "the checkpoint belongs to a different run",
                    folder / checkpoint_name(step),
                    snapshot.info.run_id[:80],
                )
            return LoadedCheckpoint(step, snapshot, rejected)
        except DamagedCheckpointError as error:
            rejected.append(f"step {step}: {error.what}: {error.got}")
    if rejected:
        raise DamagedCheckpointError(
            "no checkpoint of this run is usable", got="; ".join(rejected), try_="a new run folder"
        )
    return None


def load_checkpoint(path: Path, *, wanted: WantedRows = all_rows) -> Snapshot:
    """Load a checkpoint and verify everything that is read. Raise DamagedCheckpointError if it is damaged.

    `wanted` selects the rows of each tensor that this rank needs. The default is all rows.
    """
    # Check the sizes first: this is cheap and detects a truncated file before gigabytes are read.
    manifest = check_sizes(path)
    try:
        # `read_rows` below reads the shards piece by piece.
        sharded = shard_files(manifest)
        data = {n: read_verified(path / n, expected=file) for n, file in manifest.files.items() if n not in sharded}
        facts = encoding.load_json(data.pop(FACTS), max_bytes=encoding.MAX_FACTS_BYTES)
        tensors: dict[str, Tensor] = {}
        for name in sorted(data):
            if name.endswith(".safetensors"):
                tensors |= decode_tensors(data[name])
        _check_tensors(manifest, tensors)
        if facts["step"] != manifest.step:
            raise ValueError(f"its facts belong to step {facts['step']}")
        rows = {name: part for name, t in tensors.items() if (part := wanted(name, tuple(t.shape))) is not None}
        # Clone the wanted rows, so that the memory of all other rows is freed.
        tensors |= {name: tensors[name][part.start : part.stop].clone() for name, part in rows.items()}
        read, some = read_rows(path, manifest, wanted)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise damaged_error("the checkpoint cannot be read", path, f"{type(error).__name__} {error}") from None
    return Snapshot(tensors=tensors | read, facts=facts, info=manifest.info, rows=rows | some)


def encode_and_decode(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot as it would be read from a checkpoint, encoded in memory instead of on disk."""
    layout = encoding.layout_tensors(snapshot.tensors)
    data = bytearray(len(layout.header()) + layout.num_bytes)
    place = memoryview(data)
    for chunk in encode_tensors(snapshot.tensors):
        place[: len(chunk)] = chunk
        place = place[len(chunk) :]
    place.release()
    facts = encoding.load_json(_facts_bytes(snapshot), max_bytes=encoding.MAX_FACTS_BYTES)
    return Snapshot(tensors=decode_tensors(data), facts=facts, info=snapshot.info)


def check_sizes(path: Path) -> CheckpointManifest:
    """Return the manifest after checking that exactly the listed files exist with the listed sizes.

    The content of the files is not read. Raise DamagedCheckpointError if they differ.
    """
    manifest = read_manifest(path, read_verified(path / MANIFEST))
    if checkpoint_name(manifest.step) != path.name:
        raise damaged_error("the checkpoint does not match its folder name", path, f"step {manifest.step}")
    try:
        files = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(path)}
    except OSError as error:
        raise damaged_error("the checkpoint cannot be read", path, error.strerror) from None
    unexpected = files.keys() ^ {MANIFEST, *manifest.files}
    if unexpected:
        raise damaged_error("the checkpoint's files do not match its manifest", path, sorted(unexpected)[0][:80])
    for name, file in manifest.files.items():
        if not stat.S_ISREG(files[name].st_mode) or files[name].st_size != file.size:
            got = f"{files[name].st_size} bytes; expected {file.size}"
            raise damaged_error("a file of the checkpoint is damaged", path / name, got)
    return manifest


def _check_tensors(manifest: CheckpointManifest, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError if the tensors in the manifest differ from those in the file headers."""
    unmatched = tensors.keys() ^ manifest.tensors.keys()
    if unmatched:
        raise ValueError(f"{sorted(unmatched)[0][:80]!r} is in the manifest or in a file, but not in both")
    for name, tensor in tensors.items():
        listed = manifest.tensors[name]
        if (listed.dtype, listed.shape) != (dtype_name(tensor.dtype), tuple(tensor.shape)):
            raise ValueError(f"{name[:80]!r} does not match the manifest")
