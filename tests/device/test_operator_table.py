"""The table of operators agrees with torch's parser and with the expected failures of torch's tests on MPS."""

import ast
import inspect
import unittest
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
from torch.testing._internal import common_mps
from torch.testing._internal.common_methods_invocations import op_db

from whet.device.operators import operator_status, torch_operators
from whet.device.tracing import trace_as
from whet.verify.fake_tensors import FakeExecutor
from whet.verify.preflight.detectors import DtypeDetector, OperatorDetector, ShapeDetector
from whet.verify.preflight.trace import OperatorRecorder

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


def _unimplemented() -> set[str]:
    """Operators that torch's tests on Macs expect to be missing for float32."""
    result: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(common_mps))):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if "UNIMPLEMENTED_XFAILLIST" not in [getattr(target, "id", "") for target in targets]:
            continue
        assert isinstance(node, ast.Assign | ast.AnnAssign)
        assert isinstance(node.value, ast.Dict)
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            if _is_text(key) and ("None" in ast.unparse(value) or "float32" in ast.unparse(value)):
                result.add(ast.literal_eval(key))
    assert len(result) > 50
    return result


def _expected_to_fail() -> set[str]:
    """Operators whose samples are expected to fail on MPS, in torch's general tests."""
    return {
        op.name + op.variant_test_name
        for op in op_db
        if any(
            getattr(mark, "device_type", None) == "mps" and unittest.expectedFailure in mark.decorators
            for mark in op.decorators
        )
    }


def _is_text(key: Any) -> bool:
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


def _predicted(names: Iterable[str] | None, *, most_samples: int) -> tuple[set[str], dict[str, set[str]]]:
    """Compare torch's sample operators with the result of the check for each."""
    tried, logged = set(), {}
    for op in op_db:
        key = op.name + op.variant_test_name
        if (names is not None and key not in names) or not op.supports_dtype(torch.float32, "cpu"):
            continue
        recorder = OperatorRecorder(
            [OperatorDetector("MPS"), DtypeDetector(), ShapeDetector()], backend="MPS", executor=FakeExecutor(None)
        )
        recorder.phase = "training"
        try:
            samples = [sample for sample, _ in zip(op.sample_inputs("cpu", torch.float32), range(most_samples))]  # noqa: B905
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
            logged[key] = kinds
    return tried, logged


def _agreement(names: Iterable[str] | None, report_count: Callable[[str], None], *, most_samples: int) -> set[str]:
    unimplemented, failing = _unimplemented(), _expected_to_fail()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tried, logged = _predicted(names, most_samples=most_samples)
    missing = {name for name, kinds in logged.items() if "missing-operator" in kinds}
    explained = {name for name in unimplemented & tried if name in logged}
    report_count(
        f"{len(tried)} operators: {len(missing)} missing by the table, {len(missing & unimplemented)} of them in "
        f"torch's list of unimplemented ones, {len((missing - unimplemented) & failing)} expected to fail elsewhere; "
        f"of its {len(unimplemented & tried)}, {len(explained)} are explained"
    )
    assert missing <= unimplemented | failing, sorted(missing - unimplemented - failing)
    return (unimplemented & tried) - explained


def test_missing_operators_are_skipped_in_torchs_tests_for_mps(report_count: Callable[[str], None]) -> None:
    assert _agreement(FEW, report_count, most_samples=8) == set()


@pytest.mark.slow
def test_all_missing_operators_are_skipped_in_torchs_tests_for_mps(report_count: Callable[[str], None]) -> None:
    # Fails for float32 for a reason that is not in the table.
    assert _agreement(None, report_count, most_samples=60) <= {"masked.median"}
