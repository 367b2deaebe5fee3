"""A program that passes standard input on to standard error, unchanged, and says on standard output what it noticed.

`StderrWatch` starts it as a process of its own, so that the last words of a training that dies still arrive. It answers
SEEN once the sought text came by, and PASSED for each MARK, which it takes out, when all before it was passed on.
"""

import contextlib
import os
import select
import sys

MARK = b"\0whet\0"
SEEN = b"!"
PASSED = b"."

_CHUNK = 65_536


def main(sought: bytes) -> None:
    """Relays until every writer has gone."""
    held, window = b"", b""
    while arrived := os.read(0, _CHUNK):
        data = held + arrived
        num_marks = data.count(MARK)
        data = data.replace(MARK, b"")
        held = _start_of_a_mark(data)
        data = data[: len(data) - len(held)]
        _pass_on(data)
        window += data
        if sought in window:
            _answer(SEEN)
        window = window[len(window) - len(sought) + 1 :] if len(window) >= len(sought) else window
        _answer(PASSED * num_marks)
    _pass_on(held)


def _start_of_a_mark(data: bytes) -> bytes:
    """The end of `data` that may be the first part of a mark."""
    return next((MARK[:size] for size in range(len(MARK) - 1, 0, -1) if data.endswith(MARK[:size])), b"")


def _pass_on(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:
            select.select([], [2], [])
        except OSError:
            # Nobody reads any more; the training must not be held up for that.
            return


def _answer(data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(1, data)


if __name__ == "__main__":
    main(sys.argv[1].encode())
