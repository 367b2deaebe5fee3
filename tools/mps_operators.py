"""Read the operators of MPS from macOS wheels of torch, and write src/whet/device/mps_operators.toml.

    pip download --no-deps --only-binary=:all: --platform macosx_14_0_arm64 --python-version 3.11 torch==2.15.0
    python tools/mps_operators.py torch-*-macosx_*.whl             # writes the table
    python tools/mps_operators.py --compare torch-*-macosx_*.whl   # compares it with torch's lists of Mac failures

A wheel is read on any system; nothing in it is executed. Kernels are registered by functions of libtorch_cpu.dylib
whose names contain TORCH_LIBRARY_IMPL_init_aten_MPS. Each loads the names of its operators, so that its machine code
has the addresses of these strings.
"""

import ast
import hashlib
import re
import struct
import sys
import tempfile
import textwrap
import zipfile
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from whet.device.operators import mps_kernels, parse_release, read_operators

TABLE = Path(__file__).parents[1] / "src/whet/device/mps_operators.toml"
_LIBRARY = "torch/lib/libtorch_cpu.dylib"
_YAML = "torchgen/packaged/ATen/native/native_functions.yaml"
_LISTS = "torch/testing/_internal/common_mps.py"
_OPINFO = ("torch/testing/_internal/common_methods_invocations.py", "torch/testing/_internal/opinfo/")

_REGISTRATION = re.compile(rb"TORCH_LIBRARY_IMPL_init_aten_MPS_\d+ERN5torch7LibraryE$")
# RegisterMPS.cpp, which is generated, has its functions in an anonymous namespace; MPSFallback.mm does not.
_GENERATED = b"_GLOBAL__N_1"
# MPSFallback.mm registers a function for it that raises an error, for tensors on two devices.
_NOT_ON_CPU = {"_slow_conv2d_forward"}
_OLDEST_MACOS = re.compile(rb"The MPS backend is supported on [mM]acOS (\d+)\.")

_SEGMENT, _SYMBOLS = 0x19, 0x2
_DEBUG_SYMBOL = 0xE0


class Wheel(NamedTuple):
    """The operators of MPS in one wheel."""

    file: str
    sha256: str
    torch: str
    oldest_macos: int
    kernels: frozenset[str]
    on_cpu: frozenset[str]
    overloads: frozenset[str]
    """All overloads of torch's operator list."""
    listed: frozenset[str]
    """Overloads with an MPS kernel according to the operator list."""


