"""The simulated device: its limits, errors, generator and counters; what it refuses; how it is built."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT
from virtual_process import INSTALL, environment
from warm_python import WarmPython

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]


def test_checks_on_the_virtual_mac(run_checks) -> None:
    # torch's own defaults; whet's device would set lower ones in the middle of the checks.
    watermarks = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "1.7", "PYTORCH_MPS_LOW_WATERMARK_RATIO": "1.4"}
    checks = "tests/virtual_mac/inside/check_device.py"
    done = run_checks(checks, **watermarks)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 25


def test_the_fall_back_runs_missing_operators_on_the_cpu(python) -> None:
    code = INSTALL + (
        "import torch, warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    values = torch.pdist(3.0 * torch.eye(3, device='mps'), p=1)\n"
        "    torch.pdist(torch.eye(300, device='mps'))\n"
        "(name, cost), = virtual_mac.stats().fallbacks.items()\n"
        "print(values.device, values.tolist(), name, cost.calls, cost.seconds > 0, caught[0].message)\n"
    )
    done = python(code, PYTORCH_ENABLE_MPS_FALLBACK="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mps:0 [6.0, 6.0, 6.0] _pdist_forward 2 True The operator ")
    assert "will fall back to run on the CPU" in done.stdout


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.9"}, "RuntimeError: invalid low watermark ratio 1.4"),
        ({"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "2.5"}, "RuntimeError: invalid high watermark ratio 2.5"),
        (
            {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.5", "PYTORCH_MPS_LOW_WATERMARK_RATIO": "0.4"},
            "max allowed: 2.67 GiB",
        ),
    ],
    ids=["high below the default low", "out of range", "both"],
)
def test_watermarks_come_from_the_environment(python, changes: dict[str, str], reported: str) -> None:
    done = python(INSTALL + "import torch; torch.empty(3 * 2**30, dtype=torch.uint8, device='mps')", **changes)
    assert done.returncode == 1
    assert reported in done.stderr


def test_a_late_installation_is_an_error(python) -> None:
    done = python("import torch; torch.ones(1).is_mps; torch._C._mps_is_available()\n" + INSTALL)
    assert done.returncode == 1
    assert "the virtual Mac was installed too late" in done.stderr


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("torch._C._has_mps = True", "this torch has a real MPS backend"),
        ("torch.cuda.device_count = lambda: 2", "torch finds 2 cuda devices"),
        (
            "from whet.device.virtual_mac import installation; installation.sys.platform = 'darwin'",
            "the system is darwin",
        ),
    ],
)
def test_another_torch_is_refused_with_the_reason(python, lie: str, reason: str) -> None:
    done = python(f"import torch; {lie}\n" + INSTALL)
    assert done.returncode == 1
    assert reason in done.stderr


def test_without_a_compiler_the_error_says_what_is_missing(tmp_path: Path, warm_python: WarmPython) -> None:
    env = environment(tmp_path / "home", CXX="no-such-compiler")
    done = warm_python.run("-c", INSTALL, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert "the virtual Mac needs a C++ compiler" in done.stderr
    assert "got: no no-such-compiler" in done.stderr
    assert "try: pip install" in done.stderr


def test_a_failed_build_reports_the_first_error_and_leaves_nothing_to_load(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    compiler = tmp_path / "cc-that-fails"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *.cpp*) echo "x.cpp:1: error: planted" >&2; exit 1;; *) exec c++ "$@";; esac\n'
    )
    compiler.chmod(0o755)
    env = environment(tmp_path / "home", CXX=str(compiler))
    done = warm_python.run("-c", INSTALL, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert "the virtual Mac could not be built" in done.stderr
    assert "planted" in done.stderr
    assert not list((tmp_path / "home").rglob("*.so"))


def test_two_processes_that_build_at_once_build_once(tmp_path: Path) -> None:
    """With a simulated slow builder that records each run."""
    note = tmp_path / "built"
    code = (
        "import sys, time, pathlib\n"
        "from whet.device.virtual_mac import native\n"
        "def build(library):\n"
        f"    with open({str(note)!r}, 'a') as file: file.write('x')\n"
        "    time.sleep(1)\n"
        "    library.write_bytes(b'not a library')\n"
        "native._build = build\n"
        "try: native.load_extension('0')\n"
        "except ImportError: print('loaded')\n"
    )
    env = environment(tmp_path / "home")
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate(timeout=600)[0] for process in both] == ["loaded\n", "loaded\n"]
    assert note.read_text() == "x"


def test_the_wheel_has_the_sources() -> None:
    folder = ROOT / "src" / "whet" / "device" / "virtual_mac" / "cpp"
    assert {path.suffix for path in folder.iterdir()} == {".cpp", ".h"}
    assert all(len(path.read_text().splitlines()) < 400 for path in folder.iterdir())
