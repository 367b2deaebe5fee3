"""The manifest of a checkpoint, which lists every file and tensor, and verified reads of its files."""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import Field, ValidationError

from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.base.version import VERSION
from whet.checkpoint import encoding
from whet.checkpoint.encoding import DTYPES, MAX_TENSORS
from whet.run import durable

BIT_EXACT: Literal["bit-exact"] = "bit-exact"

EnvironmentValue = str | int | float | bool | None


class CheckpointInfo(FrozenModel):
    """Metadata of a checkpoint. It is compared and shown, but not restored."""

    whet: str = VERSION
    run_id: str = ""
    attempt: int = Field(default=1, ge=1)
    """Number of the session that wrote the checkpoint, counted from 1."""
    parent: str | None = None
    """Checkpoint from which that session resumed, or None for a new run."""
    created: float = 0.0
    """Unix time in seconds when the checkpoint was written."""
    parameters: tuple[str, ...] = ()
    """All parameter names in the model's order."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of names that refer to the same tensor. The tensor is stored once, under the first name."""
    environment: dict[str, EnvironmentValue] = Field(default_factory=dict)
    """Settings that affect the last bits of a result: precision, threads, versions, device, micro-batch, ranks."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Fingerprint and length of the data, global batch size, and position in the data."""
    exactness: Literal["bit-exact"] | tuple[str, ...] = BIT_EXACT
    """"bit-exact", or the reasons why an uninterrupted run would have produced other bits."""
    gaps: tuple[str, ...] = ()
    """State of the training run that the checkpoint lacks, one sentence each. Resuming from it is not bit-exact."""
    unregistered: tuple[str, ...] = ()
    """Variables of the user that the checkpoint does not contain and that have changed since the run began or cannot be
    compared."""
    interruption: str | None = None
    """The error that ended the body of the loop or a callback before the checkpoint was written.

    The rest of its work on that batch is missing.
    """

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why the checkpoint is not bit-exact. Empty if it is."""
        return () if self.exactness == BIT_EXACT else tuple(self.exactness)


FORMAT_VERSION = 2
"""Incremented with every change of the file format after the first release (docs/choices/0018)."""
SHARDED_VERSION = 3
"""Format of a checkpoint whose tensors are split over several files."""
TENSORS, FACTS, MANIFEST = "state.safetensors", "state.json", "manifest.json"
# Only plain lowercase names, because a manifest must not refer to files outside its folder.
_FILE_NAME = re.compile(r"(?!manifest\.json)[a-z0-9][a-z0-9-]{0,60}\.(safetensors|json)")
_MAX_FILES = 4096

# JSON numbers are exact up to 2**53 in every reader.
Size = Annotated[int, Field(ge=0, lt=2**53)]
Role = Literal["model", "ema", "optimizer", "rng", "gradient", "attribute", "registered", "progress"]


class DamagedCheckpointError(WhetError):
    """Raised when a checkpoint fails verification. An older checkpoint may be used instead."""


class FileDigest(FrozenModel):
    """The size in bytes and the SHA-256 of a file."""

    size: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SavedTensor(FrozenModel):
    """A tensor that is stored entirely in one file."""

    dtype: str
    shape: tuple[Size, ...]
    role: Role
    file: str
    rank: Size = 0
    """The rank that wrote the tensor."""
    slice: None = None
    """Always None, because a tensor in several files is a `ShardedTensor`."""


class TensorPiece(FrozenModel):
    """A range of rows of a tensor, in the file of the rank that held these rows."""

    file: str
    start: Size
    stop: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of these rows, so that a rank can verify its rows without reading the whole file."""


class ShardedTensor(FrozenModel):
    """A tensor whose rows are split over several files."""

    dtype: str
    shape: tuple[Size, ...]
    """Shape of the whole tensor."""
    role: Role
    pieces: tuple[TensorPiece, ...]
    """The pieces in row order, without gaps."""


