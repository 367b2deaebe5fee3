"""A client that can send malformed requests, and a server in a separate process."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PATIENCE_SECONDS = 120
"""Timeout for a response: a low-priority server on a busy machine is slow, but only a hang takes this long."""
Headers = Mapping[str, str] | list[tuple[str, str]]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> dict:
        assert self.headers["content-type"] == "application/json", self
        return json.loads(self.body)


@dataclass
class Served:
    """A server under test."""

    process: subprocess.Popen[str]
    port: int
    token: str
    link: str
    reported: list[str] = field(default_factory=list)
    """Its output, line by line."""

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)

    def request(self, path: str = "/", method: str = "GET", headers: Headers = (), *, body: bytes = b"") -> Answer:
        """A request by the owner of the token."""
        return self.request_bare(path, method, [*_pairs(headers), *self.bearer.items()], body=body)

    def request_bare(
        self,
        path: str = "/",
        method: str = "GET",
        headers: Headers = (),
        *,
        body: bytes = b"",
        host: str | None = "",
    ) -> Answer:
        """A request with these headers and a Host (ours; None: without one)."""
        own = [("Host", f"127.0.0.1:{self.port}" if host == "" else host)] if host is not None else []
        if body:
            own.append(("Content-Length", str(len(body))))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in [*own, *_pairs(headers)])]
        head = "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")
        with self.connect() as connection:
            return exchange(connection, head + body, method=method)

    def cookie(self, link: str) -> str:
        """The response that a browser gets for a link."""
        answer = self.request_bare(link.removeprefix(f"http://127.0.0.1:{self.port}"))
        return answer.headers["set-cookie"].partition(";")[0]


def exchange(connection: socket.socket, data: bytes, *, method: str = "GET") -> Answer:
    """Sends bytes and reads one answer; an event stream up to its first pause."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)
    response = http.client.HTTPResponse(connection, method=method)
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    if headers.get("content-type", "").startswith("text/event-stream"):
        return Answer(response.status, headers, response.read1())
    return Answer(response.status, headers, response.read())


@contextlib.contextmanager
def serving(*words: str, home: Path, cwd: Path, **environment: str) -> Iterator[Served]:
    """Start a server process that prints its link as one line of JSON and writes its token to `home`."""
    env = {**os.environ, **environment, "WHET_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    reported: list[str] = []
    listening = threading.Thread(target=lambda: reported.extend(process.stdout or ()), daemon=True)
    try:
        logged = _first_json(process, reported)
        listening.start()
        files = [json.loads(path.read_text()) for path in (home / "servers").glob("*.json")]
        token = next(file["token"] for file in files if file["pid"] == logged["pid"])
        port = int(logged["url"].rpartition(":")[2].strip("/"))
        yield Served(process=process, port=port, token=token, link=logged["link"], reported=reported)
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
        if listening.ident is not None:
            listening.join(PATIENCE_SECONDS)
        if process.stdout is not None:
            process.stdout.close()


def _first_json(process: subprocess.Popen[str], reported: list[str]) -> dict:
    for line in process.stdout or ():
        reported.append(line)
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError("".join(reported))


def _pairs(headers: Headers) -> list[tuple[str, str]]:
    return list(headers.items()) if isinstance(headers, Mapping) else list(headers)


def until(is_so, *, seconds: float = PATIENCE_SECONDS) -> bool:
    """Wait for a condition to become true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if is_so():
            return True
        time.sleep(0.05)
    return is_so()
