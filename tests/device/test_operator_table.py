"""The table of operators agrees with torch's parser and with the expected failures of torch's tests on MPS."""

import inspect
import struct
import sys
import tomllib
import unittest
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torchgen

from paths import ROOT
from whet.base.errors import UsageError
from whet.device.operators import (
    known_release,
    mps_kernels,
    mps_releases,
    operator_status,
    parse_release,
    read_operators,
    torch_operators,
)
from whet.machine.apple import oldest_macos
from whet.machine.facts import TorchFacts

sys.path.insert(0, str(ROOT / "tools"))
import mps_operators as tool

pytestmark = pytest.mark.torch

FEW = ("nn.functional.ctc_loss", "linalg.eigh", "linalg.svd", "take", "add", "nn.functional.linear", "mode", "matmul")


@pytest.mark.parametrize("backend", ["MPS", "CUDA"])
def test_the_table_agrees_with_torchs_own_parser(backend: str, report_count: Callable[[str], None]) -> None:
    from torchgen.gen import get_grouped_native_functions, parse_native_yaml
    from torchgen.model import DispatchKey, NativeFunctionsGroup, SchemaKind

    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    index = parsed.backend_indices[DispatchKey.parse(backend)]
    operators, differences, count = torch_operators(), [], 0
    for group in get_grouped_native_functions(parsed.native_functions):
        is_structured = isinstance(group, NativeFunctionsGroup) and group.structured
        for function in group.functions() if isinstance(group, NativeFunctionsGroup) else [group]:
            name = str(function.func.name)
            status = operator_status(name, operators, backend=backend)
            count += 1
            if status.kind == "on the CPU":
                continue
            has_kernel = function.func.name in index.index or (is_structured and index.has_kernel(group))
            has_parts = (
                function.has_composite_explicit_autograd_kernel
                or function.has_composite_implicit_autograd_kernel
                or function.has_composite_explicit_autograd_non_functional_kernel
            )
            expected = "kernel" if has_kernel else "parts" if has_parts else "missing"
            # torch implements these through out=; without a kernel for that, they are missing too.
            is_written = is_structured and function.func.kind() in (SchemaKind.functional, SchemaKind.inplace)
            if is_written and not has_kernel and status.kind == "missing":
                expected = "missing"
            if status.kind != expected:
                differences.append((name, expected, status.kind))
    report_count(f"{count} overloads for {backend}, {len(differences)} disagreements")
    assert count > 3_000
    assert differences == []


def _agreement(names: Iterable[str] | None, report_count: Callable[[str], None], *, most_samples: int) -> set[str]:
    # Imported by the process that runs this file only: it takes a second.
    from torch.testing._internal import common_mps
    from torch.testing._internal.common_methods_invocations import op_db

    unimplemented = tool.unimplemented(inspect.getsource(common_mps))
    assert len(unimplemented) > 30
    failing = {
        op.name + op.variant_test_name
        for op in op_db
        if any(
            getattr(mark, "device_type", None) == "mps" and unittest.expectedFailure in mark.decorators
            for mark in op.decorators
        )
    }
    tried, logged = tool.predicted(None, names=names, most=most_samples)
    # torch's tests run operators that are named after the CPU there only.
    missing = {name for name, kinds in logged.items() if "missing-operator" in kinds and not name.endswith("_for_cpu")}
    explained = {name for name in unimplemented & tried if name in logged}
    report_count(
        f"{len(tried)} operators: {len(missing)} missing by the table, {len(missing & unimplemented)} of them in "
        f"torch's list of unimplemented ones, {len((missing - unimplemented) & failing)} expected to fail elsewhere; "
        f"of its {len(unimplemented & tried)}, {len(explained)} are explained"
    )
    assert missing <= unimplemented | failing, sorted(missing - unimplemented - failing)
    return (unimplemented & tried) - explained


@pytest.mark.slow
def test_missing_operators_are_skipped_in_torchs_tests_for_mps(report_count: Callable[[str], None]) -> None:
    assert _agreement(FEW, report_count, most_samples=8) == set()


@pytest.mark.slow
def test_all_missing_operators_are_skipped_in_torchs_tests_for_mps(report_count: Callable[[str], None]) -> None:
    # These fail for float32 for reasons that are not in the table: numerics, and a mode of a single sample.
    assert _agreement(None, report_count, most_samples=60) <= {
        "masked.median",
        "svd_lowrank",
        "nn.functional.grid_sample",
    }


def test_the_wheels_table_has_the_kernels_of_the_installed_list() -> None:
    release = parse_release(str(torch.__version__))
    listed = {operator.name for operator in mps_kernels(read_operators())}
    assert mps_releases()[release].kernels == listed
    assert len(listed) > 850


def test_another_release_has_other_kernels() -> None:
    statuses = {
        name: [operator_status(name, torch_operators(release)).kind for release in mps_releases()]
        for name in ("_ctc_loss", "_linalg_eigh", "linalg_svd", "take", "add.Tensor", "cholesky")
    }
    kernel, missing, cpu = "kernel", "missing", "on the CPU"
    assert statuses["_ctc_loss"] == statuses["_linalg_eigh"] == [missing] * 3 + [kernel] * 2
    assert statuses["linalg_svd"] == [cpu] * 3 + ["parts"] * 2
    assert statuses["take"] == [missing] * 4 + [kernel]
    assert statuses["add.Tensor"] == [kernel] * 5
    assert statuses["cholesky"][-1] == "unknown", "torch 2.14 removed it"
    # The list of the installed torch is not changed by asking for another.
    assert operator_status("take", torch_operators()).kind == operator_status("take", read_operators()).kind


def test_an_unknown_release_is_an_error() -> None:
    assert known_release("2.15.0") == (2, 15)
    for text, problem in (("2.99", "are not known"), ("newest", "not a version")):
        with pytest.raises(UsageError, match=problem):
            known_release(text)


def test_the_oldest_macos_is_that_of_the_wheels() -> None:
    table = tomllib.loads((ROOT / "src/whet/device/mps_operators.toml").read_text())["release"]
    assert [oldest_macos(TorchFacts(version=f"{entry['torch']}.0")) for entry in table] == [
        entry["oldest_macos"] for entry in table
    ]


def test_the_tool_finds_addresses_in_machine_code() -> None:
    # adrp x1, +1 page; add x1, x1, #0x123; adr x2, -4; add x3, x9, #5 (x9 holds no page); nop
    words = (0xB0000001, 0x91048C21, 0x10FFFFE2, 0x91001523, 0xD503201F)
    code = bytes(0x1000) + struct.pack("<5I", *words)
    assert list(tool.loaded_addresses(code, 0x1000, len(code))) == [0x2123, 0x1008 - 4]