class CheckpointManifest(FrozenModel):
    """The content of manifest.json, except for the hash of the manifest itself."""

    format_version: int = FORMAT_VERSION
    step: Annotated[int, Field(ge=0, lt=10**12)]
    files: dict[str, FileDigest]
    tensors: dict[str, SavedTensor]
    info: CheckpointInfo
    sharded: dict[str, ShardedTensor] = Field(default_factory=dict)
    """Tensors that are split by rows over several ranks. Empty except in the sharded format."""

    def to_bytes(self) -> bytes:
        """Encode the manifest as canonical JSON, including a hash of its other fields."""
        fields = self.as_json()
        # Format 2 does not have this field, and its readers reject unknown fields.
        if self.format_version == FORMAT_VERSION:
            del fields["sharded"]
        return encoding.dump_json({**fields, "sha256": _digest(fields)})


def read_manifest(path: Path, data: bytes | bytearray) -> CheckpointManifest:
    """Decode the manifest of the checkpoint folder `path` and validate every field.

    Raise DamagedCheckpointError, or WhetError for an unknown format.
    """
    try:
        # Accept only canonical JSON: whet never writes a manifest in another encoding.
        fields = encoding.load_json(data)
        expected = fields.pop("sha256", None)
        if expected != _digest(fields):
            raise ValueError("its sha256 does not match")
    except (ValueError, TypeError) as error:
        raise damaged_error("the checkpoint's manifest is damaged", path / MANIFEST, error) from None
    check_format(path, fields.get("format_version"))
    try:
        manifest = CheckpointManifest.model_validate(fields)
        _check_manifest(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise damaged_error("the checkpoint's manifest is wrong", path / MANIFEST, f"{where}: {first['msg']}") from None
    except ValueError as error:
        raise damaged_error("the checkpoint's manifest is wrong", path / MANIFEST, error) from None
    return manifest


def check_format(path: Path, version: object) -> None:
    """Raise WhetError for a format that this version cannot read.

    The error is not a DamagedCheckpointError, so that the run does not fall back to an older checkpoint.
    """
    if version in (FORMAT_VERSION, SHARDED_VERSION) and not isinstance(version, bool):
        return
    if isinstance(version, int) and version > SHARDED_VERSION:
        hint = "upgrade: pip install --upgrade whet"
    else:
        hint = "the version of whet that made the run, or another run folder"
    got = f"{path}: format {version}; this whet reads {FORMAT_VERSION} and {SHARDED_VERSION}"
    raise WhetError("the checkpoint has an unsupported format", got=got, try_=hint)


def damaged_error(what: str, path: Path, why: object = None) -> DamagedCheckpointError:
    """Return the error for a checkpoint that fails verification."""
    return DamagedCheckpointError(
        what, got=str(path) if why is None else f"{path}: {why}", try_=f"an older checkpoint in {path.parent}"
    )


def _check_manifest(manifest: CheckpointManifest) -> None:
    num_tensors = len(manifest.tensors) + len(manifest.sharded)
    if len(manifest.files) > _MAX_FILES or num_tensors > MAX_TENSORS:
        raise ValueError(f"{len(manifest.files):,} files, {num_tensors:,} tensors")
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"a file named {name[:80]!r}")
    if FACTS not in manifest.files:
        raise ValueError(f"no {FACTS}")
    for name, tensor in manifest.tensors.items():
        _check_role(name, tensor.role)
        _check_file(name, tensor.file, manifest)
    # A checkpoint has sharded tensors if and only if it has the sharded format.
    if bool(manifest.sharded) != (manifest.format_version == SHARDED_VERSION):
        raise ValueError(f"format {manifest.format_version} with {len(manifest.sharded):,} sharded tensors")
    for name, sharded in manifest.sharded.items():
        _check_role(name, sharded.role)
        if name in manifest.tensors or not sharded.shape or sharded.dtype not in DTYPES:
            raise ValueError(f"{name[:80]!r} is both whole and sharded, or has an invalid shape or dtype")
        # The pieces must cover every row exactly once, in order.
        end = 0
        for piece in sharded.pieces:
            _check_file(name, piece.file, manifest)
            if piece.start != end or piece.stop <= piece.start:
                raise ValueError(f"{name[:80]!r} has rows from {piece.start} to {piece.stop} after {end}")
            end = piece.stop
        if end != sharded.shape[0]:
            raise ValueError(f"{name[:80]!r} has {end} of {sharded.shape[0]} rows")
        if len({piece.file for piece in sharded.pieces}) != len(sharded.pieces):
            raise ValueError(f"{name[:80]!r} is in one file twice")


