"""The manifest of a checkpoint: every file and tensor with its hash, and verified reads."""

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
    """What the manifest says besides files and tensors. Nothing here is restored; it is compared and shown."""

    whet: str = VERSION
    run_id: str = ""
    attempt: int = Field(default=1, ge=1)
    """The sitting that wrote it, counted from 1."""
    parent: str | None = None
    """The checkpoint this sitting went on from."""
    created: float = 0.0
    """Unix seconds."""
    parameters: tuple[str, ...] = ()
    """The names of all parameters in the model's own order."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of one and the same tensor; it is stored once, under the first."""
    circumstances: dict[str, EnvironmentValue] = Field(default_factory=dict)
    """What decides the last bits: precision, threads, versions, device, micro-batch, number of processes."""
    data: dict[str, Any] = Field(default_factory=dict)
    """The data's fingerprint and length, the global batch, the position."""
    exactness: Literal["bit-exact"] | tuple[str, ...] = BIT_EXACT
    """Or why a run without interruptions would have ended with other bits."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not bit-exact; none where it is."""
        return () if self.exactness == BIT_EXACT else tuple(self.exactness)


FORMAT_VERSION = 2
SHARDED_VERSION = 3
"""Of a checkpoint whose tensors lie in several files, a few rows each; a whet that reads whole ones only refuses it."""
TENSORS, FACTS, MANIFEST = "state.safetensors", "state.json", "manifest.json"
_FILE_NAME = re.compile(r"(?!manifest\.json)[a-z0-9][a-z0-9-]{0,60}\.(safetensors|json)")
_MAX_FILES = 4096

Size = Annotated[int, Field(ge=0, lt=2**53)]
Role = Literal["model", "ema", "optimizer", "rng"]


class DamagedCheckpointError(WhetError):
    """A folder that cannot be trusted."""


class FileDigest(FrozenModel):
    size: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SavedTensor(FrozenModel):
    dtype: str
    shape: tuple[Size, ...]
    role: Role
    file: str
    rank: Size = 0
    """The process that wrote it."""
    slice: None = None
    """Always: what lies in several files is a `ShardedTensor`."""


class TensorPiece(FrozenModel):
    """Some rows of a tensor, in the file of the process that held them."""

    file: str
    start: Size
    stop: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of these rows alone, so that who needs only them reads only them."""


class ShardedTensor(FrozenModel):
    dtype: str
    shape: tuple[Size, ...]
    """Of the whole."""
    role: Role
    pieces: tuple[TensorPiece, ...]
    """In the order of their rows, without a gap."""


class CheckpointManifest(FrozenModel):
    """The content of manifest.json, but for its own hash."""

    format_version: int = FORMAT_VERSION
    step: Annotated[int, Field(ge=0, lt=10**12)]
    files: dict[str, FileDigest]
    tensors: dict[str, SavedTensor]
    about: CheckpointInfo
    sharded: dict[str, ShardedTensor] = Field(default_factory=dict)
    """Tensors that several processes held together; only in the sharded format."""

    def to_bytes(self) -> bytes:
        """The file: the fields, and the hash of their text without it."""
        fields = self.as_json()
        if self.format_version == FORMAT_VERSION:
            del fields["sharded"]
        return encoding.dump_json({**fields, "sha256": _digest(fields)})


def read_manifest(path: Path, data: bytes | bytearray) -> CheckpointManifest:
    """The manifest of the folder `path`; every field checked."""
    try:
        fields = encoding.load_json(data)
        vouched = fields.pop("sha256", None)
        if vouched != _digest(fields):
            raise ValueError("its sha256 is not that of its text")
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
    """A format that this whet does not read is told with what to do; an older checkpoint is not taken instead."""
    if version in (FORMAT_VERSION, SHARDED_VERSION) and not isinstance(version, bool):
        return
    if isinstance(version, int) and version > SHARDED_VERSION:
        hint = "upgrade: pip install --upgrade whet"
    else:
        hint = "the whet that made the run, or another run folder for a new run"
    got = f"{path}: format {version}; this whet reads {FORMAT_VERSION} and {SHARDED_VERSION}"
    raise WhetError("the checkpoint has another format", got=got, try_=hint)


def damaged_error(what: str, path: Path, why: object = None) -> DamagedCheckpointError:
    """The error of a folder that is not used."""
    return DamagedCheckpointError(what, got=str(path) if why is None else f"{path}: {why}", try_="an older one")


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
    if bool(manifest.sharded) != (manifest.format_version == SHARDED_VERSION):
        raise ValueError(f"format {manifest.format_version} with {len(manifest.sharded):,} sharded tensors")
    for name, sharded in manifest.sharded.items():
        _check_role(name, sharded.role)
        if name in manifest.tensors or not sharded.shape or sharded.dtype not in DTYPES:
            raise ValueError(f"{name[:80]!r} is whole and sharded, or cannot be")
        end = 0
        for piece in sharded.pieces:
            _check_file(name, piece.file, manifest)
            if piece.start != end or piece.stop <= piece.start:
                raise ValueError(f"{name[:80]!r} has rows from {piece.start} to {piece.stop} after {end}")
            end = piece.stop
        if end != sharded.shape[0]:
            raise ValueError(f"{name[:80]!r} has {end} of {sharded.shape[0]} rows")
        if len({piece.file for piece in sharded.pieces}) != len(sharded.pieces):
            raise ValueError(f"{name[:80]!r} lies in one file twice")


def role_of(name: str) -> Role:
    """What a tensor is for; its name begins with it."""
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


_READ_CHUNK_BYTES = 16 * 1024**2


def read_verified(path: Path, *, vouched: FileDigest | None = None) -> bytearray:
    """A file's bytes: of an ordinary file only, and only if they are those that were vouched for."""
    with open_verified(path, vouched=vouched) as file:
        data = read_exactly(file, os.fstat(file.fileno()).st_size, path=path)
    if vouched is not None:
        check_hash(data, vouched.sha256, path=path)
    return data


@contextmanager
def open_verified(path: Path, *, vouched: FileDigest | None = None) -> Iterator[FileIO]:
    """An ordinary file, of the size that was vouched for."""
    try:
        # Neither a link, nor a pipe that would let us wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            most = encoding.MAX_JSON_BYTES if path.suffix == ".json" else 2**53
            if not stat.S_ISREG(found.st_mode) or found.st_size > most:
                raise damaged_error("a file of the checkpoint is no ordinary file", path, f"{found.st_size} bytes")
            if vouched is not None and found.st_size != vouched.size:
                got = f"{found.st_size} bytes; expected {vouched.size}"
                raise damaged_error("a file of the checkpoint is damaged", path, got)
            yield file
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM):
            # Not the checkpoint's fault: it must not be passed over for an older one.
            raise durable.explain_os_error(error, doing="read", path=path) from error
        raise damaged_error("a file of the checkpoint cannot be read", path, error.strerror) from None


def read_exactly(file: FileIO, num_bytes: int, *, path: Path) -> bytearray:
    """The next bytes of a file, all of them."""
    data = bytearray(num_bytes)
    view, filled = memoryview(data), 0
    while filled < num_bytes:
        count = file.readinto(view[filled : filled + _READ_CHUNK_BYTES]) or 0
        if count == 0:
            raise damaged_error("a file of the checkpoint has become shorter", path, f"{filled} bytes")
        filled += count
    return data


def check_hash(data: bytes | bytearray, sha256: str, *, path: Path) -> None:
    """Bytes that are not those that were vouched for."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise damaged_error("a file of the checkpoint is damaged", path, f"sha256 {found}; expected {sha256}")
