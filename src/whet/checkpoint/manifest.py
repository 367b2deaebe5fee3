"""What does a checkpoint folder hold? The manifest names every file and every tensor, and vouches for itself."""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import Field, ValidationError

from whet.base.errors import WhetError
from whet.base.record import Record
from whet.checkpoint import plain_json
from whet.checkpoint.about import About
from whet.checkpoint.layout import DTYPES, MOST_TENSORS

FORMAT_VERSION = 2
SHARDED_VERSION = 3
"""Of a checkpoint whose tensors lie in several files, a few rows each; a whet that reads whole ones only refuses it."""
TENSORS, FACTS, MANIFEST = "state.safetensors", "state.json", "manifest.json"
_FILE_NAME = re.compile(r"(?!manifest\.json)[a-z0-9][a-z0-9-]{0,60}\.(safetensors|json)")
_MOST_FILES = 4096

Size = Annotated[int, Field(ge=0, lt=2**53)]
Role = Literal["model", "ema", "optimizer", "randomness"]


class DamagedCheckpointError(WhetError):
    """A folder that cannot be trusted."""


class File(Record):
    size: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SavedTensor(Record):
    dtype: str
    shape: tuple[Size, ...]
    role: Role
    file: str
    rank: Size = 0
    """The process that wrote it."""
    slice: None = None
    """Always: what lies in several files is a `ShardedTensor`."""


class Piece(Record):
    """Some rows of a tensor, in the file of the process that held them."""

    file: str
    start: Size
    stop: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of these rows alone, so that who needs only them reads only them."""


class ShardedTensor(Record):
    dtype: str
    shape: tuple[Size, ...]
    """Of the whole."""
    role: Role
    pieces: tuple[Piece, ...]
    """In the order of their rows, without a gap."""


class Manifest(Record):
    """The content of manifest.json, but for its own hash."""

    format_version: int = FORMAT_VERSION
    step: Annotated[int, Field(ge=0, lt=10**12)]
    files: dict[str, File]
    tensors: dict[str, SavedTensor]
    about: About
    sharded: dict[str, ShardedTensor] = Field(default_factory=dict)
    """Tensors that several processes held together; only in the sharded format."""

    def to_bytes(self) -> bytes:
        """The file: the fields, and the hash of their text without it."""
        fields = self.as_json()
        if self.format_version == FORMAT_VERSION:
            del fields["sharded"]
        return plain_json.dump({**fields, "sha256": _digest(fields)})


def read_manifest(path: Path, data: bytes | bytearray) -> Manifest:
    """The manifest of the folder `path`; every field checked."""
    try:
        fields = plain_json.load(data)
        vouched = fields.pop("sha256", None)
        if vouched != _digest(fields):
            raise ValueError("its sha256 is not that of its text")
    except (ValueError, TypeError) as error:
        raise damaged("the checkpoint's manifest is damaged", path / MANIFEST, error) from None
    refuse_other_format(path, fields.get("format_version"))
    try:
        manifest = Manifest.model_validate(fields)
        _check(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise damaged("the checkpoint's manifest is wrong", path / MANIFEST, f"{where}: {first['msg']}") from None
    except ValueError as error:
        raise damaged("the checkpoint's manifest is wrong", path / MANIFEST, error) from None
    return manifest


def refuse_other_format(path: Path, version: object) -> None:
    """A format that this whet does not read is told with what to do; an older checkpoint is not taken instead."""
    if version in (FORMAT_VERSION, SHARDED_VERSION) and not isinstance(version, bool):
        return
    if isinstance(version, int) and version > SHARDED_VERSION:
        hint = "upgrade: pip install --upgrade whet"
    else:
        hint = "the whet that made the run, or another run folder for a new run"
    got = f"{path}: format {version}; this whet reads {FORMAT_VERSION} and {SHARDED_VERSION}"
    raise WhetError("the checkpoint has another format", got=got, try_=hint)


def damaged(what: str, path: Path, why: object = None) -> DamagedCheckpointError:
    """The error of a folder that is not used."""
    return DamagedCheckpointError(what, got=str(path) if why is None else f"{path}: {why}", try_="an older one")


def _check(manifest: Manifest) -> None:
    num_tensors = len(manifest.tensors) + len(manifest.sharded)
    if len(manifest.files) > _MOST_FILES or num_tensors > MOST_TENSORS:
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


def _check_file(name: str, file: str, manifest: Manifest) -> None:
    if file not in manifest.files or not file.endswith(".safetensors"):
        raise ValueError(f"{name[:80]!r} in {file[:80]!r}")


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(plain_json.dump(fields)).hexdigest()
