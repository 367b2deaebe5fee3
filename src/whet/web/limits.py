"""How much may a client send, and how long may it take?"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Generous for a page and its programs; a client beyond them is cut off."""

    header_bytes: int = 16 * 1024
    """The request line and all headers."""
    num_headers: int = 64
    body_bytes: int = 64 * 1024
    connections: int = 128
    """At once. One more, and the oldest that has not yet asked anything is cut off (macOS gives 256 files in all)."""
    receive_seconds: float = 10.0
    """From the first moment of a request (or a connection) to its last byte."""
    idle_seconds: float = 15.0
    """Between two requests on one connection."""
    stall_seconds: float = 10.0
    """Without taking a byte of an answer that waits for it."""
