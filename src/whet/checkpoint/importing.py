"""How do weights from elsewhere become weights that whet reads? Explicitly, once, and out of a process that may die.

A torch file is a program in disguise: it is looked at here without being read, unpacked by `unpacking` in a process
with limits, and what that wrote is read again like any foreign file. A safetensors file needs no such process.
"""

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
from torch import Tensor

from whet.base.errors import UsageError, WhetError
from whet.checkpoint.imported import ABOUT, FORMAT_VERSION, WEIGHTS, Import, Taken
from whet.checkpoint.layout import dtype_name, file_pieces, read_tensors
from whet.run import durable, strict_json

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (*TORCH_SUFFIXES, ".safetensors")
LEAST_TORCH = (2, 10)
"""Older ones can be made to run code, or to write beyond their memory (CVE-2025-32434, CVE-2026-24747)."""

_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
_MOST_RECORDS = 200_000
_START_SECONDS = 60
_LEAST_BYTES_PER_SECOND = 20 * 1024**2


def import_weights(source: Path, out: Path, *, key: str | None = None) -> Import:
    """Makes the folder `out` from a file: safetensors, and a list of what was taken and what was left out."""
    if source.suffix.lower() not in SUFFIXES:
        raise UsageError("this cannot be imported", got=str(source), try_="a file that ends in " + ", ".join(SUFFIXES))
    if out.exists() or out.is_symlink():
        raise UsageError("the folder is there already", got=str(out), try_="another --out DIR")
    durable.check_writable(out.absolute())
    with _open(source) as file:
        size = os.fstat(file.fileno()).st_size
        if source.suffix.lower() == ".safetensors":
            if key is not None:
                raise UsageError("a safetensors file has no keys to choose from", got=f"--key {key}", try_="no --key")
        else:
            _refuse_old_torch()
            _look_at(file, source, size=size)
        about: Import | None = None

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


def _fill(draft: Path, file: BufferedReader, source: Path, *, key: str | None) -> Import:
    size = os.fstat(file.fileno()).st_size
    said: Mapping[str, Any] = {}
    if source.suffix.lower() == ".safetensors":
        durable.write_draft(draft / WEIGHTS, data=file_pieces(_tensors_in(file, source)))
    else:
        said = _unpacked(file, draft / WEIGHTS, key=key, seconds=_START_SECONDS + size // _LEAST_BYTES_PER_SECOND)
    # Not what the process says it wrote: what is there.
    with _open(draft / WEIGHTS) as written:
        tensors = _tensors_in(written, draft / WEIGHTS)
        digest, num_bytes = _hash(written), os.fstat(written.fileno()).st_size
    about = Import(
        format_version=FORMAT_VERSION,
        source=source.name,
        source_bytes=size,
        source_sha256=_hash(file),
        key=str(said.get("key", "")),
        wrapper=str(said.get("wrapper", "")),
        size=num_bytes,
        sha256=digest,
        taken={name: Taken(dtype=dtype_name(t.dtype), shape=tuple(t.shape)) for name, t in tensors.items()},
        left_out=_texts(said.get("left_out")),
    )
    told = strict_json.encode(about.as_json(), pretty=True) + "\n"
    durable.write_draft(draft / ABOUT, data=told.encode(), is_last=True)
    return about


# --- looking at a file without reading what is in it -----------------------------------------------------------------


def _open(path: Path) -> BufferedReader:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError("the file cannot be read", got=f"{path}: {error.strerror}", try_="check the path") from None
    file = os.fdopen(descriptor, "rb")
    found = os.fstat(descriptor)
    free = psutil.virtual_memory().available
    if stat.S_ISREG(found.st_mode) and found.st_size <= free:
        return file
    file.close()
    if not stat.S_ISREG(found.st_mode):
        raise UsageError("only an ordinary file can be imported", got=str(path), try_="check the path")
    got = f"{path}: {found.st_size:,} bytes; {free:,} bytes of memory are free"
    raise UsageError("the file is larger than the free memory", got=got, try_="a machine with more memory")


def _refuse_old_torch() -> None:
    version = importlib.metadata.version("torch")
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])
    if (major, minor) < LEAST_TORCH:
        raise WhetError(
            "this torch does not read such files safely",
            got=f"torch {version}; {'.'.join(map(str, LEAST_TORCH))} is the least",
            try_="a newer torch, or a safetensors file",
        )


