"""The child process that trains a trial, and its parent side."""

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base import env
from whet.base.errors import DivergedError, InsufficientMemoryError, WhetError
from whet.base.process import TerminatedError
from whet.base.worker import requests

MARK = "whet-trial "
OUT_OF_MEMORY = 75
DIVERGED = 76
"""Exit codes that say why there is no value."""


class TrialChannel:
    """Between a trial and its worker: one message, one answer."""

    def __init__(self, answers: int, asked: Iterator[str]) -> None:
        self._answers = answers
        self._asked = asked

    def say(self, message: dict[str, Any]) -> None:
        os.write(self._answers, (MARK + json.dumps(message) + "\n").encode())

    def may_go_on(self, *, number: int, value: float, is_last: bool) -> bool:
        """Tells the value of evaluation `number`; False when the trial is to end here."""
        self.say({"evaluation": number, "value": value, "is_last": is_last})
        return next(self._asked).strip() != "stop"


def main() -> None:
    """The first line on stdin says what to train; the target gets it together with the line to the worker."""
    # What torch or a recipe prints goes to stderr: stdout belongs to the messages.
    answers = os.dup(1)
    os.dup2(2, 1)
    asked = requests()
    opening = json.loads(next(asked))
    line = TrialChannel(answers, asked)
    module, _, name = opening["target"].partition(":")
    code = 1
    try:
        code = getattr(importlib.import_module(module), name)(opening["arguments"], line)
    except BaseException as error:
        code = _told(error, line)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Without the usual way out: a thread waits for answers.
    os._exit(code)


def _told(error: BaseException, line: TrialChannel) -> int:
    from whet.device.errors import is_out_of_memory

    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, TerminatedError):
        return error.exit_code
    traceback.print_exc()
    words = f"{error.what}: {error.got}" if isinstance(error, WhetError) else f"{type(error).__name__}: {error}"
    line.say({"failure": " ".join(words.split())[:500]})
    if isinstance(error, DivergedError):
        return DIVERGED
    if isinstance(error, InsufficientMemoryError):
        return OUT_OF_MEMORY
    chain: BaseException | None = error
    while chain is not None:
        if is_out_of_memory(chain):
            return OUT_OF_MEMORY
        chain = chain.__cause__ or chain.__context__
    return 1


def request_stop() -> None:
    """Ends a training as Ctrl-C would: the step is done, everything is saved."""
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()


_LISTEN_SECONDS = 0.5
_SAVE_SECONDS = 60.0
"""What a process that was asked to stop may take to save."""
EvaluationCallback = Callable[[int, float, bool], bool]
"""Is told the number of an evaluation, its value and whether it is the last; says whether the trial may go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialExit:
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


def run_trial_process(
    target: str,
    arguments: dict[str, Any],
    *,
    log: Path,
    judge: EvaluationCallback,
    should_stop: Callable[[], bool],
    beat: Callable[[], None],
) -> TrialExit:
    """Runs one process to its end. What it prints goes to `log`; when we die, it does too."""
    with log.open("ab") as printed:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "whet.hpo.trial_process"],
            env=env.child_environment(),
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
    return TrialExit(
        code=code, failure=conversation.failure, was_pruned=conversation.was_pruned, was_stopped=asked_at is not None
    )


class _Conversation:
    def __init__(self, child: "subprocess.Popen[bytes]", judge: EvaluationCallback) -> None:
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
