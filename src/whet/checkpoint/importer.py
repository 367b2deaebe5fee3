"""Import weights from torch and safetensors files, and load them into a model."""

import hashlib
import importlib.metadata
import json
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import Field
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError, closest_match
from whet.base.model import FrozenModel
from whet.checkpoint import encoding
from whet.checkpoint.encoding import decode_tensors, dtype_name, encode_tensors
from whet.checkpoint.manifest import FileDigest, Size, read_verified
from whet.checkpoint.snapshot import describe_names
from whet.machine.facts import parse_release
from whet.run import durable, strict_json

IMPORT_FORMAT_VERSION = 1
WEIGHTS_FILE, IMPORT_FILE = "weights.safetensors", "import.json"


class ImportedTensor(FrozenModel):
    """Dtype and shape of a tensor in the weights file."""

    dtype: str
    shape: tuple[Size, ...]


class ImportInfo(FrozenModel):
    """The content of import.json."""

    format_version: int
    source: str
    """Name of the imported file without its folder."""
    source_bytes: Size
    source_sha256: str
    key: str
    """Key of the weights in the file, or an empty string if they are at the top level."""
    wrapper: str
    """Prefix that was removed from every name, such as "module." (DDP) or "_orig_mod." (torch.compile)."""
    size: Size
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the weights file."""
    taken: dict[str, ImportedTensor]
    left_out: dict[str, str]
    """Reason or type of each skipped entry, by name."""


def is_import(path: Path) -> bool:
    """Return whether `whet import` created the folder."""
    return (path / IMPORT_FILE).is_file()


def read_import(path: Path) -> dict[str, Tensor]:
    """Return the tensors of an imported folder. Raise WhetError if its hash is wrong."""
    try:
        about = ImportInfo.from_json(
            encoding.load_foreign_json(read_verified(path / IMPORT_FILE)), where=path / IMPORT_FILE
        )
    except ValueError as error:
        raise WhetError(
            "the imported weights are damaged", got=f"{path / IMPORT_FILE}: {error}", try_="import again"
        ) from None
    if about.format_version != IMPORT_FORMAT_VERSION:
        got = f"{path}: format {about.format_version}; this version reads {IMPORT_FORMAT_VERSION}"
        raise WhetError("the imported weights have an unsupported format", got=got, try_="import again")
    data = read_verified(path / WEIGHTS_FILE, expected=FileDigest(size=about.size, sha256=about.sha256))
    try:
        return decode_tensors(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, RuntimeError) as error:
        raise WhetError("the imported weights are damaged", got=f"{path}: {error}", try_="import again") from None


@torch.no_grad()
def load_imported(model: nn.Module, tensors: dict[str, Tensor], *, where: Path) -> None:
    """Copy tensors into a model by name. Floating-point tensors are converted to the model's dtype.

    As in a state_dict, tied tensors may appear under one or all of their names. Raise UsageError if names or shapes do
    not match.
    """
    wanted = dict(model.state_dict())
    _, tied = describe_names(model)
    # Keep only the first available name of each tied tensor, in the model and in the file.
    for names in tied:
        given = [name for name in names if name in tensors]
        for name in names:
            if name in wanted and name not in given[:1]:
                del wanted[name]
                tensors = {n: t for n, t in tensors.items() if n != name}
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        near = {name: closest_match(name, extra) for name in missing[:3]}
        hints = [f"{theirs!r} may be this model's {ours!r}" for ours, theirs in near.items() if theirs]
        raise UsageError(
            "the imported weights do not fit this model",
            got=f"{len(missing)} missing ({', '.join(missing[:3]) or '-'}), "
            f"{len(extra)} unknown ({', '.join(extra[:3]) or '-'})",
            try_="; ".join(hints) or f"a model with the names listed in {where / IMPORT_FILE}",
        )
    for name, target in wanted.items():
        value = tensors[name]
        is_alike = value.dtype == target.dtype or (value.is_floating_point() and target.is_floating_point())
        if target.shape != value.shape or not is_alike:
            got = f"{tuple(value.shape)} {value.dtype}; the model has {tuple(target.shape)} {target.dtype}"
            raise UsageError(f"the imported weights do not fit {name!r}", got=got, try_="the model they were made with")
        target.copy_(value)


TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (*TORCH_SUFFIXES, ".safetensors")
MIN_TORCH = (2, 10)
"""Older versions allow a file to run code or to write out of bounds (CVE-2025-32434, CVE-2026-24747)."""

# Magic numbers of torch.save: a zip archive since torch 1.6, before that a sequence of pickles.
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
_MAX_RECORDS = 200_000
# Timeout of the unpickling process: a constant for importing torch, plus the time to read the file from a slow disk.
_START_SECONDS = 60
_MIN_BYTES_PER_SECOND = 20 * 1024**2


def import_weights(source: Path, out: Path, *, key: str | None = None) -> ImportInfo:
    """Convert a torch or safetensors file to the folder `out`. Return the imported and the skipped entries.

    A torch file is a pickle, which can run code. This process only inspects it. A child process with resource limits
    unpickles it (`unpickle`), and this process reads the output of the child like any untrusted file.
    """
    # Read files without a suffix as torch files: the official TRM code names its checkpoints step_N.
    if source.suffix.lower() not in (*SUFFIXES, ""):
        raise UsageError(
            "this file type cannot be imported", got=str(source), try_="a file that ends in " + ", ".join(SUFFIXES)
        )
    if out.exists() or out.is_symlink():
        raise UsageError("the folder already exists", got=str(out), try_="another --out DIR")
    durable.check_writable(out.absolute())
    with _open_regular(source) as file:
        size = os.fstat(file.fileno()).st_size
        if source.suffix.lower() == ".safetensors":
            if key is not None:
                raise UsageError("a safetensors file has no keys to choose from", got=f"--key {key}", try_="no --key")
        else:
            _check_torch_version()
            _check_torch_file(file, source, size=size)
        about: ImportInfo | None = None

        def fill(draft: Path) -> None:
            nonlocal about
            about = _fill(draft, file, source, key=key)

        made = durable.make_directory(out.absolute().parent)
        try:
            durable.publish_directory(out.absolute(), fill=fill)
        except BaseException:
            durable.remove_empty(made)
            raise
    assert about is not None
    return about


def _fill(draft: Path, file: BufferedReader, source: Path, *, key: str | None) -> ImportInfo:
    size = os.fstat(file.fileno()).st_size
    report: Mapping[str, Any] = {}
    if source.suffix.lower() == ".safetensors":
        durable.write_draft(draft / WEIGHTS_FILE, data=encode_tensors(_tensors_in(file, source)))
    else:
        report = _run_unpickle(
            file, draft / WEIGHTS_FILE, key=key, seconds=_START_SECONDS + size // _MIN_BYTES_PER_SECOND
        )
    # Describe the file on disk, because the report of the child process is not trusted.
    with _open_regular(draft / WEIGHTS_FILE) as written:
        tensors = _tensors_in(written, draft / WEIGHTS_FILE)
        digest, num_bytes = _hash(written), os.fstat(written.fileno()).st_size
    about = ImportInfo(
        format_version=IMPORT_FORMAT_VERSION,
        source=source.name,
        source_bytes=size,
        source_sha256=_hash(file),
        key=str(report.get("key", "")),
        wrapper=str(report.get("wrapper", "")),
        size=num_bytes,
        sha256=digest,
        taken={name: ImportedTensor(dtype=dtype_name(t.dtype), shape=tuple(t.shape)) for name, t in tensors.items()},
        left_out=_string_dict(report.get("left_out")),
    )
    text = strict_json.encode(about.as_json(), pretty=True) + "\n"
    durable.write_draft(draft / IMPORT_FILE, data=text.encode(), is_last=True)
    return about


# --- inspecting a file without unpickling it -------------------------------------------------------------------------


def _open_regular(path: Path) -> BufferedReader:
    try:
        # Open the file once and inspect the descriptor, so that the file cannot be replaced in between. O_NONBLOCK:
        # opening a pipe would otherwise block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError("the file cannot be read", got=f"{path}: {error.strerror}", try_="check the path") from None
    file = os.fdopen(descriptor, "rb")
    info = os.fstat(descriptor)
    free = psutil.virtual_memory().available
    if stat.S_ISREG(info.st_mode) and info.st_size <= free:
        return file
    file.close()
    if not stat.S_ISREG(info.st_mode):
        raise UsageError("only a regular file can be imported", got=str(path), try_="check the path")
    got = f"{path}: {info.st_size:,} bytes; {free:,} bytes of memory are free"
    raise UsageError("the file is larger than the free memory", got=got, try_="a machine with more memory")


def _check_torch_version() -> None:
    version = importlib.metadata.version("torch")
    release = parse_release(version)
    if release is None or release < MIN_TORCH:
        raise WhetError(
            "this version of torch does not load such files safely",
            got=f"torch {version}; at least {'.'.join(map(str, MIN_TORCH))} is needed",
            try_="a newer torch, or a safetensors file",
        )


def _check_torch_file(file: BufferedReader, source: Path, *, size: int) -> None:
    """Raise UsageError for files that `torch.save` does not write, in particular compressed archives (zip bombs)."""
    head = file.read(64)
    if head.startswith(_LEGACY):
        file.seek(0)
        return
    if not head.startswith(_ZIP):
        hint = "the file torch.save wrote, or safetensors"
        raise UsageError("this is not a torch file", got=f"{source}: starts with {head[:8]!r}", try_=hint)
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, OverflowError) as error:
        raise UsageError(
            "the archive is damaged", got=f"{source}: {error}", try_="download or copy the file again"
        ) from None
    if len(records) > _MAX_RECORDS:
        raise UsageError("the archive has too many parts", got=f"{len(records):,}", try_=f"at most {_MAX_RECORDS:,}")
    # torch.save never compresses, so the entries cannot be larger than the file.
    packed = next((record for record in records if record.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None or sum(record.file_size for record in records) > size:
        got = f"{source}: {sum(record.file_size for record in records):,} bytes in a file of {size:,}"
        what = "the archive is compressed or declares more data than it contains"
        raise UsageError(what, got=got, try_="a file written by torch.save")
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise UsageError("this archive is not a torch file", got=str(source), try_="a file written by torch.save")
    file.seek(0)


def _tensors_in(file: BufferedReader, path: Path) -> dict[str, Tensor]:
    file.seek(0)
    data = bytearray(os.fstat(file.fileno()).st_size)
    file.readinto(data)
    try:
        tensors = decode_tensors(data, is_foreign=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, RuntimeError) as error:
        what = f"{type(error).__name__} {error}"[:300]
        raise WhetError(
            "the safetensors file cannot be read", got=f"{path}: {what}", try_="download or copy the file again"
        ) from None
    if not tensors:
        raise WhetError("the file contains no tensors", got=str(path), try_="another file")
    return tensors


def _hash(file: BufferedReader) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


# --- the unpickling process ------------------------------------------------------------------------------------------


def _run_unpickle(file: BufferedReader, target: Path, *, key: str | None, seconds: int) -> dict[str, Any]:
    """Run the unpickling process and return its report. Raise WhetError if it fails."""
    from whet.checkpoint.unpickle import ANSWER_PREFIX

    # The child shares the offset of the descriptor. Buffering here has moved it, so rewind the descriptor itself.
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    code, output = run_unpickle_process(file, [str(target), key or "", str(seconds)], seconds=seconds)
    lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith(ANSWER_PREFIX)]
    if not lines:
        how = "timed out" if code is None else f"exited with {code}"
        got = f"the process that loads it {how} without a result"
        raise WhetError("the file could not be read", got=got, try_="download or save the file again")
    try:
        report = json.loads(lines[-1][len(ANSWER_PREFIX) :])
        if "error" in report:
            what, got, hint = report["error"]
            raise WhetError(str(what), got=got, try_=hint)
    except (ValueError, TypeError, RecursionError):
        raise WhetError("the file could not be read", got="an invalid result", try_="another file") from None
    return dict(report)


def run_unpickle_process(file: BufferedReader, args: list[str], *, seconds: int) -> tuple[int | None, bytes]:
    """Return the exit code and the output of the unpickling process. The exit code is None after a timeout."""
    # -P: do not import from the current folder, which may contain a torch.py.
    command = [sys.executable, "-P", "-m", "whet.checkpoint.unpickle", *args]
    try:
        done = subprocess.run(
            command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return None, b""
    return done.returncode, done.stdout


def _string_dict(value: object) -> dict[str, str]:
    return {str(name): str(why) for name, why in value.items()} if isinstance(value, dict) else {}
