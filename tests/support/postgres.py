"""A temporary PostgreSQL server: created, started, restarted and removed with the installed programs."""

import getpass
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def programs() -> Path | None:
    """Where initdb and pg_ctl are."""
    result = shutil.which("pg_ctl")
    places = [Path(result).parent] if result else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((place for place in reversed(places) if (place / "initdb").exists()), None)


class Server:
    def __init__(self, home: Path, bin_folder: Path, user: str) -> None:
        self._home, self._bin, self._user = home, bin_folder, user
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"postgresql+psycopg://{user}@127.0.0.1:{self._port}/postgres"

    def run(self, program: str, *words: str) -> None:
        as_user = {"user": self._user} if os.geteuid() == 0 else {}
        # Its own files: a server that inherits a pipe keeps the test waiting.
        with (self._home / "logged").open("ab") as logged:
            subprocess.run(
                [str(self._bin / program), *words],
                check=True,
                stdout=logged,
                stderr=logged,
                cwd=self._home,
                timeout=600,
                **as_user,
            )

    def make(self) -> None:
        self.run("initdb", "-D", str(self._home / "data"), "-A", "trust", "-U", self._user, "--no-sync")

    def start(self) -> None:
        options = (
            f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='{self._home}' -c fsync=off"
        )
        self.run("pg_ctl", "-D", str(self._home / "data"), "-w", "-l", str(self._home / "log"), "-o", options, "start")

    def stop(self) -> None:
        self.run("pg_ctl", "-D", str(self._home / "data"), "-w", "-m", "immediate", "stop")


@contextmanager
def postgres() -> Iterator[Server]:
    """A running server; skipped if the programs or a suitable user are missing."""
    pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed (extra postgres)")
    folder = programs()
    if folder is None:
        pytest.skip("no PostgreSQL server is installed here")
    user = "postgres" if os.geteuid() == 0 else getpass.getuser()
    home = Path(tempfile.mkdtemp(prefix="whet-postgres-"))
    try:
        if os.geteuid() == 0:
            try:
                result = pwd.getpwnam(user)
            except KeyError:
                pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
            os.chown(home, result.pw_uid, result.pw_gid)
        server = Server(home, folder, user)
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)
