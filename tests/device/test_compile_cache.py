"""The folder of compiled code: private, kept, and the user's choice first."""

import getpass
import os
from pathlib import Path

import pytest

from whet.device.environment import configure_compile_cache

pytestmark = pytest.mark.torch

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture(autouse=True)
def _no_choice_yet(monkeypatch, tmp_path):
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in VARIABLES:
        # Set first, so that what the function writes is undone.
        monkeypatch.setenv(name, "")


def chosen() -> list[str | None]:
    return [os.environ.get(name) for name in VARIABLES]


def test_only_the_user_can_use_the_cache(tmp_path):
    configure_compile_cache()
    folder = tmp_path / "home" / "compiled"
    assert chosen() == [str(folder), str(folder / "triton")]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_folder_that_others_could_write_is_closed(tmp_path):
    folder = tmp_path / "home" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    configure_compile_cache()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", VARIABLES)
def test_variable_of_the_user_wins(monkeypatch, name, tmp_path):
    monkeypatch.setenv(name, "/mine")
    configure_compile_cache()
    assert os.environ[name] == "/mine"
    assert sum(value.startswith(str(tmp_path)) for value in chosen()) == 1


def test_defaults_that_torch_has_set_are_replaced(monkeypatch, tmp_path):
    default = tmp_path / f"torchinductor_{getpass.getuser()}"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(default))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(default / "triton" / "3"))
    configure_compile_cache()
    assert all(value.startswith(str(tmp_path / "home")) for value in chosen())


def test_folder_of_another_user_is_not_used_simulated(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "getuid", lambda: Path(tmp_path).stat().st_uid + 1)
    configure_compile_cache()
    assert chosen() == ["", ""]