def read_wheel(path: Path) -> Wheel:
    """Return the operators that a macOS wheel of torch registers for MPS."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        library = archive.read(_LIBRARY)
        operators = read_operators(Path(archive.extract(_YAML, folder)))
    kernels: set[str] = set()
    on_cpu: set[str] = set()
    for function, names in registered_names(library):
        (kernels if _GENERATED in function else on_cpu).update(names)
    oldest = _OLDEST_MACOS.search(library)
    assert oldest is not None, f"{path} does not say which macOS it needs"
    return Wheel(
        path.name,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        path.name.split("-")[1],
        int(oldest[1]),
        frozenset(kernels),
        frozenset(on_cpu - _NOT_ON_CPU),
        frozenset(operators),
        frozenset(operator.name for operator in mps_kernels(operators)),
    )


def registered_names(library: bytes) -> Iterator[tuple[bytes, list[str]]]:
    """Yield each function of a Mach-O library that registers MPS kernels, with the names that it registers."""
    strings = range(0)
    symbols: list[tuple[int, int]] = []
    offset, text_offset, text_size = 32, 0, 0
    for _ in range(struct.unpack_from("<I", library, 16)[0]):
        command, size = struct.unpack_from("<2I", library, offset)
        if command == _SEGMENT:
            for section in range(offset + 72, offset + size, 80):
                if library[section : section + 16].rstrip(b"\0") == b"__cstring":
                    address, length = struct.unpack_from("<2Q", library, section + 32)
                    strings = range(address, address + length)
        elif command == _SYMBOLS:
            first, count, text_offset, text_size = struct.unpack_from("<4I", library, offset + 8)
            entries = struct.iter_unpack("<IBBHQ", library[first : first + 16 * count])
            symbols = [(value, name) for name, kind, _, _, value in entries if not kind & _DEBUG_SYMBOL]
        offset += size
    starts = sorted(value for value, _ in symbols)
    names = library[text_offset : text_offset + text_size]
    for value, index in symbols:
        name = names[index : names.find(b"\0", index)]
        if _REGISTRATION.search(name):
            end = starts[bisect_right(starts, value)]
            yield name, [_string(library, at) for at in loaded_addresses(library, value, end) if at in strings]


def loaded_addresses(code: bytes, start: int, end: int) -> Iterator[int]:
    """Yield the addresses that arm64 code computes: by ADR, or by ADRP and ADD.

    In the library's __TEXT segment, an address equals the offset in the file.
    """
    pages: dict[int, int] = {}
    for at in range(start, end, 4):
        (word,) = struct.unpack_from("<I", code, at)
        target, source = word & 31, word >> 5 & 31
        if word & 0x1F000000 == 0x10000000:
            distance = (word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3
            distance -= (distance & 1 << 20) << 1
            if word >> 31:
                pages[target] = (at & ~0xFFF) + (distance << 12)
            else:
                yield at + distance
        elif word & 0xFFC00000 == 0x91000000 and source in pages:
            yield pages[source] + (word >> 10 & 0xFFF)


def _string(data: bytes, at: int) -> str:
    return data[at : data.find(b"\0", at)].decode()


# --- table ------------------------------------------------------------------------------------------------------------

_HEAD = """\
# The operators of MPS, by torch release. Generated by tools/mps_operators.py from the macOS wheels; do not edit.
# Each release lists its changes from the previous one: overloads whose kernel was added or removed, and those of the
# removed ones that torch itself no longer has (gone). on_cpu lists the overloads that always run on the CPU.
"""


def table(wheels: list[Wheel]) -> str:
    """Return the table of several wheels, oldest first."""
    parts, kernels = [_HEAD], frozenset[str]()
    for wheel in wheels:
        major, minor = parse_release(wheel.torch)
        removed = kernels - wheel.kernels
        parts += [
            f'\n[[release]]\ntorch = "{major}.{minor}"\nwheel = "{wheel.file}"\nsha256 = "{wheel.sha256}"\n'
            f"oldest_macos = {wheel.oldest_macos}\n",
            _names("on_cpu", wheel.on_cpu),
            _names("removed", removed),
            _names("gone", removed - wheel.overloads),
            _names("added", wheel.kernels - kernels),
        ]
        kernels = wheel.kernels
    return "".join(parts)


def _names(key: str, names: frozenset[str]) -> str:
    text = " ".join(sorted(names))
    if len(text) < 100:
        return f'{key} = "{text}"\n'
    lines = textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)
    return f'{key} = """\n' + "\n".join(lines) + '"""\n'


# --- comparison with torch's own lists --------------------------------------------------------------------------------


def unimplemented(source: str) -> set[str]:
    """Return the operators that torch's tests on Macs expect to be missing for float32 (common_mps.py)."""
    result: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if "UNIMPLEMENTED_XFAILLIST" not in [getattr(target, "id", "") for target in targets]:
            continue
        assert isinstance(node, ast.Assign | ast.AnnAssign)
        assert isinstance(node.value, ast.Dict)
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            is_name = isinstance(key, ast.Constant) and isinstance(key.value, str)
            if is_name and ("None" in ast.unparse(value) or "float32" in ast.unparse(value)):
                result.add(ast.literal_eval(key))
    return result


def expected_to_fail(source: str) -> set[str]:
    """Return the operators whose samples torch's general tests expect to fail on MPS (OpInfo entries)."""
    return {name for name in map(_failing_operator, ast.walk(ast.parse(source))) if name}


