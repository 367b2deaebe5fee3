"""The hint to install an extra is a command that works where whet was installed from."""

import json
from pathlib import Path

import pytest

from paths import ROOT
from whet.base import extras
from whet.base.extras import install_hint


class _Installed:
    def __init__(self, recorded: str | None) -> None:
        self._recorded = recorded

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._recorded


def _hint(recorded: str | None, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(extras, "distribution", lambda name: _Installed(recorded))
    return install_hint("web")


def test_a_clone_is_named_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    recorded = {"url": clone.as_uri(), "dir_info": {"editable": True}}
    assert _hint(json.dumps(recorded), monkeypatch) == f"pip install -e '{clone}[web]'"
    recorded = {"url": clone.as_uri(), "dir_info": {}}
    assert _hint(json.dumps(recorded), monkeypatch) == f"pip install '{clone}[web]'"
    clone.rmdir()
    assert _hint(json.dumps(recorded), monkeypatch) == "pip install '.[web]' in a clone of whet"


@pytest.mark.parametrize("recorded", [None, "{}", "no JSON"])
def test_a_package_from_an_index_is_named(recorded: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _hint(recorded, monkeypatch) == "pip install 'whet[web]'"


def test_no_other_module_names_an_extra() -> None:
    sources = (ROOT / "src" / "whet").rglob("*.py")
    assert [path.name for path in sources if "'whet[" in path.read_text() or '"whet[' in path.read_text()] == [
        "extras.py"
    ]
