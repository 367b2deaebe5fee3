"""Storage of trials: a journal file or a PostgreSQL database."""

import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from whet.base.errors import UsageError, WhetError, first_line
from whet.base.extras import install_hint

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

JOURNAL_FILE = "journal.log"
_RETRY_SECONDS = 300.0
_PAUSE_SECONDS = 0.5
_MAX_ATTEMPTS = 20


def without_password(url: str | None) -> str:
    """Return the URL without its password, for messages and saved results."""
    if url is None:
        return JOURNAL_FILE
    parts = urlsplit(url)
    hidden = url.replace(f":{parts.password}@", ":***@") if parts.password else url
    return re.sub(r"(?i)([?&][^=&]*password=)[^&]*", r"\1***", hidden)


def check_address(url: str | None) -> None:
    """Raise UsageError if trials cannot be stored at this URL. Call this before anything is written."""
    path = _local_file(url)
    if url is None:
        return
    if path is None and not re.match(r"postgresql(\+\w+)?://.", url):
        raise UsageError(
            "trials are stored in a journal file or PostgreSQL",
            got=without_password(url),
            try_="postgresql+psycopg://USER@HOST/DATABASE",
        )
    if path is not None and path.is_dir():
        raise UsageError("trials are stored in a file", got=url, try_="journal:trials.log")
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError("no such folder for the trials", got=str(path.parent), try_=f"mkdir -p {path.parent}")


def _local_file(url: str | None) -> Path | None:
    """Return the path of a journal URL, or None for any other URL."""
    return Path(url.removeprefix("journal:").removeprefix("//")) if url and url.startswith("journal:") else None


@contextmanager
def open_storage(url: str | None, *, folder: Path) -> "Iterator[BaseStorage]":
    """Open the storage at a URL, or the journal file in `folder` if the URL is None."""
    check_address(url)
    storage = _open(url, folder=folder)
    try:
        yield storage
    finally:
        engine = getattr(storage, "engine", None)
        if engine is not None:
            engine.dispose()


def _open(url: str | None, *, folder: Path) -> "BaseStorage":
    try:
        import optuna
    except ImportError:
        raise WhetError("a search needs Optuna", got="it is not installed", try_=install_hint("search")) from None
    # whet logs trials itself, so silence Optuna.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if url is None or url.startswith("journal:"):
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        path = _local_file(url) or folder / JOURNAL_FILE
        held: Any = JournalLock(path)
        try:
            _check_journal(path)
            return JournalStorage(JournalFileBackend(str(path), lock_obj=held))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WhetError(
                "the journal of the trials is damaged",
                got=f"{path}: {error}"[:300],
                try_="restore it from a copy, or another --name",
            ) from None
    return _database(url)


def _check_journal(path: Path) -> None:
    """Raise ValueError if the journal contains NUL bytes, which a power failure can leave behind.

    Optuna silently ignores the end of a file that it cannot decode, and the trials in it.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        position = 0
        while block := file.read(1 << 20):
            if (offset := block.find(b"\0")) >= 0:
                raise ValueError(f"NUL bytes from byte {position + offset:,} on")
            position += len(block)


def _database(url: str) -> "BaseStorage":
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import IntegrityError, ProgrammingError

    # pool_pre_ping replaces connections that a restarted server has closed.
    for tries_left in reversed(range(_MAX_ATTEMPTS)):
        try:
            storage = RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
            break
        except ImportError as error:
            raise WhetError(
                "the database's driver is not installed", got=str(error)[:300], try_=install_hint("postgres")
            ) from None
        except (IntegrityError, ProgrammingError, StorageInternalError) as error:
            # Retry: if two processes start at the same time, both create the tables, and one of them fails.
            if not tries_left:
                raise _open_error(url, error) from None
            time.sleep(_PAUSE_SECONDS)
        except Exception as error:
            raise _open_error(url, error) from None
    retrying: Any = _RetryingStorage(storage)
    return retrying  # type: ignore[no-any-return]


def _open_error(url: str, error: Exception) -> WhetError:
    return WhetError(
        "cannot connect to the database",
        got=f"{without_password(url)}: {first_line(error)}"[:300],
        try_="check that the database server is running",
    )


class _RetryingStorage:
    """A proxy that retries failed calls of a storage for five minutes, because a database server may restart."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        return _retry(attribute) if callable(attribute) else attribute


def _retry(call: Callable[..., Any]) -> Callable[..., Any]:
    def retried(*arguments: Any, **options: Any) -> Any:
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import DBAPIError

        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                return call(*arguments, **options)
            except (StorageInternalError, DBAPIError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)

    return retried


class JournalLock:
    """A file lock that the kernel releases when its holder dies. Optuna's lock files outlive a kill by 30 s."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: dict[int, int] = {}

    def acquire(self) -> bool:
        """Wait until no other process holds the lock, and acquire it."""
        # Do not use the file name of Optuna's lock: Optuna would consider a long-lived lock file stale and remove it.
        descriptor = os.open(f"{self._path}.held", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Keep one descriptor per thread, because several workers of this process share the lock object.
        self._held[threading.get_ident()] = descriptor
        _truncate_torn_line(self._path)
        return True

    def release(self) -> None:
        os.close(self._held.pop(threading.get_ident()))


def _truncate_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next line is not appended to it. Its write never returned."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    with path.open("r+b") as file:
        file.seek(max(0, size - 1))
        if size == 0 or file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
