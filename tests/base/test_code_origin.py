"""The origin of a source file, by its path."""

import json
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

import whet
from whet.base.origin import calling_script, code_origin, format_traceback, user_frames

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
        ("/usr/lib/python3/dist-packages/library/model.py", "library"),
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


def test_a_traceback_names_the_users_lines_without_their_folders(tmp_path: Path) -> None:
    code = (
        "import json\n"
        "from whet.base.units import format_seconds\n"
        "def loss():\n"
        "    try:\n"
        "        json.loads('[')\n"
        "    except ValueError as error:\n"
        "        raise KeyError('label') from error\n"
    )
    (tmp_path / "mine.py").write_text(code)
    names: dict[str, object] = {}
    exec(compile(code, str(tmp_path / "mine.py"), "exec"), names)
    with pytest.raises(KeyError) as raised:
        names["loss"]()  # type: ignore[operator]
    text = format_traceback(raised.value)
    assert 'File "mine.py", line 7, in loss' in text
    assert 'File "json/decoder.py"' in text
    assert text.endswith("KeyError: 'label'")
    assert str(tmp_path) not in text
    assert sysconfig.get_path("stdlib") not in text


def test_frames_of_a_debian_package_are_not_the_users() -> None:
    names: dict[str, object] = {}
    exec(compile("def fail():\n    raise KeyError", "/usr/lib/python3/dist-packages/library/model.py", "exec"), names)
    with pytest.raises(KeyError) as raised:
        names["fail"]()  # type: ignore[operator]
    (frame,) = user_frames(raised.value)
    assert (frame.filename, frame.name) == (__file__, "test_frames_of_a_debian_package_are_not_the_users")


def test_a_traceback_has_whets_own_lines_only_if_whet_has_failed() -> None:
    def user(micro: object) -> None:
        raise ValueError(str(micro))

    with pytest.raises(ValueError, match="7") as theirs:
        whet_calls(user)
    assert "whet/base" not in format_traceback(theirs.value)
    assert format_traceback(theirs.value).endswith("ValueError: 7")
    with pytest.raises(TypeError) as ours:
        whet_calls(None)
    assert 'File "whet/base/' in format_traceback(ours.value)


def whet_calls(function: object) -> None:
    """Calls a function from a file of whet."""
    names: dict[str, object] = {"function": function}
    exec(compile("function(7)", str(HERE / "base" / "caller.py"), "exec"), names)
