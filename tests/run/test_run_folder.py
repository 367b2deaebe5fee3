"""A run folder appears completely or not at all, and wrong paths get a helpful error."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.base.errors import UsageError, WhetError
from whet.run import durable, strict_json
from whet.run.folder import (
    create_run,
    installed_versions,
    locate_checkpoint,
    next_run_path,
    open_run,
    resume_command,
    rewrite_parts,
    shell_path,
)

PLAN = {"settings": {"device": {"value": "cpu", "reason": "all there is", "source": "rule", "evidence": {}}}}


@pytest.fixture(autouse=True, scope="module")
def _waits_for_no_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def make(path: Path, **changes: Any):
    parts: dict[str, Any] = {
        "recipe": "text",
        "config": {"epochs": 3},
        "plan": PLAN,
        "machine": {"name": "here"},
        "versions": {"python": "3.11", "torch": None},
        "command": ["whet", "train", "text"],
    }
    return create_run(path, **{**parts, **changes})


def test_a_run_round_trips(tmp_path: Path) -> None:
    before = time.time()
    made = make(tmp_path / "runs" / "text-001", config={"lr": 3e-4, "clip": math.inf})
    run = open_run(str(tmp_path / "runs" / "text-001"))
    assert run == made
    assert run.config == {"lr": 3e-4, "clip": math.inf}
    assert run.plan == PLAN
    assert run.header.command == ("whet", "train", "text")
    assert before <= run.header.created <= time.time()
    assert run.checkpoints.is_dir()
    result = sorted(p.name for p in run.path.iterdir())
    assert result == [
        *("checkpoints", "config.json", "events.jsonl", "machine.json", "plan.json", "run.json", "versions.json")
    ]
    assert [p.name for p in run.path.parent.iterdir()] == ["text-001"]


def test_every_file_is_strict_json(tmp_path: Path) -> None:
    run = make(tmp_path / "r", config={"clip": math.inf, "deep": {"list": [1, math.nan]}})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    for file in run.path.glob("*.json"):
        json.loads(file.read_text(), parse_constant=refuse)


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    assert make(tmp_path / "r").path == tmp_path / "r"


def test_existing_files_are_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "here").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for name, words in {
        "run": "is already a run",
        "file": "a file of that name",
        "full": "thesis.tex",
        "dangling": "dangling symbolic link",
    }.items():
        with pytest.raises(UsageError) as caught:
            make(tmp_path / name)
        assert words in str(caught.value)
        assert caught.value.try_
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="the current folder"):
        make(Path())
    monkeypatch.undo()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "runs" / "r", tmp_path / "new" / ("x" * 300)):
        with pytest.raises(WhetError, match=r"cannot create|too long"):
            make(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 77
"$2" -c "$3" "$1/runs/r"
"""
CREATE = """
import sys
from pathlib import Path
from whet.base.errors import WhetError
from whet.run.folder import create_run
try:
    create_run(Path(sys.argv[1]), recipe="text", config={}, plan={}, machine={}, versions={}, command=[])
except WhetError as error:
    print(error)
"""


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs a private mount")
def test_a_read_only_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    command = ["unshare", "-m", "sh", "-c", READ_ONLY, "sh", str(tmp_path), sys.executable, CREATE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip("may not mount here")
    assert done.stdout.splitlines()[0] == f"cannot create {tmp_path}/runs/r"
    assert "that you may write to" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WhetError, match="cannot create"):
        make(tmp_path / "runs" / "r")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("name", ["run", "config", "plan", "machine", "versions"])
@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, None])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: bytes | None) -> None:
    run = make(tmp_path / "r")
    file = run.path / f"{name}.json"
    file.unlink()
    if damage is None:
        file.mkdir()
    else:
        file.write_bytes(damage)
    with pytest.raises(WhetError) as caught:
        open_run(run.path)
    if not (name == "run" and damage is None):
        assert str(file) in caught.value.what
    assert caught.value.got
    assert caught.value.try_


def test_a_missing_file_and_a_wrong_key_are_named(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    (run.path / "plan.json").unlink()
    with pytest.raises(WhetError, match=r"plan\.json is missing"):
        open_run(run.path)
    header = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**header, "recipee": "x"}))
    with pytest.raises(UsageError, match=r"unknown key in .*run\.json"):
        open_run(run.path)