def _look_at(file: BufferedReader, source: Path, *, size: int) -> None:
    """Refuses what `torch.save` does not write, above all archives that unpack to more than they are."""
    head = file.read(64)
    if head.startswith(_LEGACY):
        file.seek(0)
        return
    if not head.startswith(_ZIP):
        hint = "the file torch.save wrote, or safetensors"
        raise UsageError("this is no torch file", got=f"{source}: begins with {head[:8]!r}", try_=hint)
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, OverflowError) as error:
        raise UsageError("the archive is damaged", got=f"{source}: {error}", try_="the whole file") from None
    if len(records) > _MOST_RECORDS:
        raise UsageError("the archive has too many parts", got=f"{len(records):,}", try_=f"at most {_MOST_RECORDS:,}")
    packed = next((record for record in records if record.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None or sum(record.file_size for record in records) > size:
        got = f"{source}: {sum(record.file_size for record in records):,} bytes in a file of {size:,}"
        what = "the archive is compressed, or larger inside than outside"
        raise UsageError(what, got=got, try_="what torch.save wrote")
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise UsageError("this is an archive, and no torch file", got=str(source), try_="what torch.save wrote")
    file.seek(0)


def _tensors_in(file: BufferedReader, path: Path) -> dict[str, Tensor]:
    file.seek(0)
    data = bytearray(os.fstat(file.fileno()).st_size)
    file.readinto(data)
    try:
        tensors = read_tensors(data, is_foreign=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, RuntimeError) as error:
        what = f"{type(error).__name__} {error}"[:300]
        raise WhetError("the safetensors file cannot be read", got=f"{path}: {what}", try_="the whole file") from None
    if not tensors:
        raise WhetError("the file holds no tensors", got=str(path), try_="another file")
    return tensors


def _hash(file: BufferedReader) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


# --- the process that may die ----------------------------------------------------------------------------------------


def _unpacked(file: BufferedReader, target: Path, *, key: str | None, seconds: int) -> dict[str, Any]:
    """What the process says about the weights it wrote; its error where it has one."""
    from whet.checkpoint.unpacking import MARK

    # The process shares the descriptor's place; the buffered file's own is another.
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    code, output = run_unpacking(file, [str(target), key or "", str(seconds)], seconds=seconds)
    lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith(MARK)]
    if not lines:
        how = "took too long" if code is None else f"ended with {code}"
        got = f"the process that read it {how}, without an answer"
        raise WhetError("the file could not be read", got=got, try_="the file's origin")
    try:
        said = json.loads(lines[-1][len(MARK) :])
        if "error" in said:
            what, got, hint = said["error"]
            raise WhetError(str(what), got=got, try_=hint)
    except (ValueError, TypeError, RecursionError):
        raise WhetError(
            "the file could not be read", got="an answer that makes no sense", try_="another file"
        ) from None
    return dict(said)


def run_unpacking(file: BufferedReader, words: list[str], *, seconds: int) -> tuple[int | None, bytes]:
    """The exit code of the process and what it wrote; None for one that had to be ended."""
    # -P: the folder we are in may hold a torch.py.
    command = [sys.executable, "-P", "-m", "whet.checkpoint.unpacking", *words]
    try:
        done = subprocess.run(
            command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return None, b""
    return done.returncode, done.stdout


def _texts(value: object) -> dict[str, str]:
    return {str(name): str(why) for name, why in value.items()} if isinstance(value, dict) else {}