def _failing_operator(node: ast.AST) -> str | None:
    """Return the name of an OpInfo entry with an expected failure on MPS; None for other nodes."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return None
    marks = [call for call in ast.walk(node) if isinstance(call, ast.Call) and call is not node]
    if not any("expectedFailure" in ast.unparse(m) and _keyword(m, "device_type") == "mps" for m in marks):
        return None
    return f"{node.args[0].value}{_keyword(node, 'variant_test_name') or ''}"


def _keyword(call: ast.Call, name: str) -> Any:
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


def compare(path: Path) -> str:
    """Return how far the check agrees with torch's lists of Mac failures of the same wheel, as one line."""
    with zipfile.ZipFile(path) as archive:
        lists = unimplemented(archive.read(_LISTS).decode())
        files = [name for name in archive.namelist() if name.startswith(_OPINFO) and name.endswith(".py")]
        failing = set().union(*(expected_to_fail(archive.read(file).decode()) for file in files))
    release = parse_release(path.name.split("-")[1])
    tried, found = predicted(release)
    missing = {name for name, kinds in found.items() if "missing-operator" in kinds}
    listed = lists & tried
    unexplained = listed - found.keys()
    unconfirmed = missing - lists - failing
    return (
        f"torch {release[0]}.{release[1]}: {len(tried)} operators tried, {len(missing)} missing by the table, "
        f"{len(missing & lists)} of them in torch's list and {len((missing - lists) & failing)} expected to fail "
        f"elsewhere, unconfirmed: {sorted(unconfirmed) or 'none'}; of torch's {len(listed)}, "
        f"{len(listed) - len(unexplained)} are explained, not: {sorted(unexplained) or 'none'}"
    )


def predicted(release: tuple[int, int] | None, *, names: Any = None, most: int = 60) -> tuple[set[str], dict[str, set]]:
    """Run torch's sample operators as MPS would, and return those that ran and the findings of each."""
    import warnings

    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    from whet.device.operators import torch_operators
    from whet.device.tracing import trace_as
    from whet.verify.fake_tensors import FakeExecutor
    from whet.verify.preflight.detectors import DtypeDetector, OperatorDetector, ShapeDetector
    from whet.verify.preflight.trace import OperatorRecorder

    operators = torch_operators(release)
    tried: set[str] = set()
    found: dict[str, set[str]] = {}
    for op in op_db:
        key = op.name + op.variant_test_name
        if (names is not None and key not in names) or not op.supports_dtype(torch.float32, "cpu"):
            continue
        recorder = OperatorRecorder(
            [OperatorDetector("MPS", operators), DtypeDetector(), ShapeDetector()],
            backend="MPS",
            executor=FakeExecutor(None),
            operators=operators,
        )
        recorder.phase = "training"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                samples = [sample for sample, _ in zip(op.sample_inputs("cpu", torch.float32), range(most))]  # noqa: B905
            except Exception:
                continue
            with trace_as("mps"), recorder.function_mode(), recorder:
                for sample in samples:
                    try:
                        op(sample.input, *sample.args, **sample.kwargs)
                    except Exception:
                        # Some samples are for other devices; earlier results count.
                        continue
        tried.add(key)
        if kinds := {finding.id for finding in recorder.log.findings()}:
            found[key] = kinds
    return tried, found


def main(args: list[str]) -> None:
    paths = sorted(map(Path, [a for a in args if a != "--compare"]), key=lambda p: parse_release(p.name.split("-")[1]))
    if "--compare" in args:
        for path in paths:
            print(compare(path))
        return
    wheels = [read_wheel(path) for path in paths]
    for wheel in wheels:
        differences = wheel.kernels ^ wheel.listed
        print(f"{wheel.file}: {len(wheel.kernels)} kernels, {len(differences)} differ from its operator list")
    TABLE.write_text(table(wheels), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
