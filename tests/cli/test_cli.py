"""The command line: exit codes, three-line errors, output streams."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu_time import spent_by_children
from homes import new_home
from paths import Run
from whet.cli import main, output

THE_FUTURE = {"format_version": 99}

# Forks for each line of input, so that whet itself is imported once. Answers with the exit code and the CPU seconds.
FORKING = """
import contextlib, io, json, os, sys
from whet.cli import main

with contextlib.redirect_stdout(io.StringIO()):
    assert main.run(["plan", "text", "--machine", "m2-air-8gb"]) == 0, "imports what most commands need"
assert "torch" not in sys.modules
for line in sys.stdin:
    asked = json.loads(line)
    if (pid := os.fork()) == 0:
        os.environ["WHET_HOME"] = asked["home"]
        os.chdir(asked["cwd"])
        for descriptor, name in enumerate(("out", "err"), start=1):
            os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT), descriptor)
        code = 255
        try:
            code = main.run(asked["words"])
            sys.stdout.flush()
            assert "torch" not in sys.modules, "refused before torch was imported"
        except BaseException as error:
            code = 255
            print(f"Traceback: {error!r}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status, used = os.wait4(pid, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), flush=True)
"""


@pytest.fixture(scope="module")
def forking() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported whet, and not torch."""
    command = [sys.executable, "-c", FORKING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def three_lines(stderr: str) -> bool:
    lines = stderr.rstrip("\n").split("\n")
    return (
        len(lines) == 3
        and lines[0].startswith("error: ")
        and lines[1].startswith("  got: ")
        and lines[2].startswith("  try: ")
    )


def run_from_the_future(folder: Path) -> Path:
    from whet.run.folder import create_run, installed_versions

    run = create_run(
        folder / "old", recipe="text", config={}, plan={}, machine={}, versions=installed_versions(), command=[]
    )
    header = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**header, **THE_FUTURE}))
    return run.path


@pytest.mark.parametrize("folder", ["/usr/lib/python3/dist-packages", "/env/lib/python3.11/site-packages"])
def test_an_error_of_a_library_is_not_the_users(folder: str) -> None:
    names: dict[str, Any] = {}
    exec(compile("def fail():\n    raise KeyError('x')", f"{folder}/library/model.py", "exec"), names)
    with pytest.raises(KeyError) as raised:
        names["fail"]()
    called_by_a_user = main._as_failure(raised.value)
    assert called_by_a_user.what == "your code raised an exception"
    assert "; raised at model.py:2 in fail()" in str(called_by_a_user)
    assert raised.value.__traceback__ is not None
    failure = main._as_failure(raised.value.with_traceback(raised.value.__traceback__.tb_next))
    assert (failure.what, failure.got) == ("a library raised an exception", "KeyError: 'x'")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("plan", "text", "epohcs=3"), 2),
        (("plan", "text", "epochs=three"), 2),
        (("plan", "text", "epochs"), 2),
        (("plan", "text", "arch.heads=5"), 2),
        (("plan", "txt"), 2),
        (("plan", "text", "data=absent.csv"), 2),
        (("plan", "absent.py"), 2),
        (("plan", "no.such.module:recipe"), 1),
        (("plan", "text", "--config", "absent.toml"), 2),
        (("plan", "text", "--config", "broken.toml"), 2),
        (("plan", "text", "--config", "broken.yaml"), 2),
        (("plan", "text", "--machine", "m2-air"), 2),
        (("plan", "text", "--machine", "broken.toml"), 2),
        (("plan", "text", "--machine", "h200", "--why", "micro_bach"), 2),
        (("plan", "text", "--machine", "m2-air-8gb", "--device", "cuda"), 2),
        (("plan", "text", "--machine", "m2-air-8gb", "--device", "gpu"), 2),
        (("plan", "text", "--machine", "m2-air-8gb", "--nproc", "2"), 2),
        (("plan", "text", "--nproc", "2", "--device", "mps"), 2),
        (("plan", "empty"), 2),
        (("plan", "broken.py"), 1),
        (("plan", "nothing.py"), 2),
        (("plan",), 2),
        (("plan", "text", "--foo"), 2),
        (("plna",), 2),
        (("probe", "--machine", "m9"), 2),
        (("report", "empty"), 2),
        (("report", "absent"), 2),
        (("report", "broken.toml"), 2),
        (("runs", "broken.toml"), 2),
        (("init", "broken.toml"), 2),
        (("init", "broken.py"), 2),
        (("train", "text", "epohcs=3"), 2),
        (("train", "text", "data=absent.csv"), 2),
        (("train", "text", "--fresh"), 2),
        (("train", "text", "--run", "/proc/no/such"), 1),
        (("train", "text", "--run", "broken.toml/run"), 1),
        (("predict", "absent", "a text"), 2),
        (("predict", "empty", "a text"), 2),
        (("doctor", "--device", "gpu"), 2),
        (("doctor", "--device", "cpu:1"), 2),
        (("doctor", "--budget", "0"), 2),
        (("doctor", "--json", "absent/doctor.json"), 2),
        (("doctor", "--json", "empty"), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_bad_input_is_a_three_line_error(
    forking: subprocess.Popen[str], tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    folder = tmp_path / "cwd"
    (folder / "empty").mkdir(parents=True)
    (folder / "broken.toml").write_text("lr = ")
    (folder / "broken.yaml").write_text("lr: [")
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "nothing.py").write_text("")
    home = new_home(folder / "whet-home")
    before = sorted(folder.rglob("*"))
    out, err = tmp_path / "out", tmp_path / "err"
    asked = {"words": words, "cwd": str(folder), "home": str(home), "out": str(out), "err": str(err)}
    assert forking.stdin is not None
    assert forking.stdout is not None
    print(json.dumps(asked), file=forking.stdin, flush=True)
    actual, seconds = json.loads(forking.stdout.readline())
    errors = err.read_text()
    assert actual == code, errors
    assert out.read_text() == ""
    assert three_lines(errors), errors
    assert "Traceback" not in errors
    assert sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts) == before, "nothing is written"
    assert seconds < 1.2, "nor did a child import torch"


