"""A step bench in a child process: a crash, a hang or an out-of-memory error ends one trial instead of the search.

The memory limit applies to the resident set of the child, which is sampled 50 times per second. GPU memory is not
included.
"""

import contextlib
import importlib
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from whet.autotune.candidates import predicted_bytes
from whet.autotune.step_bench import (
    FailureKind,
    LaunchFacts,
    PreparedStep,
    ProbeFailedError,
    Settings,
    SettingsAgreement,
    StepBench,
)
from whet.base.errors import WhetError
from whet.base.units import format_bytes
from whet.base.worker import (
    JsonWorker,
    WorkerChannel,
    WorkerExitError,
    WorkerTimeoutError,
    error_from_json,
    error_to_json,
    load_object,
)
from whet.plan.plan import Plan, read_plan

# Timeout for importing torch, reading the data and building the model.
START_SECONDS = 120.0
# Minimum timeout of a step. The timeout of slow steps is ten times the slowest one so far.
_STEP_SECONDS = 30.0


class EarlyProcess:
    """A child process that imports modules before its bench is known. Close it if no bench takes it over."""

    def __init__(
        self, imports: Sequence[str], *, environment: Mapping[str, str] | None = None, max_bytes: int | None = None
    ) -> None:
        self._environment, self._paths = environment, [*sys.path]
        self._payload: queue.SimpleQueue[Iterable[bytes]] = queue.SimpleQueue()
        self._worker: JsonWorker | None = JsonWorker(
            "whet.autotune.process_bench:serve_later",
            {"imports": list(imports)},
            environment=environment,
            max_bytes=max_bytes,
            payload=self._chunks(),
        )

    def take(
        self, start: Mapping[str, Any], payload: Iterable[bytes], *, environment: Mapping[str, str] | None
    ) -> JsonWorker | None:
        """Send what a bench process starts with, and return the worker.

        Return None if it was taken or closed before, or if another process would now get other variables or paths.
        """
        if (environment, sys.path) != (self._environment, self._paths):
            self.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            self._payload.put(payload)
            worker.send(start)
        return worker

    def close(self) -> None:
        """End the process, unless a bench has taken it over."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._payload.put(())
            worker.close()

    def _chunks(self) -> Iterator[bytes]:
        yield from self._payload.get()


class ProcessStepBench:
    """Runs a StepBench in a child process and restarts the process after a failure.

    `target` is a "module:function" that takes `arguments` and returns a context manager of a StepBench. With a
    `payload`, it also takes a stream of these bytes, which are sent to every new process. The first process is `early`,
    if there is one.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        max_bytes: int | None = None,
        payload: Iterable[bytes] | None = None,
        early: EarlyProcess | None = None,
    ) -> None:
        self._payload = payload
        self._early = early
        self._target, self._arguments = target, dict(arguments)
        self._environment = environment
        self._max_bytes = max_bytes
        self._worker: JsonWorker | None = None
        self.num_restarts = 0
        """Number of processes that have ended. Steps that were prepared in them are lost."""
        self.about: dict[str, Any] = {}
        self._num_prepared = 0
        self._start_seconds = self._import_seconds = 0.0
        self.ends_at: float | None = None
        self.tick: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        start = self.clock()
        self.plan: Plan = self._start()
        self._start_seconds = self.clock() - start + self._import_seconds
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    @property
    def recovery_seconds(self) -> float:
        """Seconds for starting a new child process after a failure."""
        return self._start_seconds

    def clock(self) -> float:
        return time.perf_counter()

    def predicted_bytes(self, settings: Settings) -> int | None:
        return predicted_bytes(self.plan, settings)

    def agreement(self, settings: Settings, *, seconds: float) -> SettingsAgreement:
        response = self.request(seconds, do="agreement", settings=dict(settings), seconds=seconds)
        return SettingsAgreement(**response["agreement"])

    def prepare(self, settings: Settings, *, seconds: float) -> "ProcessPreparedStep":
        self._num_prepared += 1
        prepared = ProcessPreparedStep(self, dict(settings), number=self._num_prepared)
        prepared.prepare(seconds)
        return prepared

    def use_batch(self, size: int) -> None:
        """Change the global batch size, including that of processes started later."""
        self._arguments["global_batch_size"] = size
        if self._worker is None:
            self.plan = self._start()
            return
        response = self.request(START_SECONDS, do="use batch", size=size)
        self.plan = read_plan(response["plan"], where="the plan of a measuring process")
        self.about = response["about"]

    def request(self, timeout: float, **message: Any) -> dict[str, Any]:
        """Send a request and return the response of the child.

        Raise ProbeFailedError if the child reports a failure, exits, or does not respond in time. A child that does
        not respond is killed.
        """
        if self._worker is None:
            self._start()
        assert self._worker is not None
        timeout = self._within_budget(timeout)
        try:
            response = self._exchange(message, timeout)
        except WorkerTimeoutError:
            self._stop()
            raise ProbeFailedError(f"no response after {timeout:.1f} s; it was killed", kind="timeout") from None
        except WorkerExitError:
            # The worker kills a child that exceeds `max_bytes` and records the size. Otherwise the child crashed.
            taken, how = self._worker.killed_at_bytes, self._worker.describe_exit()
            self._stop()
            if taken is None:
                raise ProbeFailedError(f"its process died: {how}", kind="crash") from None
            most = format_bytes(self._max_bytes or 0)
            raise ProbeFailedError(f"it took {format_bytes(taken)} of {most} and was killed", kind="oom") from None
        if "failed" in response:
            raise ProbeFailedError(response["failed"], kind=response["kind"])
        return response

    def _start(self) -> Plan:
        start = {"target": self._target, "arguments": self._arguments}
        self._worker = (
            None if self._early is None else self._early.take(start, self._payload or (), environment=self._environment)
        )
        is_early = self._worker is not None
        if self._worker is None:
            self._worker = JsonWorker(
                "whet.autotune.process_bench:serve",
                start,
                environment=self._environment,
                max_bytes=self._max_bytes,
                payload=self._payload,
            )
        timeout = self._within_budget(START_SECONDS)
        try:
            response = self._exchange(None, timeout)
            if is_early:
                # Another process would have to import the same modules.
                self._import_seconds = float(response["imported"])
                response = self._exchange(None, timeout)
        except (WorkerTimeoutError, WorkerExitError) as error:
            is_dead = isinstance(error, WorkerExitError)
            reason = self._worker.describe_exit() if is_dead else f"no response after {timeout:.0f} s"
            self._stop()
            # If less than the usual time was left, the budget ended the wait, and the process is not to blame.
            kind: FailureKind = "crash" if is_dead or timeout >= START_SECONDS else "timeout"
            raise ProbeFailedError(f"the measuring process could not start: {reason}", kind=kind) from None
        if "error" in response:
            self._stop()
            raise error_from_json(response["error"])
        self.about = response["about"]
        return read_plan(response["plan"], where="the plan of a measuring process")

    def _exchange(self, message: Mapping[str, Any] | None, timeout: float) -> dict[str, Any]:
        assert self._worker is not None
        self._worker.on_tick = self.tick
        try:
            if message is not None:
                self._worker.send(message)
            return self._worker.receive(timeout)
        except (WorkerTimeoutError, WorkerExitError):
            raise
        except BaseException:
            # After Ctrl-C, the pending response would be mistaken for the response to the next request.
            self._stop()
            raise

    def _within_budget(self, seconds: float) -> float:
        return seconds if self.ends_at is None else min(seconds, max(0.0, self.ends_at - self.clock()))

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            self.num_restarts += 1


