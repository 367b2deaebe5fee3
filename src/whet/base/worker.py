"""An isolated child process that exchanges JSON messages with its parent over two pipes.

    with JsonWorker("package.module:function", {"device": "cpu"}) as worker:
        reply = worker.request({"step": 3}, timeout=30.0)

The function runs in the child as `function(channel, arguments)` and returns the exit code. If the child crashes, hangs
or exceeds its memory limit, the parent gets an exception. The child ends when its parent does.

No file in the current folder or on PYTHONPATH can shadow the standard library or an installed package, because the
child appends the parent's `sys.path` entries to its own.

A `payload` of bytes is sent through a third pipe, which the child reads as `channel.payload`. A thread of the parent
fills the pipe, so the payload may be larger than its buffer.
"""

import contextlib
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

from whet.base import env
from whet.base.errors import UsageError, WhetError
from whet.base.process import describe_exit_code

_TICK_SECONDS = 0.5
# Check the memory limit often, because a process can allocate gigabytes within a second.
_MEMORY_CHECK_SECONDS = 0.02
_DRAIN_SECONDS = 1.0
# Read only the end of stderr, which contains the last line of a traceback.
_STDERR_TAIL_BYTES = 10_000
# This variable is removed while the interpreter starts, and set again for the processes that the child starts.
# `python -I` would do the same, but it would also ignore PYTHONHASHSEED, which `whet prove` varies on purpose.
_PATH_VARIABLE = "PYTHONPATH"

Message = dict[str, Any]


class WorkerTimeoutError(Exception):
    """Raised if no message arrived in time. The process is still running."""


class WorkerExitError(Exception):
    """Raised if the process has ended and all its messages have been received."""


class JsonWorker:
    """Starts `target` ("module:function") in a child process. A context manager that leaves no process behind.

    `log` receives stdout and stderr. By default they go to a temporary file (`read_stderr`, `describe_exit`).
    `max_bytes` is the resident memory above which the process is killed. `is_threaded=False` keeps the child
    single-threaded, so that it can fork. It then detects the end of its parent only between messages. `payload` yields
    chunks of bytes for the child to read.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        max_bytes: int | None = None,
        is_threaded: bool = True,
        payload: Iterable[bytes] | None = None,
    ) -> None:
        self.on_tick: Callable[[], None] | None = None
        """Called about twice a second while `receive` waits."""
        self.killed_at_bytes: int | None = None
        """Resident memory in bytes when the process was killed for exceeding its limit."""
        self._stderr: IO[bytes] = tempfile.TemporaryFile() if log is None else log.open("ab+")  # noqa: SIM115
        self._stderr_read = 0
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        environment = env.child_environment() if environment is None else environment
        requests_in, self._requests = os.pipe()
        responses, responses_out = os.pipe()
        payload_in, payload_out = (None, None) if payload is None else os.pipe()
        for_child = [end for end in (requests_in, responses_out, payload_in) if end is not None]
        try:
            self._process = subprocess.Popen(
                _command(requests_in, responses_out, environment),
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                env=_without_path(environment),
                pass_fds=for_child,
                # Start a new process group, so that Ctrl-C does not reach it and all its processes can be killed.
                process_group=0,
            )
        except OSError:
            for end in (self._requests, responses, payload_out):
                if end is not None:
                    os.close(end)
            self._stderr.close()
            raise
        finally:
            for end in for_child:
                os.close(end)
        self._threads = [threading.Thread(target=_read_messages, args=(responses, self._messages), daemon=True)]
        if payload is not None:
            self._threads.append(threading.Thread(target=_write_payload, args=(payload_out, payload), daemon=True))
        if max_bytes is not None:
            self._threads.append(threading.Thread(target=self._limit_memory, args=(max_bytes,), daemon=True))
        for thread in self._threads:
            thread.start()
        start = {"target": target, "arguments": dict(arguments or {}), "is_threaded": is_threaded}
        self.send({**start, "payload": payload_in})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. A message to a process that has ended is dropped, because `receive` reports the end."""
        line = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._requests, line) :]

    def receive(self, timeout: float) -> Message:
        """Return the next message. Raise WorkerTimeoutError after `timeout` seconds, or WorkerExitError."""
        deadline = time.monotonic() + timeout
        while True:
            # A child of the process may keep the pipe open after the process ends, so poll its state as well.
            has_ended = self._process.poll() is not None
            left = _DRAIN_SECONDS if has_ended else min(_TICK_SECONDS, max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(queue.Empty):
                message = self._messages.get(timeout=left)
                if message is None:
                    # Mark the channel as closed, so that later calls raise the same error.
                    self._messages.put(None)
                    raise WorkerExitError
                return message
            if has_ended:
                raise WorkerExitError
            if time.monotonic() >= deadline:
                raise WorkerTimeoutError
            if self.on_tick is not None:
                self.on_tick()

    def request(self, message: Mapping[str, Any], *, timeout: float) -> Message:
        """Send a message and return the response. Raise WorkerTimeoutError or WorkerExitError like `receive`."""
        self.send(message)
        return self.receive(timeout)

    def signal(self, number: int) -> None:
        """Send a signal to the process, not to its group."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        kill_group(self.pid)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code (negative signal number if killed), or None if it still runs after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kill the process group and release all resources."""
        self.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(_DRAIN_SECONDS)
        os.close(self._requests)
        self._stderr.close()

    def read_stderr(self, until: int) -> str:
        """Return what was written to stderr since the last call, up to the offset `until`."""
        # Use pread instead of seek, because the child writes at the file position that it shares with the parent.
        text = os.pread(self._stderr.fileno(), until - self._stderr_read, self._stderr_read).decode(errors="replace")
        self._stderr_read = until
        return text

    def describe_exit(self) -> str:
        """Describe how the process ended, with the last line that it wrote to stderr."""
        code = self.wait(2.0)
        if code is None:
            return "it still runs"
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES))
        lines = tail.decode(errors="replace").strip().splitlines()
        return f"{describe_exit_code(code)}: {lines[-1][:300]}" if lines else describe_exit_code(code)

    def _limit_memory(self, max_bytes: int) -> None:
        import psutil

        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            while self._process.poll() is None:
                resident = process.memory_info().rss
                if resident > max_bytes:
                    self.killed_at_bytes = resident
                    self.kill()
                    return
                time.sleep(_MEMORY_CHECK_SECONDS)