def role_of(name: str) -> Role:
    """Return the role of a tensor, which is the first part of its name."""
    role = name.partition("/")[0]
    assert role in get_args(Role), name
    return cast(Role, role)


def _check_role(name: str, role: str) -> None:
    if name.partition("/")[0] != role:
        raise ValueError(f"{name[:80]!r} with the role {role}")


def _check_file(name: str, file: str, manifest: CheckpointManifest) -> None:
    if file not in manifest.files or not file.endswith(".safetensors"):
        raise ValueError(f"{name[:80]!r} in {file[:80]!r}")


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(encoding.dump_json(fields)).hexdigest()


# --- verified reads --------------------------------------------------------------------------------------------------
# The files of a checkpoint may be damaged or replaced, so nothing is used before its type, size and hash are checked.

_READ_CHUNK_BYTES = 16 * 1024**2


def read_verified(path: Path, *, expected: FileDigest | None = None) -> bytearray:
    """Return the content of a regular file, after verifying its size and hash if `expected` is given."""
    with open_verified(path, expected=expected) as file:
        data = read_exactly(file, os.fstat(file.fileno()).st_size, path=path)
    if expected is not None:
        check_hash(data, expected.sha256, path=path)
    return data


@contextmanager
def open_verified(path: Path, *, expected: FileDigest | None = None) -> Iterator[FileIO]:
    """Open a regular file, after verifying its size if `expected` is given."""
    try:
        # O_NOFOLLOW rejects symbolic links. With O_NONBLOCK, opening a pipe does not block forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise damaged_error("a file of the checkpoint is not a regular file", path)
            if info.st_size > _max_bytes(path):
                got = f"{info.st_size:,} bytes; at most {_max_bytes(path):,}"
                raise damaged_error("a file of the checkpoint is too large", path, got)
            if expected is not None and info.st_size != expected.size:
                got = f"{info.st_size} bytes; expected {expected.size}"
                raise damaged_error("a file of the checkpoint is damaged", path, got)
            yield file
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM):
            # These errors do not mean that the file is damaged, so the run must not fall back to an older checkpoint.
            raise durable.explain_os_error(error, doing="read", path=path) from error
        raise damaged_error("a file of the checkpoint cannot be read", path, error.strerror) from None


def _max_bytes(path: Path) -> int:
    if path.name == FACTS:
        return encoding.MAX_FACTS_BYTES
    return encoding.MAX_JSON_BYTES if path.suffix == ".json" else 2**53


def read_exactly(file: FileIO, num_bytes: int, *, path: Path) -> bytearray:
    """Return the next `num_bytes` of a file. Raise DamagedCheckpointError if the file is shorter."""
    data = bytearray(num_bytes)
    view, filled = memoryview(data), 0
    while filled < num_bytes:
        count = file.readinto(view[filled : filled + _READ_CHUNK_BYTES]) or 0
        if count == 0:
            raise damaged_error("a file of the checkpoint is too short", path, f"{filled} bytes")
        filled += count
    return data


def check_hash(data: bytes | bytearray, sha256: str, *, path: Path) -> None:
    """Raise DamagedCheckpointError if the SHA-256 of the data differs."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise damaged_error("a file of the checkpoint is damaged", path, f"sha256 {actual}; expected {sha256}")