class ProcessPreparedStep:
    """Settings that the child process has prepared.

    After a restart of the process, the next step prepares them again.
    """

    preparation_seconds = 0.0
    step_seconds = 0.0

    def __init__(self, bench: ProcessStepBench, settings: Settings, *, number: int) -> None:
        self._bench = bench
        self._settings = settings
        self._number = number
        self._process_number = bench.num_restarts
        self._slowest = 0.0
        self._peak_bytes: int | None = None
        self.launches = LaunchFacts()

    def prepare(self, seconds: float) -> None:
        """Prepare the settings in the child, within `seconds`. Raise ProbeFailedError on failure."""
        response = self._bench.request(
            seconds, do="prepare", number=self._number, settings=self._settings, seconds=seconds
        )
        self.preparation_seconds, self.step_seconds = float(response["seconds"]), float(response["step"])
        self._peak_bytes = response["bytes"]
        self.launches = LaunchFacts(**response["launches"])
        self._process_number = self._bench.num_restarts

    def step(self, index: int) -> float:
        """Run one step in the child and return its duration in seconds. Raise ProbeFailedError on failure."""
        # The process was restarted after the preparation, so prepare the settings again.
        if self._process_number != self._bench.num_restarts:
            self.prepare(max(_STEP_SECONDS, 3 * self.preparation_seconds))
        timeout = max(_STEP_SECONDS, 10 * self._slowest)
        response = self._bench.request(timeout, do="step", number=self._number, index=index)
        self._slowest = max(self._slowest, float(response["seconds"]))
        self._peak_bytes = response["bytes"]
        self.launches = LaunchFacts(**response["launches"])
        return float(response["seconds"])

    def check(self, *, seconds: float) -> None:
        """Check compiled code against the model's own code in the child. Raise ProbeFailedError on failure."""
        self._bench.request(seconds, do="check", number=self._number, seconds=seconds)

    def peak_bytes(self) -> int | None:
        """Return the peak memory reported with the last response. Works even after the process has ended."""
        return self._peak_bytes

    def close(self) -> None:
        if self._process_number == self._bench.num_restarts:
            # If closing crashes the process, its resources are released as well.
            with contextlib.suppress(ProbeFailedError):
                self._bench.request(_STEP_SECONDS, do="close", number=self._number)