def test_a_run_of_a_newer_version_asks_for_an_upgrade(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    header = json.loads((run.path / "run.json").read_text())
    # A future header has unknown keys, so the version must be checked first.
    future = {**header, "format_version": 7, "whet": "9.1.0", "colour": "blue"}
    (run.path / "run.json").write_text(json.dumps(future))
    with pytest.raises(WhetError, match="made by a newer whet") as caught:
        open_run(run.path)
    assert "format 7 (whet 9.1.0)" in str(caught.value.got)
    assert "upgrade" in str(caught.value.try_)


def test_a_wrong_path_suggests_a_run(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "text-001")
    hints = {
        "runs/text-01": "runs/text-001",
        "runs/text-001/checkpoints": "runs/text-001",
        "runs": "whet runs",
        "elsewhere": "whet runs",
    }
    for path, hint in hints.items():
        with pytest.raises(UsageError, match="is not a run") as caught:
            open_run(tmp_path / path)
        assert hint in str(caught.value.try_)
        assert caught.value.got in ("no such folder", "no run.json in it")


def test_next_run_path_increments(tmp_path: Path) -> None:
    assert next_run_path(tmp_path / "runs", recipe="text") == tmp_path / "runs" / "text-001"
    for name in ("text-001", "text-041", "text-1", "textual-900", "text-x"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert next_run_path(tmp_path / "runs", recipe="text").name == "text-042"
    (tmp_path / "runs" / "text-1000").mkdir()
    assert next_run_path(tmp_path / "runs", recipe="text").name == "text-1001"
    assert next_run_path(tmp_path, recipe="some/my recipe.py").name == "my-recipe-001"


def test_rewrite_replaces_one_part(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    grown = rewrite_parts(run, config={"epochs": 5})
    assert grown.config == {"epochs": 5}
    assert grown.plan == run.plan
    assert open_run(run.path) == grown
    with pytest.raises(ValueError, match="no such part"):
        rewrite_parts(run, recipe={})


def test_a_crash_at_any_sync_leaves_no_run_or_a_complete_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        real(descriptor)

    monkeypatch.setattr(durable.os, "fsync", fsync)
    outcomes: list[bool] = []
    for when in range(1, 30):
        left[0] = when
        path = tmp_path / str(when) / "r"
        try:
            make(path)
        except KeyboardInterrupt:
            outcomes.append(path.exists())
            if path.exists():
                open_run(path)
            else:
                assert list((tmp_path / str(when)).glob("**/*")) == []
    assert len(outcomes) > 8
    assert False in outcomes
    assert True in outcomes


def test_versions_come_without_importing_torch() -> None:
    code = (
        "import sys; from whet.run.folder import installed_versions; "
        "print(installed_versions()['torch'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.split()[1] == "False"
    result = installed_versions()
    assert result["pydantic"]
    assert result["python"] == ".".join(map(str, sys.version_info[:3]))


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**60), 2**60)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=6).filter(lambda key: key != strict_json.NONFINITE_KEY), values, max_size=5))
def test_any_value_survives_strict_json(record: dict[str, Any]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = strict_json.encode(record)
    json.loads(text, parse_constant=refuse)
    back = strict_json.decode(text)
    assert repr(back) == repr(record)  # repr: NaN equals itself there.


def test_names_with_slashes_are_distinguished() -> None:
    record = {"a/b": math.inf, "a": {"b": -math.inf, "c~1": [1.0, math.inf]}, "~1": math.inf}
    assert strict_json.decode(strict_json.encode(record)) == record


@pytest.mark.parametrize("marks", ['"x"', "[]", '{"a":"nan"}', '{"b/c/d":"nan"}', '{"l/9":"inf"}', '{"l/x":"inf"}'])
def test_a_wrong_map_of_nonfinite_numbers_does_no_harm(marks: str) -> None:
    assert strict_json.decode(f'{{"a":1,"b":2,"l":[null],"nonfinite":{marks}}}') == {"a": 1, "b": 2, "l": [None]}


def test_other_libraries_numbers_become_ordinary_ones() -> None:
    class Float32:
        def __float__(self) -> float:
            return 0.5

    class Int64:
        def __index__(self) -> int:
            return 7

    class Tensor(Float32):
        def __index__(self) -> int:
            raise TypeError("only whole tensors")

    record = {"a": Float32(), "b": Int64(), "c": Tensor(), "d": (1, 2)}
    assert strict_json.decode(strict_json.encode(record)) == {"a": 0.5, "b": 7, "c": 0.5, "d": [1, 2]}
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        strict_json.encode({"a": Path("x")})


def test_a_checkpoint_is_found_by_its_path(tmp_path: Path) -> None:
    run = make(tmp_path / "run").path
    step = run / "checkpoints" / "step-000000012"
    step.mkdir(parents=True)
    assert locate_checkpoint(run, "best") == (run, "best")
    assert locate_checkpoint(None, str(step)) == locate_checkpoint(run, str(step)) == (run, "12")
    assert locate_checkpoint(None, str(run)) == (run, "best")
    weights = tmp_path / "step_1000"
    weights.write_bytes(b"weights of another program")
    for named, checkpoint, hint in [
        (None, "best", "whet runs"),
        (run, "checkpoints/absent", "path of a checkpoint folder"),
        (None, str(weights), f"whet import {weights} --out DIR"),
        (tmp_path / "other", str(step), "alone"),
    ]:
        with pytest.raises(UsageError) as caught:
            locate_checkpoint(named, checkpoint)
        assert hint in str(caught.value.try_)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mine\nruns/forged  done", "without line breaks and control characters"),
        ("mine\x1b[2J", "without line breaks and control characters"),
        ("x" * 300, "the name of the run folder is too long"),
        ("\u00e4" * 150 + "/inner", "the name of the run folder is too long"),
    ],
)
def test_names_that_would_mislead_are_refused_before_anything_starts(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from whet.cli.main import run

    monkeypatch.chdir(tmp_path)
    assert run(["train", "no-such-recipe", "--run", f"runs/{name}"]) == 2
    error = capsys.readouterr().err
    assert what in error.splitlines()[0]
    assert len(error.strip().splitlines()) == 3
    assert run(["report", f"runs/{name}"]) == 2
    assert "internal error" not in capsys.readouterr().err
    with pytest.raises(UsageError):
        make(tmp_path / name)
    assert not any(tmp_path.iterdir())


def test_line_breaks_in_a_name_forge_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from whet.cli.main import run

    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "mine").path.rename(tmp_path / "runs" / "mine\nother  done")
    assert run(["runs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 2
    assert "mine other  done" in listed[1]


def test_hints_for_a_leading_dash_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = make(Path("-dash it"))
    assert shell_path(made.path) == "'./-dash it'"
    assert resume_command(made).endswith("--run './-dash it'")
