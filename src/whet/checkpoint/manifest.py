"""What does a checkpoint folder hold? The manifest names every file and every tensor, and vouches for itself."""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from whet.base.errors import WhetError
from whet.base.record import Record
from whet.checkpoint import plain_json
from whet.checkpoint.about import About
from whet.checkpoint.layout import MOST_TENSORS

FORMAT_VERSION = 2
TENSORS, FACTS, MANIFEST = "state.safetensors", "state.json", "manifest.json"
_FILE_NAME = re.compile(r"(?!manifest\.json)[a-z0-9][a-z0-9-]{0,60}\.(safetensors|json)")
_MOST_FILES = 4096

Size = Annotated[int, Field(ge=0, lt=2**53)]


class DamagedCheckpointError(WhetError):
    """A folder that cannot be trusted."""


class File(Record):
    size: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Slice(Record):
    """The part of a tensor that one of several processes wrote."""

    offsets: tuple[Size, ...]
    full_shape: tuple[Size, ...]


class SavedTensor(Record):
    dtype: str
    shape: tuple[Size, ...]
    role: Literal["model", "ema", "optimizer", "randomness"]
    file: str
    rank: Size = 0
    """The process that wrote it."""
    slice: Slice | None = None
    """None for a whole tensor."""


class Manifest(Record):
    """The content of manifest.json, but for its own hash."""

    format_version: int = FORMAT_VERSION
    step: Annotated[int, Field(ge=0, lt=10**12)]
    files: dict[str, File]
    tensors: dict[str, SavedTensor]
    about: About

    def to_bytes(self) -> bytes:
        """The file: the fields, and the hash of their text without it."""
        fields = self.as_json()
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
    if version == FORMAT_VERSION:
        return
    if isinstance(version, int) and version > FORMAT_VERSION:
        hint = "upgrade: pip install --upgrade whet"
    else:
        hint = "the whet that made the run, or another run folder for a new run"
    got = f"{path}: format {version}; this whet reads {FORMAT_VERSION}"
    raise WhetError("the checkpoint has another format", got=got, try_=hint)


def damaged(what: str, path: Path, why: object = None) -> DamagedCheckpointError:
    """The error of a folder that is not used."""
    return DamagedCheckpointError(what, got=str(path) if why is None else f"{path}: {why}", try_="an older one")


def _check(manifest: Manifest) -> None:
    if len(manifest.files) > _MOST_FILES or len(manifest.tensors) > MOST_TENSORS:
        raise ValueError(f"{len(manifest.files):,} files, {len(manifest.tensors):,} tensors")
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"a file named {name[:80]!r}")
    if FACTS not in manifest.files:
        raise ValueError(f"no {FACTS}")
    for name, tensor in manifest.tensors.items():
        if name.partition("/")[0] != tensor.role:
            raise ValueError(f"{name[:80]!r} with the role {tensor.role}")
        if tensor.file not in manifest.files or not tensor.file.endswith(".safetensors"):
            raise ValueError(f"{name[:80]!r} in {tensor.file[:80]!r}")
        if tensor.slice is not None:
            raise ValueError(f"{name[:80]!r} is a slice; this whet reads whole tensors only")


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(plain_json.dump(fields)).hexdigest()
