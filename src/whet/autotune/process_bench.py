"""A step bench that runs in a child process, so that a crash, a hang or an OOM ends one trial and not the search."""

import contextlib
import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from whet.autotune.batch_size import BatchStepBench
from whet.autotune.candidates import predicted_bytes
from whet.autotune.step_bench import PreparedStep, ProbeFailedError, SettingsAgreement
from whet.base.errors import UsageError, WhetError
from whet.base.units import format_bytes
from whet.base.worker import JsonWorker, requests
from whet.plan.plan import Plan, read_plan
from whet.plan.setting import Scalar

MARK = "whet-measure "


def main() -> None:
    """The first line on stdin names what to open; each further one is a question, and gets one answer."""
    # Whatever torch or a driver prints goes to stderr: stdout belongs to the answers.
    answers = os.dup(1)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        os.write(answers, (MARK + json.dumps(answer) + "\n").encode())

    asked = requests()
    opening = json.loads(next(asked))
    with contextlib.ExitStack() as closing:
        try:
            rig: BatchStepBench = closing.enter_context(_open(opening["target"], opening["arguments"]))
        except WhetError as error:
            say({"refused": [error.what, error.got, error.try_], "is_usage": isinstance(error, UsageError)})
            # Without the usual way out: a thread waits for questions, and a driver that was upset may hang there.
            os._exit(0)
        say({"plan": rig.plan.as_json(), "about": dict(rig.about)})
        prepared: dict[int, PreparedStep] = {}
        for line in asked:
            say(_answer(rig, prepared, json.loads(line)))


def _open(target: str, arguments: dict[str, Any]) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(arguments)


def _answer(rig: BatchStepBench, prepared: dict[int, PreparedStep], question: dict[str, Any]) -> dict[str, Any]:
    settings, number = question.get("settings", {}), question.get("number", -1)
    try:
        match question["do"]:
            case "batch":
                rig.use_batch(question["size"])
                return {"plan": rig.plan.as_json(), "about": dict(rig.about)}
            case "agree":
                return {"agreement": asdict(rig.agreement(settings, seconds=question["limit"]))}
            case "prepare":
                ready = prepared[number] = rig.prepare(settings, seconds=question["limit"])
                return {
                    "seconds": ready.preparation_seconds,
                    "step": ready.step_seconds,
                    "bytes": ready.peak_bytes(),
                }
            case "step":
                seconds = prepared[number].step(question["index"])
                return {"seconds": seconds, "bytes": prepared[number].peak_bytes()}
            case _:
                prepared.pop(number).close()
                return {}
    except ProbeFailedError as error:
        return {"failed": error.reason, "kind": error.kind}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500], "kind": "error"}


if __name__ == "__main__":
    main()


START_SECONDS = 120.0
"""For loading torch, reading the data and making the model, at the worst."""
_STEP_SECONDS = 30.0
"""No step is waited for longer, unless the first ones were long."""


