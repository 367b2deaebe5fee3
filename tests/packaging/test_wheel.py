"""The wheel builds, installs into an empty environment, and works there: without torch, and (slow) with everything."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from paths import ROOT

TORCH_FREE = ("pydantic", "typer", "rich", "psutil", "pyyaml")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (made,) = folder.glob("whet-*.whl")
    return made


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    venv.create(tmp_path / "env", with_pip=True)
    return tmp_path / "env" / "bin"


@pytest.mark.slow
def test_the_torch_free_half_works_where_there_is_no_torch(wheel: Path, empty: Path, tmp_path: Path) -> None:
    run(empty / "pip", "install", "-qq", "--no-deps", wheel, cwd=tmp_path)
    run(empty / "pip", "install", "-qq", "-c", ROOT / "constraints.txt", *TORCH_FREE, cwd=tmp_path)
    assert "torch is not installed" in run(empty / "whet", "probe", cwd=tmp_path)
    assert run(empty / "whet", "--version", cwd=tmp_path).startswith("whet ")
    assert "micro_batch" in run(empty / "python", "-m", "whet", "plan", "text", "--machine", "h200", cwd=tmp_path)


@pytest.mark.slow
def test_the_whole_wheel_plans_and_trains_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    shown = run(sys.executable, ROOT / "tools" / "release.py", "try", wheel, ROOT / "constraints.txt", cwd=tmp_path)
    assert "MB installed: whet " in shown
    assert shown.count(" s  ") == 9
