"""Train a trial in a child process.

The child sends the result of each evaluation to its parent, and waits for the decision whether to continue.
"""

import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base.errors import DivergedError, InsufficientMemoryError, WhetError
from whet.base.process import TerminatedError, signal_name
from whet.base.worker import JsonWorker, WorkerChannel, WorkerExitError, WorkerTimeoutError, load_object

# Exit codes of trials that end without a value.
OUT_OF_MEMORY = 75
DIVERGED = 76

_POLL_SECONDS = 0.5
# Seconds that a process may take to save a checkpoint after a stop request.
_SAVE_SECONDS = 60.0
# Called with the number of an evaluation, its value, and whether it is the last one. Returns whether the trial may
# continue.
EvaluationCallback = Callable[[int, float, bool], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialExit:
    """The exit status of a trial process."""

    code: int
    """The exit code, or the negative signal number if a signal killed the process."""
    failure: str | None = None
    was_pruned: bool = False
    was_stopped: bool = False

    @property
    def killer(self) -> str:
        """The name of the signal that killed the process."""
        return signal_name(-self.code)


def run_trial_process(
    target: str,
    arguments: dict[str, Any],
    *,
    log: Path,
    on_evaluation: EvaluationCallback,
    should_stop: Callable[[], bool],
    heartbeat: Callable[[], None],
) -> TrialExit:
    """Start a trial process and wait until it exits. Its output goes to `log`. It is killed if this process dies."""
    failure: str | None = None
    was_pruned = False
    stopped_at: float | None = None
    with JsonWorker("whet.hpo.trial_process:train", {"target": target, "arguments": arguments}, log=log) as worker:
        while True:
            heartbeat()
            if stopped_at is None and should_stop():
                stopped_at = time.monotonic()
                worker.signal(signal.SIGTERM)
            if stopped_at is not None and time.monotonic() - stopped_at > _SAVE_SECONDS:
                worker.kill()
            try:
                message = worker.receive(_POLL_SECONDS)
            except WorkerTimeoutError:
                continue
            except WorkerExitError:
                break
            failure = message.get("failure", failure)
            if "evaluation" in message:
                may_continue = on_evaluation(message["evaluation"], message["value"], message["is_last"])
                was_pruned = was_pruned or not may_continue
                worker.send({"may_continue": may_continue})
        code = worker.wait()
        assert code is not None
    return TrialExit(code=code, failure=failure, was_pruned=was_pruned, was_stopped=stopped_at is not None)


# --- in the child process --------------------------------------------------------------------------------------------


def train(channel: WorkerChannel, arguments: dict[str, Any]) -> int:
    """Call the target ("module:function") with its arguments and an EvaluationCallback. Return the exit code."""

    def may_continue(number: int, value: float, is_last: bool) -> bool:
        channel.send({"evaluation": number, "value": value, "is_last": is_last})
        return bool(channel.receive()["may_continue"])

    try:
        return int(load_object(arguments["target"])(arguments["arguments"], may_continue))
    except BaseException as error:
        return _report(error, channel)


def _report(error: BaseException, channel: WorkerChannel) -> int:
    """Send a description of the failure to the parent, unless training was stopped. Return the exit code."""
    from whet.device.errors import is_out_of_memory

    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, TerminatedError):
        return error.exit_code
    traceback.print_exc()
    failure = f"{error.what}: {error.got}" if isinstance(error, WhetError) else f"{type(error).__name__}: {error}"
    channel.send({"failure": " ".join(failure.split())[:500]})
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
    """Stop training in this process as Ctrl-C does: finish the current step, save and exit."""
    signal.raise_signal(signal.SIGTERM)