class WorkerChannel:
    """The child's end of the pipes to its parent, for messages and the payload."""

    def __init__(
        self, requests: IO[bytes], responses: int, *, is_threaded: bool, payload: IO[bytes] | None = None
    ) -> None:
        self._requests, self._responses = requests, responses
        self.payload = payload
        """The bytes that the parent sends besides messages; None if it sends none. They can be read once."""
        self._lines: queue.SimpleQueue[bytes] | None = None
        if is_threaded:
            self._lines = queue.SimpleQueue()
            threading.Thread(target=self._watch_parent, daemon=True, name="parent watch").start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the parent."""
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._responses, line) :]

    def receive(self) -> Message:
        """Wait for the next message. Raise EOFError in a single-threaded child whose parent has ended."""
        line = self._requests.readline() if self._lines is None else self._lines.get()
        if not line:
            raise EOFError
        return dict(json.loads(line))

    def messages(self) -> Iterator[Message]:
        """Yield the messages of the parent until it ends."""
        with contextlib.suppress(EOFError):
            while True:
                yield self.receive()

    def has_parent(self) -> bool:
        """Return whether the parent is still waiting for a response. Only for single-threaded children."""
        # The parent sends nothing while it waits, so a readable pipe means that the parent closed it.
        return not select.select([self._requests], [], [], 0.0)[0]

    def close(self) -> None:
        """Close both pipes. Forks of the child call this, because they must not use the pipes of the child."""
        self._requests.close()
        os.close(self._responses)

    def _watch_parent(self) -> None:
        """Queue incoming messages. When the pipe closes, kill this process and its children immediately."""
        assert self._lines is not None
        for line in self._requests:
            self._lines.put(line)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def main(requests: int, responses: int) -> None:
    """Run the function that the first message names. This is the entry point of every child."""
    for descriptor in (requests, responses):
        os.set_inheritable(descriptor, False)
    reader = os.fdopen(requests, "rb")
    first = reader.readline()
    if not first:
        os._exit(1)
    start = json.loads(first)
    payload = None
    if start["payload"] is not None:
        os.set_inheritable(start["payload"], False)
        payload = os.fdopen(start["payload"], "rb")
    channel = WorkerChannel(reader, responses, is_threaded=start["is_threaded"], payload=payload)
    code = 1
    try:
        code = load_object(start["target"])(channel, start["arguments"]) or 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    exit_now(code)


def exit_now(code: int) -> None:
    """End this process without cleanup, because a failed driver or a reading thread could block it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def load_object(target: str) -> Any:
    """Import an object named as "module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def kill_group(pid: int) -> None:
    """Kill the process group of a child. The group may outlive its leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _command(requests: int, responses: int, environment: Mapping[str, str]) -> list[str]:
    # Make paths absolute, because an empty entry means the current folder.
    paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100
    restored = {_PATH_VARIABLE: environment[_PATH_VARIABLE]} if _PATH_VARIABLE in environment else {}
    code = (
        f"import os, sys; sys.path += [path for path in {paths!r} if path not in sys.path]; "
        f"os.environ.update({restored!r}); from whet.base.worker import main; main({requests}, {responses})"
    )
    return [sys.executable, "-P", "-c", code]


def _without_path(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != _PATH_VARIABLE}


def _read_messages(descriptor: int, messages: "queue.SimpleQueue[Message | None]") -> None:
    with os.fdopen(descriptor, "rb") as stream:
        for line in stream:
            # A killed process may leave an incomplete line.
            with contextlib.suppress(ValueError):
                messages.put(dict(json.loads(line)))
    messages.put(None)


def _write_payload(descriptor: int, payload: Iterable[bytes]) -> None:
    # Writing fails if the child has ended, which `receive` reports.
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb", buffering=0) as stream:
        for chunk in payload:
            left = memoryview(chunk)
            while left:
                left = left[stream.write(left) :]


def error_to_json(error: WhetError) -> Message:
    """Convert an error to JSON for the parent, which restores it with `error_from_json`."""
    return {"what": error.what, "got": error.got, "try_": error.try_, "is_usage": isinstance(error, UsageError)}


def error_from_json(fields: Mapping[str, Any]) -> WhetError:
    """Restore an error from `error_to_json`. Other subclasses become WhetError or UsageError."""
    kind = UsageError if fields["is_usage"] else WhetError
    return kind(fields["what"], got=fields["got"], try_=fields["try_"])
