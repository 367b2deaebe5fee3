"""The origin of a source file, by its path."""

import json
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

import whet
from whet.base.origin import calling_script, code_origin

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


def outer() -> str | None:
    return inner(3)


def inner(number: int) -> str | None:
    return (lambda: calling_script())() if number else None


def test_the_calling_script_is_the_innermost_function_without_required_arguments() -> None:
    assert outer() == f"{__file__}:outer", "neither inner(), which needs an argument, nor a lambda"


def test_code_outside_of_a_function_is_a_file_and_interactive_code_is_nothing(tmp_path: Path) -> None:
    code = "from whet.base.origin import calling_script\nprint(calling_script())"
    (tmp_path / "flat.py").write_text(code)
    for words, expected in (((str(tmp_path / "flat.py"),), str(tmp_path / "flat.py")), (("-c", code), "None")):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
