"""The doctor detects planted faults, survives checks that misbehave, and reports no personal data."""

import getpass
import json
import platform
import re
import time
from pathlib import Path

import pytest
import torch

from paths import ROOT
from whet.base.errors import UsageError, WhetError
from whet.cli.doctor import render_report
from whet.cli.main import run as run_cli
from whet.device.cpu import CpuDevice
from whet.doctor.check import CheckGroup, CheckResult, DeviceUnderTest
from whet.doctor.checks import hazards, operators, speeds, training
from whet.doctor.checks.compare import draw, operator
from whet.doctor.report import GROUPS, DoctorReport, choose_device, report_bytes, run_doctor
from whet.doctor.runner import CheckRunner
from whet.machine.facts import Accelerator, Machine, SystemState, TorchFacts
from whet.verify.tolerance import relative_error

pytestmark = pytest.mark.torch

HERE = DeviceUnderTest(device=CpuDevice(), name="cpu", is_virtual=False)
MISSING = "The operator 'aten::{}' is not currently implemented for the MPS device. If you want this op ..."


def planted(table: str) -> CheckGroup:
    return CheckGroup(name="planted", table=f"planted_checks:{table}")


@pytest.fixture(scope="module")
def examined() -> DoctorReport:
    logged: list[str] = []
    result = run_doctor(
        "cpu",
        groups=[planted("CASES"), GROUPS[0]],
        show=lambda group, check: logged.append(group if check is None else check.name),
    )
    assert logged[:3] == ["planted", "fine", "raises"]
    return result


def by_name(checks) -> dict[str, CheckResult]:
    return {check.name: check for check in checks}


# --- checks that misbehave -------------------------------------------------------------------------------------------


def test_check_that_raises_dies_hangs_or_complains_is_a_result(examined: DoctorReport) -> None:
    result = by_name(examined.checks)
    assert {name: (c.verdict, c.figures.get("outcome")) for name, c in result.items() if c.group == "planted"} == {
        "fine": ("good", None),
        "raises": ("failed", "raised"),
        "complains": ("failed", "silent fault"),
        "is stopped": ("failed", "silent fault"),
        "aborts": ("failed", "died"),
        "hangs": ("failed", "hung"),
        "fine again": ("good", None),
    }
    assert "SIGABRT" in result["aborts"].what
    assert "failed assertion" in result["aborts"].what
    assert "command buffer" in result["complains"].what
    assert "with the display asleep, or through SSH" in result["is stopped"].what
    assert result["fine"].issue == 1
    assert result["fine"].figures == {"error": "nan", "speed": 0.3333}
    assert "second line" not in result["raises"].what
    assert {c.name for c in examined.problems} == {"raises", "complains", "is stopped", "aborts", "hangs"}


def test_checks_that_cannot_be_imported_are_a_result() -> None:
    ward = CheckRunner(device="cpu", ends_at=time.monotonic() + 600, budget_seconds=600)
    (check,) = ward.run(CheckGroup(name="planted", table="no.such.module:CASES"))
    assert check.verdict == "failed"
    assert "ModuleNotFoundError" in check.what


def test_device_that_cannot_be_opened_is_a_result() -> None:
    ward = CheckRunner(device="cuda:99", ends_at=time.monotonic() + 600, budget_seconds=600, only_quick=True)
    checks = list(ward.run(planted("CASES")))
    assert [(c.name, c.verdict) for c in checks] == [("fine", "failed"), ("raises", "failed")]
    assert "cuda:99 could not be opened" in checks[0].what


def test_budget_stops_a_check_and_skips_the_rest() -> None:
    ward = CheckRunner(device="cpu", ends_at=time.monotonic() + 6, budget_seconds=6)
    start = time.monotonic()
    checks = list(ward.run(planted("SLOW")))
    assert time.monotonic() - start < 60, "the planted check would take ten minutes"
    assert [c.name for c in checks][-2:] == ["hangs", "behind"] or [c.name for c in checks] == ["all"]
    assert all(c.verdict == "skipped" and "budget of 6 s" in c.what for c in checks[-2:])


