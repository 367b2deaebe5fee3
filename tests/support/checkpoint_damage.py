"""A checkpoint changed in many ways: damage that hashes must detect, and forgeries with correct hashes."""

import copy
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.checkpoint import encoding
from whet.checkpoint.manifest import FACTS, MANIFEST, TENSORS

Files = dict[str, bytes]
PAGE = 4096


def read_files(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_files(folder: Path, files: Files) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(files: Files, other: Files, draw: random.Random) -> Files:
    """Flip one bit."""
    name = draw.choice(sorted(files))
    data = bytearray(files[name])
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return {**files, name: bytes(data)}


def truncate(files: Files, other: Files, draw: random.Random) -> Files:
    name = draw.choice(sorted(files))
    return {**files, name: files[name][: draw.randrange(len(files[name]))]}


def append(files: Files, other: Files, draw: random.Random) -> Files:
    name = draw.choice(sorted(files))
    return {**files, name: files[name] + draw.choice((b"\0", b" ", b"\n", b"\0" * PAGE, files[name]))}


def zero(files: Files, other: Files, draw: random.Random) -> Files:
    """A page of zeros, as filesystems leave it."""
    name = draw.choice(sorted(files))
    start = draw.randrange(len(files[name]))
    end = min(start + PAGE, len(files[name]))
    return {**files, name: files[name][:start] + bytes(end - start) + files[name][end:]}


def repeat(files: Files, other: Files, draw: random.Random) -> Files:
    """A sector written twice, over the adjacent one."""
    name = draw.choice(sorted(files))
    data = bytearray(files[name])
    start = draw.randrange(max(1, len(data) - 1024))
    data[start + 512 : start + 1024] = data[start : start + 512][: max(0, len(data) - start - 512)]
    return {**files, name: bytes(data)}


def swap(files: Files, other: Files, draw: random.Random) -> Files:
    """A file of another checkpoint, or a file in place of another."""
    name = draw.choice(sorted(files))
    source = draw.choice((other[name], files[draw.choice(sorted(files.keys() - {name}))]))
    return {**files, name: source}


def drop(files: Files, other: Files, draw: random.Random) -> Files:
    name = draw.choice(sorted(files))
    return {n: data for n, data in files.items() if n != name}


def add(files: Files, other: Files, draw: random.Random) -> Files:
    """A file that the manifest does not name."""
    name = draw.choice(("extra.json", "optimizer.pt", ".hidden", "state.safetensors.bak", "pytorch_model.bin"))
    return {**files, name: draw.choice((b"", b"x", files[TENSORS]))}


DAMAGE = (flip, flip, flip, truncate, append, zero, repeat, swap, drop, add)


# --- lies ------------------------------------------------------------------------------------------------------------


def rehash(files: Files, *, manifest: Callable[[dict[str, Any]], None] = lambda fields: None) -> Files:
    """Correct hashes and sizes after `manifest` has made its changes."""
    fields = json.loads(files[MANIFEST])
    fields.pop("sha256")
    for name in fields["files"]:
        if name in files:
            fields["files"][name] = {"size": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
    manifest(fields)
    text = encoding.dump_json({**fields, "sha256": hashlib.sha256(encoding.dump_json(fields)).hexdigest()})
    return {**files, MANIFEST: text}


def in_manifest(*path: str, value: Any) -> Callable[[Files], Files]:
    def change(fields: dict[str, Any]) -> None:
        place = fields
        for name in path[:-1]:
            place = place[name]
        if value is MISSING:
            del place[path[-1]]
        else:
            place[path[-1]] = copy.deepcopy(value)

    return lambda files: rehash(files, manifest=change)


def in_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Files], Files]:
    """Another header of the safetensors file, as long as the old one or longer."""

    def lie(files: Files) -> Files:
        data = files[TENSORS]
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return rehash({**files, TENSORS: len(text).to_bytes(8, "little") + text + data[8 + length :]})

    return lie


def with_length(length: int) -> Callable[[Files], Files]:
    return lambda files: rehash({**files, TENSORS: length.to_bytes(8, "little") + files[TENSORS][8:]})


def with_facts(data: bytes) -> Callable[[Files], Files]:
    return lambda files: rehash({**files, FACTS: data})