@pytest.mark.parametrize("words", [("plan", "text", "epohcs=3"), ("train", "text", "--run", "/proc/no/such")])
def test_an_error_takes_no_longer_than_a_start_without_torch(whet: Run, words: tuple[str, ...]) -> None:
    before = spent_by_children()
    done = whet(*words)
    assert three_lines(done.stderr), done.stderr
    assert done.returncode == (1 if "--run" in words else 2)
    assert spent_by_children() - before < 1.2, "refused before torch was imported"


def test_run_of_a_newer_version_is_an_error(whet: Run, tmp_path: Path) -> None:
    path = run_from_the_future(tmp_path)
    for words in (("report", str(path)), ("plan", str(path))):
        done = whet(*words)
        assert done.returncode == 1, done.stderr
        assert three_lines(done.stderr), done.stderr
        assert "newer whet" in done.stderr
    listed = whet("runs", str(tmp_path))
    assert listed.returncode == 0
    assert "unreadable" in listed.stdout


def test_missing_argument_is_named_as_in_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    for words, what in ((["data", "text"], "FILE|DIR is missing"), (["export", "run"], "--to FORMAT is missing")):
        assert main.run(words) == 2
        assert what in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["tune", "hex"], "whet search hex "),
        (["sweep", "text"], "whet bench text --sweep global_batch_size=16,32,64"),
        (["monitor"], "whet watch"),
        (["benchmark", "train.py"], "whet bench train.py"),
        (["plann", "text"], "whet plan"),
    ],
)
def test_verbs_of_other_tools_lead_to_the_right_command(
    words: list[str], hint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.run(words) == 2
    errors = capfd.readouterr().err
    assert three_lines(errors)
    assert f"try: {hint}" in errors


def test_a_setting_before_the_recipe_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "--config-name", "cfg_chat", "data_paths=[data/mine]"]) == 2
    assert "try: chat data_paths=[data/mine]" in capfd.readouterr().err


