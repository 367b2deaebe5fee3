"""Notifications: any text is passed literally, and a missing program is reported once."""

import json
import os
import pty
import sys
from pathlib import Path

import pytest

from whet.cli.train_output import restart_notifier
from whet.machine.desktop import desktop_command, notify
from whet.training.callbacks.progress import DesktopNotifier
from whet.training.supervisor import KilledError

HOSTILE = "--help $(touch pwned) `touch pwned` '\" <b>x</b>\x1b]0;gone\x07\n-e \\"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that record their arguments, in place of notify-send and osascript."""
    for name in ("notify-send", "osascript"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"open({str(tmp_path / 'logged')!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logged"


def logged(file: Path) -> list[list[str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_hostile_text_reaches_a_stand_in_of_notify_send_as_text(stand_in: Path, tmp_path: Path) -> None:
    assert notify(HOSTILE, HOSTILE) is None
    ((name, end, title, text),) = logged(stand_in)
    assert (name, end) == ("--app-name=whet", "--")
    assert title == "help $(touch pwned) `touch pwned` '\" <b>x</b> ]0;gone -e \\"
    assert text == "help $(touch pwned) `touch pwned` '\" &lt;b&gt;x&lt;/b&gt; ]0;gone -e \\"
    assert not (tmp_path / "pwned").exists()


def test_on_a_simulated_mac_the_text_is_an_argument_of_the_script(stand_in: Path) -> None:
    command, problem = desktop_command("whet: text done", 'a " & (do shell script "touch pwned")', platform="darwin")
    assert problem is None
    assert command is not None
    assert [word for word in command[1:] if word != "-e"] == [
        "on run words",
        "display notification (item 2 of words) with title (item 1 of words)",
        "end run",
        "whet: text done",
        'a " & (do shell script "touch pwned")',
    ]


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("xterm-256color", b"\x1b]9;a;b: help x ]0;y\x1b\\\x07"),
        ("rxvt-unicode", b"\x1b]777;notify;a,b;help x ]0;y\x1b\\\x07"),
        ("linux", b"\x07"),
    ],
)
def test_without_a_desktop_the_terminal_notifies(kind: str, seen: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", kind)
    master, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        assert notify("a;b", "--help x\x1b]0;y", terminal=stream) is None
        assert os.read(master, 1000) == seen
    os.close(master)


def test_a_missing_or_failing_program_is_reported(stand_in: Path) -> None:
    assert notify("a", "b", run=lambda command, any_exit=False: None) == f"{stand_in.parent / 'bin/notify-send'} failed"
    (stand_in.parent / "bin" / "notify-send").unlink()
    assert notify("a", "b") == "no notify-send here"
    with (stand_in.parent / "file").open("w") as file:
        assert notify("a", "b", terminal=file) == "no notify-send here"


def test_a_run_reports_its_end_and_each_problem_once() -> None:
    sent, shown, reported = list[tuple[str, str]](), list[str](), list[str]()

    def send(title: str, text: str) -> str | None:
        sent.append((title, text))
        return "no desktop"

    on_event = DesktopNotifier(
        "text", on_event=lambda kind, fields: shown.append(kind), print_line=reported.append, send=send
    )
    on_event("start", {"step": 0})
    on_event("step", {"step": 1, "loss": 0.25})
    on_event("eval", {"step": 1, "accuracy": 0.5, "confusion": {"labels": []}})
    on_event("pressure", {"step": 1, "level": "warn", "reason": "memory is short"})
    assert sent == []
    for _ in range(3):
        on_event("warning", {"step": 2, "reason": "the disk is full", "retry": "soon"})
        on_event("pressure", {"step": 2, "level": "critical", "reason": "memory is very short"})
    on_event("end", {"step": 9, "state": "done"})
    assert sent == [
        ("whet: text needs attention", "the disk is full; step 2"),
        ("whet: text needs attention", "memory is very short; step 2"),
        ("whet: text done", "step 9, loss 0.25, accuracy 0.5"),
    ]
    assert len(shown) == 11
    assert reported == ["text: no notification: no desktop"]
    on_event("end", {"step": 9, "state": "failed", "reason": "the loss is not a number"})
    assert sent[-1] == ("whet: text failed", "the loss is not a number; step 9")


def test_a_killed_training_is_reported_by_its_parent(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = KilledError("the training was killed", got="SIGKILL", try_="again", code=-9)

    def live(words: str, *, is_wanted: bool) -> None:
        with restart_notifier("text", is_enabled=is_wanted) as notify:
            notify(words)
            raise killed

    for words, is_wanted in (("the training was killed by SIGKILL; it goes on", True), ("not told", False)):
        with pytest.raises(KilledError):
            live(words, is_wanted=is_wanted)
    assert [words[2:] for words in logged(stand_in)] == [
        ["whet: text needs attention", "the training was killed by SIGKILL; it goes on"],
        ["whet: text failed", "the training was killed: SIGKILL"],
    ]
    assert capsys.readouterr().err.splitlines() == ["the training was killed by SIGKILL; it goes on", "not told"]
