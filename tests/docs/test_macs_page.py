"""The page of Macs lists real and private doctor files only. The reports here are made up."""

from pathlib import Path

import pytest

from paths import ROOT
from whet.doctor.check import CheckResult
from whet.doctor.report import DoctorReport, report_bytes
from whet.machine.facts import Machine, OperatingSystem, SystemState, TorchFacts


@pytest.fixture
def docs_macs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import docs_macs

    return docs_macs


def write(folder: Path, *, what: str = "GFLOP/s: fp32 2100", device: str = "mps", virtual: bool = False) -> Path:
    check = CheckResult(group="speeds", name="matrix product", verdict="good", what=what, seconds=1.0)
    wrong = CheckResult(group="hazards", name="layer_norm", verdict="differs", what="wrong here", seconds=1.0)
    report = DoctorReport(
        whet="0.1.0", device=device, is_virtual=virtual, is_quick=True, started="", finished="", budget_seconds=120,
        machine=Machine(name="this machine", model="MacBook Air (Mac14,2)", chip="Apple M2", memory_bytes=8 * 1024**3,
                        os=OperatingSystem(name="macOS", version="15.1"), torch=TorchFacts(version="2.15.0")),
        system_state=SystemState(), system_state_after=SystemState(), num_busy_processes=0, versions={},
        checks=(check, wrong),
    )  # fmt: skip
    (folder / "m2-8gb-2027-01-31.json").write_bytes(report_bytes(report))
    return folder


def test_page_says_that_nothing_was_received(docs_macs, tmp_path: Path) -> None:
    assert "None yet." in docs_macs.macs_page(tmp_path)
    assert "None yet." in docs_macs.macs_page(tmp_path / "no such folder")


def test_received_file_becomes_a_row(docs_macs, tmp_path: Path) -> None:
    page = docs_macs.macs_page(write(tmp_path))
    assert "None yet." not in page
    assert page.splitlines()[-1] == (
        "| MacBook Air (Mac14,2), Apple M2, 8 GB | 15.1 | 2.15.0 | 1 of 2 good (quick) | hazards: layer_norm "
        "| GFLOP/s: fp32 2100 | not measured | [m2-8gb-2027-01-31](macs/m2-8gb-2027-01-31.json) |"
    )


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"virtual": True}, "not about a Mac"),
        ({"device": "cpu"}, "not about a Mac"),
        ({"what": "no /Users/anna/thesis/x.pt"}, "path or an identifier"),
        ({"what": "serial C02XL0GYJGH5"}, "path or an identifier"),
        ({"what": "x" * 70_000}, "larger than"),
    ],
    ids=["simulated", "cpu", "path", "serial", "large"],
)
def test_file_that_may_not_be_published_is_refused(docs_macs, tmp_path: Path, fault: dict, reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        docs_macs.macs_page(write(tmp_path, **fault))