def test_no_process_is_started_without_a_budget() -> None:
    ward = CheckRunner(device="cpu", ends_at=time.monotonic(), budget_seconds=1)
    assert [check.verdict for check in ward.run(planted("CASES"))] == ["skipped"]


# --- wrong results (planted) -----------------------------------------------------------------------------------------


class Twice:
    """An operator that is correct in its first call, on the CPU, and wrong in the second, on the device."""

    def __init__(self, wrong) -> None:
        self.wrong, self.calls = wrong, 0

    def __call__(self, x):
        self.calls += 1
        return self.wrong(x) if self.calls == 2 else x.sin()


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos() * 1.001


def _missing(name: str):
    def refuse(_):
        raise NotImplementedError(MISSING.format(name))

    return refuse


def _no_float64(_):
    raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")


@pytest.mark.parametrize(
    ("wrong", "verdict", "outcome"),
    [
        (torch.sin, "good", None),
        (lambda x: x.sin() * 1.001, "differs", None),
        (_WrongGradient.apply, "differs", None),
        (lambda x: x.sin()[:-1], "differs", None),
        (lambda x: x.sin().masked_fill(x == x.max(), torch.nan), "differs", None),
        (lambda x: x.sin().detach(), "differs", None),
        (_missing("linalg_eig"), "not applicable", "missing"),
        (_missing("mm"), "failed", "missing"),
        (_no_float64, "not applicable", "refused"),
        (lambda x: x @ x @ x[0], "failed", "refused"),
    ],
    ids=["right", "off by 0.1 %", "gradient", "shape", "NaN", "no gradient", "known to be missing", "missing",
         "float64", "an error"],
)  # fmt: skip
def test_planted_wrong_operator_is_detected(wrong, verdict: str, outcome: str | None) -> None:
    result = operator("planted", Twice(wrong), draw(3, 4)).run(HERE)
    assert (result.verdict, result.figures.get("outcome")) == (verdict, outcome), result


def test_relative_error_covers_shapes_nan_and_integers() -> None:
    assert relative_error(torch.tensor([100.0, 1.01]), torch.tensor([100.0, 1.0])) == pytest.approx(1e-4)
    assert relative_error([torch.tensor(1.0), torch.tensor(1e-9)], [torch.tensor(1.0), torch.tensor(0.0)]) < 1e-6
    for wrong in (torch.tensor([1.0, torch.nan]), torch.tensor([1.0]), torch.tensor([1.0, torch.inf])):
        assert relative_error(wrong, torch.tensor([1.0, 2.0])) == float("inf")
    assert relative_error(torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf])) == 0
    assert relative_error(torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, torch.inf])) == float("inf")
    assert relative_error(torch.tensor([1, 3]), torch.tensor([1, 2])) == float("inf")
    assert relative_error([], []) == float("inf"), "without a comparison nothing is reported"


def test_names_are_unique_and_hazards_have_issue_numbers() -> None:
    for table in (operators.CHECKS, hazards.CHECKS, training.PARITY, training.RESUME, speeds.CHECKS):
        names = [case.name for case in table]
        assert len(names) == len(set(names))
        assert any(case.is_quick for case in table)
    issues = [case.issue for case in hazards.CHECKS]
    assert None not in issues
    assert len(issues) == len(set(issues))


# --- the record ------------------------------------------------------------------------------------------------------


def test_report_contains_no_user_host_or_path(examined: DoctorReport) -> None:
    text = report_bytes(examined).decode()
    assert "secret.so" in text, "the planted error is included, without its path"
    names = (getpass.getuser(), platform.node(), str(Path.home()), "/Users/", "thesis", str(ROOT), "/tmp/", "My disk")
    for name in (*names, "8932f937", "C02XL0GYJGH5", "anna", platform.release()):
        assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE), name
    assert examined.system_state.busy == ()
    assert examined.system_state_after.busy == ()