def in_facts(**changes: Any) -> Callable[[Files], Files]:
    def lie(files: Files) -> Files:
        return rehash({**files, FACTS: encoding.dump_json({**json.loads(files[FACTS]), **changes})})

    return lie


def set_entry(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(changes)


MISSING = object()
WEIGHT = "model/0.weight"
_HASH = "0" * 64

LIES: dict[str, Callable[[Files], Files]] = {
    "another step": in_manifest("step", value=1),
    "a negative step": in_manifest("step", value=-4),
    "a step of text": in_manifest("step", value="x"),
    "a path above": in_manifest("files", "../state.json", value={"size": 1, "sha256": _HASH}),
    "an absolute path": in_manifest("files", "/etc/passwd", value={"size": 1, "sha256": _HASH}),
    "a hidden file": in_manifest("files", ".state.json", value={"size": 1, "sha256": _HASH}),
    "a pickle": in_manifest("files", "state.pt", value={"size": 1, "sha256": _HASH}),
    "no facts": in_manifest("files", FACTS, value=MISSING),
    "a negative size": in_manifest("files", FACTS, "size", value=-1),
    "a huge size": in_manifest("files", TENSORS, "size", value=2**60),
    "another hash": in_manifest("files", TENSORS, "sha256", value=_HASH),
    "files as a list": in_manifest("files", value=[]),
    "another shape": in_manifest("tensors", WEIGHT, "shape", value=[16, 7]),
    "a turned shape": in_manifest("tensors", WEIGHT, "shape", value=[6, 16]),
    "another kind of number": in_manifest("tensors", WEIGHT, "dtype", value="I32"),
    "an unknown kind of number": in_manifest("tensors", WEIGHT, "dtype", value="PICKLE"),
    "another role": in_manifest("tensors", WEIGHT, "role", value="optimizer"),
    "a tensor of another file": in_manifest("tensors", WEIGHT, "file", value="../../other.safetensors"),
    "a tensor in the facts": in_manifest("tensors", WEIGHT, "file", value=FACTS),
    "a tensor less": in_manifest("tensors", WEIGHT, value=MISSING),
    "a tensor more": in_manifest(
        "tensors", "model/x", value={"dtype": "F32", "shape": [1], "role": "model", "file": TENSORS}
    ),
    "a slice": in_manifest("tensors", WEIGHT, "slice", value={"offsets": [0, 0], "full_shape": [32, 6]}),
    "an unknown field": in_manifest("run_this", value="rm -rf /"),
    "no tensors": in_manifest("tensors", value=MISSING),
    "another run": in_manifest("info", "run_id", value="0123456789abcdef"),
    "a header beyond the end": with_length(2**40),
    "a header of nothing": with_length(0),
    "a header of odd length": with_length(13),
    "offsets that overlap": in_header(set_entry(WEIGHT, data_offsets=[0, 384])),
    "offsets beyond the end": in_header(set_entry(WEIGHT, data_offsets=[2**40, 2**40 + 384])),
    "a shape that overflows": in_header(set_entry(WEIGHT, shape=[2**32, 2**32])),
    "a negative shape": in_header(set_entry(WEIGHT, shape=[-16, -6])),
    "a shape of text": in_header(set_entry(WEIGHT, shape="16x6")),
    "a header's other kind": in_header(set_entry(WEIGHT, dtype="I32")),
    "a renamed tensor": in_header(lambda header: header.update({"model/evil": header.pop(WEIGHT)})),
    "facts of another step": in_facts(step=3),
    "facts nested 100,000 deep": with_facts(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "facts nested 100 deep": with_facts(b'{"a":' + b"[" * 100 + b"]" * 100 + b"}"),
    "facts with NaN": with_facts(b'{"step":NaN}'),
    "facts with a number of 5,000 digits": with_facts(b'{"step":' + b"9" * 5000 + b"}"),
    "facts that are a list": with_facts(b"[]"),
    "facts that are no JSON": with_facts(b"\x80\x04\x95"),
    "facts with a name twice": with_facts(b'{"step":4,"step":4}'),
}
"""Each of these must be rejected in favor of the older checkpoint."""

FUTURE = in_manifest("format_version", value=4)
PAST = in_manifest("format_version", value=1)
