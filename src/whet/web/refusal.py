"""How is a request refused? With a status and the three lines that every error has, as plain text."""

from whet.base.errors import WhetError
from whet.base.units import printable


class RefusedError(WhetError):
    """A request that is not granted. Handlers raise it too: `RefusedError(404, "no such run", got=..., try_=...)`."""

    def __init__(self, status: int, what: str, *, got: object = None, try_: str | None = None) -> None:
        super().__init__(what, got=None if got is None else str(got)[:200], try_=try_)
        self.status = status
        self.headers: list[tuple[bytes, bytes]] = []

    def body(self) -> bytes:
        """The three lines; what came from the request or a run can steer nothing."""
        return (printable(str(self)) + "\n").encode("utf-8", "replace")