class ProcessStepBench:
    """Opens `target` (a "module:function" that is given `arguments` and returns a rig) in a child."""

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        most_bytes: int | None = None,
    ) -> None:
        self._target, self._arguments = target, dict(arguments)
        self._environment = environment
        self._most_bytes = most_bytes
        self._process: JsonWorker | None = None
        self.life = 0
        """How many processes have ended: what was prepared in one is gone with it."""
        self.about: dict[str, Any] = {}
        self._numbers = 0
        self._start_seconds = 0.0
        self.ends_at: float | None = None
        """On the clock: nothing is waited for any longer."""
        self.tick: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        start = self.clock()
        self.plan: Plan = self._start(START_SECONDS)
        self._start_seconds = self.clock() - start
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    @property
    def recovery_seconds(self) -> float:
        """A new process, which loads torch and the data again."""
        return self._start_seconds

    def clock(self) -> float:
        return time.perf_counter()

    def predicted_bytes(self, settings: Mapping[str, Scalar]) -> int | None:
        return predicted_bytes(self.plan, settings)

    def agreement(self, settings: Mapping[str, Scalar], *, seconds: float) -> SettingsAgreement:
        return SettingsAgreement(**self.ask(seconds, do="agree", settings=dict(settings), limit=seconds)["agreement"])

    def prepare(self, settings: Mapping[str, Scalar], *, seconds: float) -> "ProcessPreparedStep":
        self._numbers += 1
        prepared = ProcessPreparedStep(self, dict(settings), number=self._numbers)
        prepared.begin(seconds)
        return prepared

    def use_batch(self, size: int) -> None:
        """From here on a step has so many samples, also in a process that is started again."""
        self._arguments["global_batch_size"] = size
        if self._process is None:
            self.plan = self._start(START_SECONDS)
            return
        answer = self.ask(START_SECONDS, do="batch", size=size)
        self.plan = read_plan(answer["plan"], where="the plan of a measuring process")
        self.about = answer["about"]

    def ask(self, seconds: float, **question: Any) -> dict[str, Any]:
        """An answer; a process that gives none is ended, and its end told as the failure of this probe."""
        if self._process is None:
            self._start(START_SECONDS)
        assert self._process is not None
        seconds = self._within(seconds)
        answer = self._asked(seconds, **question)
        if isinstance(answer, dict):
            if "failed" in answer:
                raise ProbeFailedError(answer["failed"], kind=answer["kind"])
            return answer
        taken, words = self._process.took_too_much, self._process.last_words() if answer == "dead" else ""
        self._end()
        if taken is not None:
            most = format_bytes(self._most_bytes or 0)
            raise ProbeFailedError(f"it took {format_bytes(taken)} of {most} and was ended", kind="oom")
        if answer == "late":
            raise ProbeFailedError(f"no answer after {seconds:.1f} s; it was ended", kind="timeout")
        raise ProbeFailedError(f"its process died: {words}", kind="crash")

    def _start(self, seconds: float) -> Plan:
        self._process = JsonWorker(
            "whet.autotune.process_bench", mark=MARK, environment=self._environment, most_bytes=self._most_bytes
        )
        seconds = self._within(seconds)
        answer = self._asked(seconds, target=self._target, arguments=self._arguments)
        if isinstance(answer, dict) and "plan" in answer:
            self.about = answer["about"]
            return read_plan(answer["plan"], where="the plan of a measuring process")
        words = self._process.last_words() if answer == "dead" else f"no answer after {seconds:.0f} s"
        self._end()
        if isinstance(answer, dict) and "refused" in answer:
            what, got, try_ = answer["refused"]
            raise (UsageError if answer["is_usage"] else WhetError)(what, got=got, try_=try_)
        raise ProbeFailedError(f"the measuring process could not start: {words}", kind="crash")

    def _asked(self, seconds: float, **question: Any) -> dict[str, Any] | str:
        assert self._process is not None
        try:
            self._process.tick = self.tick
            return self._process.ask(seconds, **question)
        except BaseException:
            # Ctrl-C: nobody waits for this answer any longer, and the next one would be taken for it.
            self._end()
            raise

    def _within(self, seconds: float) -> float:
        return seconds if self.ends_at is None else min(seconds, max(0.0, self.ends_at - self.clock()))

    def _end(self) -> None:
        if self._process is not None:
            self._process.__exit__(None, None, None)
            self._process = None
            self.life += 1


class ProcessPreparedStep:
    """Settings that are ready in the child; after its death they are made ready again when they are next needed."""

    preparation_seconds = 0.0
    step_seconds = 0.0

    def __init__(self, rig: ProcessStepBench, settings: Mapping[str, Scalar], *, number: int) -> None:
        self._rig = rig
        self._settings = settings
        self._number = number
        self._life = rig.life
        self._slowest = 0.0
        self._peak_bytes: int | None = None

    def begin(self, seconds: float) -> None:
        """Prepares, or raises ProbeFailedError when the time is up."""
        answer = self._rig.ask(seconds, do="prepare", number=self._number, settings=self._settings, limit=seconds)
        self.preparation_seconds, self.step_seconds = float(answer["seconds"]), float(answer["step"])
        self._peak_bytes = answer["bytes"]
        self._life = self._rig.life

    def step(self, index: int) -> float:
        if self._life != self._rig.life:
            self.begin(max(_STEP_SECONDS, 3 * self.preparation_seconds))
        limit = max(_STEP_SECONDS, 10 * self._slowest)
        answer = self._rig.ask(limit, do="step", number=self._number, index=index)
        self._slowest = max(self._slowest, float(answer["seconds"]))
        self._peak_bytes = answer["bytes"]
        return float(answer["seconds"])

    def peak_bytes(self) -> int | None:
        """As of the last answer: it stays known when the process is gone."""
        return self._peak_bytes

    def close(self) -> None:
        if self._life == self._rig.life:
            # A process that ends over it has given everything back too.
            with contextlib.suppress(ProbeFailedError):
                self._rig.ask(_STEP_SECONDS, do="close", number=self._number)