def serve_later(channel: WorkerChannel, arguments: dict[str, Any]) -> int:
    """Import modules, wait for the arguments of `serve`, and continue with it. Return the exit code."""
    start = time.perf_counter()
    for name in arguments["imports"]:
        # If a module is needed, importing it again raises the error.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    channel.send({"imported": time.perf_counter() - start})
    return serve(channel, channel.receive())


def serve(channel: WorkerChannel, arguments: dict[str, Any]) -> int:
    """Open the bench in the child process and respond to requests. Return the exit code."""
    with contextlib.ExitStack() as stack:
        try:
            payload = () if channel.payload is None else (channel.payload,)
            opened = load_object(arguments["target"])(arguments["arguments"], *payload)
            bench: StepBench = stack.enter_context(opened)
        except WhetError as error:
            channel.send({"error": error_to_json(error)})
            return 0
        channel.send({"plan": bench.plan.as_json(), "about": dict(bench.about)})
        prepared: dict[int, PreparedStep] = {}
        for request in channel.messages():
            channel.send(_respond(bench, prepared, request))
    return 0


def _respond(bench: StepBench, prepared: dict[int, PreparedStep], request: dict[str, Any]) -> dict[str, Any]:
    number = request.get("number", -1)
    try:
        match request["do"]:
            case "use batch":
                bench.use_batch(request["size"])
                return {"plan": bench.plan.as_json(), "about": dict(bench.about)}
            case "agreement":
                return {"agreement": asdict(bench.agreement(request["settings"], seconds=request["seconds"]))}
            case "prepare":
                ready = prepared[number] = bench.prepare(request["settings"], seconds=request["seconds"])
                return {
                    "seconds": ready.preparation_seconds,
                    "step": ready.step_seconds,
                    "bytes": ready.peak_bytes(),
                    "launches": asdict(ready.launches),
                }
            case "step":
                ready = prepared[number]
                seconds = ready.step(request["index"])
                return {"seconds": seconds, "bytes": ready.peak_bytes(), "launches": asdict(ready.launches)}
            case "check":
                prepared[number].check(seconds=request["seconds"])
                return {}
            case _:
                prepared.pop(number).close()
                return {}
    except ProbeFailedError as error:
        return {"failed": error.reason, "kind": error.kind}
    # An error in user code is a failed probe and does not end the process.
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500], "kind": "error"}
