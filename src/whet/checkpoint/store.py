"""Checkpoints on disk: folders step-NNNNNNNNN of one safetensors file, one JSON file and a manifest that vouches for
both. A folder that its manifest does not vouch for is never used."""

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from whet.base.errors import WhetError
from whet.checkpoint.snapshot import Snapshot
from whet.run import durable

FORMAT_VERSION = 1
TENSORS, FACTS, MANIFEST = "state.safetensors", "state.json", "manifest.json"
_MOST_HEADER_BYTES = 16 * 1024**2


class DamagedCheckpointError(WhetError):
    """A folder that cannot be trusted."""


def save(folder: Path, snapshot: Snapshot, *, step: int) -> Path:
    """Writes the checkpoint of a step; when this returns it survives a power cut."""
    files = {
        TENSORS: safetensors.torch.save(snapshot.tensors),
        FACTS: _json_bytes(snapshot.facts),
    }
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "files": {name: {"size": len(data), "sha256": _digest(data)} for name, data in files.items()},
    }
    manifest["sha256"] = _digest(_json_bytes(manifest))

    def fill(draft: Path) -> None:
        for name, data in files.items():
            durable.write_draft(draft / name, data=data)
        durable.write_draft(draft / MANIFEST, data=_json_bytes(manifest))

    path = folder / name_of(step)
    durable.publish_directory(path, fill=fill)
    return path


def load(path: Path) -> Snapshot:
    """The checkpoint in a folder, or DamagedCheckpointError."""
    try:
        return _load(path)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{path}: {type(error).__name__} {error}"
        raise DamagedCheckpointError("the checkpoint has another structure", got=what, try_="an older one") from None


def _load(path: Path) -> Snapshot:
    manifest = _read_manifest(path)
    if set(manifest["files"]) != {TENSORS, FACTS} or name_of(manifest["step"]) != path.name:
        raise DamagedCheckpointError("the checkpoint is not what its name says", got=str(path), try_="an older one")
    data = {name: _read_vouched(path / name, vouched) for name, vouched in manifest["files"].items()}
    if int.from_bytes(data[TENSORS][:8], "little") > _MOST_HEADER_BYTES:
        raise DamagedCheckpointError("the checkpoint's header is too large", got=str(path), try_="an older one")
    try:
        snapshot = Snapshot(tensors=safetensors.torch.load(data[TENSORS]), facts=json.loads(data[FACTS]))
    except (SafetensorError, ValueError) as error:
        raise DamagedCheckpointError(
            "the checkpoint cannot be read", got=f"{path}: {error}", try_="an older one"
        ) from None
    if snapshot.facts["step"] != manifest["step"]:
        raise DamagedCheckpointError("the checkpoint is of another step", got=str(path), try_="an older one")
    return snapshot


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint folder, oldest first."""
    found = [path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir()]
    return sorted(int(name) for name in found if name.isdecimal())


def newest(folder: Path) -> tuple[int, Snapshot, list[str]] | None:
    """The newest checkpoint that can be trusted, its step, and what was wrong with newer ones; None without any."""
    problems: list[str] = []
    for step in reversed(steps(folder)):
        try:
            return step, load(folder / name_of(step)), problems
        except DamagedCheckpointError as error:
            problems.append(f"step {step}: {error.what}: {error.got}")
    if problems:
        raise DamagedCheckpointError(
            "no checkpoint of this run can be used", got="; ".join(problems), try_="a new run folder"
        )
    return None


def retain(folder: Path, *, keep: int, best: int | None) -> None:
    """Removes all but the last `keep` checkpoints and the best one. Call it after a new one was written."""
    there = steps(folder)
    for step in there[:-keep]:
        if step != best:
            durable.remove(folder / name_of(step))


def discard(folder: Path, *, step: int) -> None:
    """Removes the checkpoint of a step, if there is one."""
    if (folder / name_of(step)).exists():
        durable.remove(folder / name_of(step))


def name_of(step: int) -> str:
    """The folder's name; names sort by step."""
    return f"step-{step:09d}"


def _read_manifest(path: Path) -> dict[str, Any]:
    problem = DamagedCheckpointError(
        "the checkpoint's manifest is damaged", got=str(path / MANIFEST), try_="an older one"
    )
    try:
        if not (path / MANIFEST).is_file():
            raise problem
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        raise problem from None
    if not isinstance(manifest, dict):
        raise problem
    vouched = manifest.pop("sha256", None)
    if vouched != _digest(_json_bytes(manifest)):
        raise problem
    if manifest.get("format_version") != FORMAT_VERSION:
        raise WhetError(
            "the checkpoint has another format",
            got=f"{path}: {manifest.get('format_version')}; this whet reads {FORMAT_VERSION}",
            try_="the whet that made the run",
        )
    return manifest


def _read_vouched(path: Path, vouched: dict[str, Any]) -> bytes:
    try:
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such file")
        data = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError("a file of the checkpoint is missing", got=f"{path}: {error.strerror}") from None
    if len(data) != vouched["size"] or _digest(data) != vouched["sha256"]:
        raise DamagedCheckpointError(
            "a file of the checkpoint is damaged",
            got=f"{path}: {len(data)} bytes, sha256 {_digest(data)}; expected {vouched['size']}, {vouched['sha256']}",
        )
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()