def test_invalid_value_is_reported_with_its_option(capfd: pytest.CaptureFixture[str]) -> None:
    for words, what in (
        (["generate", "run", "--max-new-tokens", "0"], "error: --max-new-tokens: input should be greater"),
        (["generate", "run", "--top-k", "1e9"], "error: --top-k: input should be a valid integer"),
        (["generate", "run", "--foo"], "error: no such option"),
        (["search", "text", "--trials", "0"], "error: --trials: input should be greater than or equal to 1"),
    ):
        assert main.run(words) == 2
        assert what in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "text", "--epochs", "3"], "epochs=3"),
        (["train", "text", "--epochs=3", "--device", "cpu"], "epochs=3"),
        (["train", "text", "--arch.layers", "2"], "arch.layers=2"),
        (["bench", "text", "--batch-size", "64"], "global_batch_size=64"),
        (["search", "text", "--lr", "1e-5..1e-3:log"], "lr=1e-5..1e-3:log"),
        (["plan", "mine.py", "--seed", "-1"], "seed=-1"),
        (["train", "text", "--epochs"], "epochs=..."),
    ],
)
def test_setting_with_dashes_is_explained(words: list[str], hint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(words) == 2
    errors = capfd.readouterr().err
    assert three_lines(errors)
    assert f"  try: {hint} (settings have no dashes)\n" in errors


def test_other_unknown_options_get_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["train", "text", "--foo", "3"], ["watch", "--epochs", "3"]):
        assert main.run(words) == 2
        assert f"try: whet {words[0]} --help" in capfd.readouterr().err


def test_command_restores_the_output_switches(capfd: pytest.CaptureFixture[str]) -> None:
    output.rank = 1
    try:
        assert main.run(["plan", "text", "--quiet", "--debug", "--machine", "m2-air-8gb"]) == 0
        assert "micro_batch" in capfd.readouterr().out, "the rank is not inherited"
        assert (output.quiet, output.debug, output.rank) == (False, False, 1)
    finally:
        output.rank = 0


def test_debug_shows_the_traceback(whet: Run) -> None:
    done = whet("plan", "text", "epohcs=3", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_help_shows_commands_and_examples(whet: Run, capfd: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("--help",)):
        done = whet(*words)
        assert done.returncode == 0
        for verb in ("probe", "plan", "runs", "report", "doctor", "prove"):
            assert verb in done.stdout
    for verb in ("probe", "plan", "runs", "report", "doctor", "prove"):
        assert main.run([verb, "--help"]) == 0
        assert f"whet {verb}" in capfd.readouterr().out.split("\n", 1)[1], "help shows an example"


def test_version(whet: Run) -> None:
    from whet import __version__

    assert whet("--version").stdout == f"whet {__version__}\n"


def test_console_script_equals_the_module(whet: Run) -> None:
    script = Path(sys.executable).parent / "whet"
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert done.stdout == whet("--version").stdout


def test_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m whet plan text --machine h200 --json | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


def test_output_is_plain_without_a_terminal(whet: Run) -> None:
    done = whet("plan", "text", "--machine", "m2-air-8gb", LANG="C", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout.isascii()


def test_stdout_has_only_json_and_plan_reads_a_probe(whet: Run, tmp_path: Path) -> None:
    """Of a plan for this machine, too: test_import_time.py."""
    probe = whet("probe", "--json")
    (tmp_path / "mine.json").write_text(probe.stdout)
    plan = whet("plan", "text", "--machine", "mine.json", "--json")
    for done in (probe, plan, whet("runs", "--json")):
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)
    done = whet("plan", "text", "--machine", "mine.json")
    assert done.returncode == 0, done.stderr
    assert "micro_batch" in done.stdout


@pytest.mark.torch
def test_plan_reads_a_user_recipe(warm_whet: Run, tmp_path: Path) -> None:
    assert warm_whet("init", "mine.py").returncode == 0
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\n\nother = recipe\n")
    for what in ("mine.py", "mine.py:other", "mine:other"):
        done = warm_whet("plan", what, "global_batch_size=6", "--machine", "h200", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["workload"]["global_batch_size"] == 6


def test_quiet_omits_notes(whet: Run) -> None:
    assert "no runs" in whet("runs").stderr
    assert whet("runs", "--quiet").stderr == ""


@pytest.mark.skipif(os.name == "nt", reason="whet runs on macOS and Linux")
def test_config_name_is_an_alias_of_config(whet: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("micro_batch = 3\n")
    done = whet("plan", "text", "--config-name", "run.toml", "--machine", "h200", "--json")
    assert json.loads(done.stdout)["settings"]["micro_batch"]["source"] == "you"