def test_report_is_strict_json_and_can_be_read_back(examined: DoctorReport) -> None:
    data = json.loads(report_bytes(examined), parse_constant=lambda word: pytest.fail(word))
    assert data["format_version"] == 1
    assert data["is_virtual"] is False
    assert data["device"] == "cpu"
    assert DoctorReport.from_json(data, where="the test") == examined


def test_missing_device_is_an_error() -> None:
    mac = Machine(name="a", accelerators=(Accelerator(kind="mps"),), torch=TorchFacts(version="2.13.0"))
    assert choose_device("auto", mac) == "mps"
    assert choose_device("cpu", mac) == "cpu"
    assert choose_device("auto", Machine(name="b")) == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UsageError, match=f"no {name} device to test"):
            choose_device(name, mac)
    with pytest.raises(WhetError, match="torch cannot be imported"):
        choose_device("cpu", Machine(name="c", torch=TorchFacts(error="ImportError: no")))


@pytest.mark.parametrize(
    ("verdict", "code"), [("good", 0), ("not applicable", 0), ("skipped", 0), ("differs", 1), ("failed", 1)]
)
def test_exit_code_shows_whether_there_are_problems(monkeypatch, capsys, tmp_path: Path, verdict, code: int) -> None:
    check = CheckResult(group="parity", name="planted", verdict=verdict, what="what was seen", seconds=1.0)
    result = DoctorReport(
        whet="0", device="mps", is_virtual=True, is_quick=False, started="", finished="", budget_seconds=1,
        machine=Machine(name="m"), system_state=SystemState(), system_state_after=SystemState(), num_busy_processes=1,
        load_per_core=3.0, versions={}, checks=(check,),
    )  # fmt: skip
    monkeypatch.setattr("whet.doctor.report.run_doctor", lambda *_, **__: result)
    assert run_cli(["doctor", "--json", str(tmp_path / "doctor.json")]) == code
    out = capsys.readouterr().out
    assert "SIMULATED" in out
    assert "1 heavy process, load 3.0 per core: speeds are lower" in out
    assert ("what was seen" in out) == (verdict not in ("good", "not applicable"))
    assert DoctorReport.from_json(json.loads((tmp_path / "doctor.json").read_text()), where="file") == result


def test_load_without_heavy_processes_is_described() -> None:
    result = DoctorReport(
        whet="0", device="cpu", is_virtual=False, is_quick=False, started="", finished="", budget_seconds=1,
        machine=Machine(name="m"), system_state=SystemState(), system_state_after=SystemState(), num_busy_processes=0,
        load_per_core=4.2, versions={}, checks=(),
    )  # fmt: skip
    (line,) = [line for line in render_report(result) if line.startswith("busy")]
    assert "0 heavy" not in line
    assert "load 4.2 per core in the last minute, though no single process is heavy now: speeds are" in line


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_checks_pass_on_the_cpu() -> None:
    result = run_doctor("cpu", budget_seconds=600)
    assert not result.problems, result.problems
    assert not [check for check in result.checks if check.verdict == "skipped"]
    assert len(result.checks) > 150
    assert len(report_bytes(result)) < 64_000, "small enough to read before sending"


@pytest.mark.parametrize(("bits", "found"), [(23, "fp32"), (10, "tf32"), (7, "bf16"), (4, "less than bf16")])
def test_products_that_use_fewer_bits_are_found(bits: int, found: str) -> None:
    class Rounding:
        """Stands for a device that rounds the factors of a product (simulated)."""

        def put(self, tensor: torch.Tensor) -> torch.Tensor:
            mantissa, exponent = torch.frexp(tensor)
            return torch.ldexp((mantissa * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)

    finding = speeds._fp32_products(Rounding())  # type: ignore[arg-type]
    assert finding.figures["format"] == found
    assert finding.figures["bits_at_1024"] == bits
    assert (finding.verdict == "good") == (bits == 23)
