"""A trial's process as its worker sees it: started, listened to, asked to stop, and waited for."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base import env
from whet.trials.child import MARK

_LISTEN_SECONDS = 0.5
_SAVE_SECONDS = 60.0
"""What a process that was asked to stop may take to save."""
Judge = Callable[[int, float, bool], bool]
"""Is told the number of an evaluation, its value and whether it is the last; says whether the trial may go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """How it ended."""

    code: int
    """Its exit code; minus the signal that killed it."""
    failure: str | None = None
    was_pruned: bool = False
    was_stopped: bool = False

    @property
    def killer(self) -> str:
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


def live(
    target: str,
    arguments: dict[str, Any],
    *,
    log: Path,
    judge: Judge,
    should_stop: Callable[[], bool],
    beat: Callable[[], None],
) -> Life:
    """Runs one process to its end. What it prints goes to `log`; when we die, it does too."""
    with log.open("ab") as printed:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "whet.trials.child"],
            env=env.for_child(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            # A group of its own: Ctrl-C reaches us, and we tell it; its data workers end with it.
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        conversation = _Conversation(child, judge)
        try:
            conversation.say(json.dumps({"target": target, "arguments": arguments}))
            asked_at: float | None = None
            while conversation.listen(_LISTEN_SECONDS):
                beat()
                if asked_at is None and should_stop():
                    asked_at = time.monotonic()
                    child.send_signal(signal.SIGTERM)
                if asked_at is not None and time.monotonic() - asked_at > _SAVE_SECONDS:
                    child.kill()
            code = child.wait()
        finally:
            _end(child)
    return Life(
        code=code, failure=conversation.failure, was_pruned=conversation.was_pruned, was_stopped=asked_at is not None
    )


class _Conversation:
    def __init__(self, child: "subprocess.Popen[bytes]", judge: Judge) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._in, self._out = child.stdin, child.stdout.fileno()
        self._judge = judge
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self.failure: str | None = None
        self.was_pruned = False

    def say(self, line: str) -> None:
        try:
            self._in.write(f"{line}\n".encode())
            self._in.flush()
        except BrokenPipeError:
            # It died; its end says how.
            return

    def listen(self, seconds: float) -> bool:
        """Hears and answers what was said meanwhile; False when nothing more will come."""
        if not self._selector.select(seconds):
            return True
        data = os.read(self._out, 65_536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(MARK.encode()):
                self._hear(json.loads(line[len(MARK) :]))
        if not data:
            self._selector.close()
        return bool(data)

    def _hear(self, message: dict[str, Any]) -> None:
        self.failure = message.get("failure", self.failure)
        if "evaluation" in message:
            may_go_on = self._judge(message["evaluation"], message["value"], message["is_last"])
            self.was_pruned = self.was_pruned or not may_go_on
            self.say("go on" if may_go_on else "stop")


def _end(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is None:
        child.kill()
        child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue
