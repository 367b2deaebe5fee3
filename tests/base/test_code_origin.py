"""The origin of a source file, by its path."""

import json
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

import whet
from whet.base.origin import code_origin

HERE = Path(whet.__file__).parent
LIBRARIES = Path(sysconfig.get_path("purelib"))


@pytest.mark.parametrize(
    ("file", "author"),
    [
        (HERE / "step" / "step.py", "whet"),
        (HERE / "recipes" / "text" / "model.py", "recipe"),
        (HERE.with_name("whet_of_mine") / "model.py", "you"),
        (LIBRARIES / "library" / "model.py", "library"),
        (LIBRARIES / "torchlike" / "model.py", "library"),
        (Path(json.__file__), "python"),
        ("<string>", "python"),
        (Path(__file__), "you"),
    ],
)
def test_code_origin_by_path(file: Path | str, author: str) -> None:
    assert code_origin(str(file)) == author


@pytest.mark.skipif(find_spec("torch") is None, reason="no torch here")
def test_torch_has_its_own_origin() -> None:
    spec = find_spec("torch")
    assert spec is not None
    assert code_origin(str(spec.origin)) == "torch"
