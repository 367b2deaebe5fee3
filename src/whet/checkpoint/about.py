"""Where does a checkpoint come from, and is what was computed up to it bit-exact?"""

from typing import Any, Literal

from pydantic import Field

from whet.base.record import Record
from whet.base.version import VERSION

BIT_EXACT: Literal["bit-exact"] = "bit-exact"

Circumstance = str | int | float | bool | None


class About(Record):
    """What the manifest says besides files and tensors. Nothing here is restored; it is compared and shown."""

    whet: str = VERSION
    run_id: str = ""
    attempt: int = Field(default=1, ge=1)
    """The sitting that wrote it, counted from 1."""
    parent: str | None = None
    """The checkpoint this sitting went on from."""
    created: float = 0.0
    """Unix seconds."""
    parameters: tuple[str, ...] = ()
    """The names of all parameters in the model's own order."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of one and the same tensor; it is stored once, under the first."""
    circumstances: dict[str, Circumstance] = Field(default_factory=dict)
    """What decides the last bits: precision, threads, versions, device, micro-batch, number of processes."""
    data: dict[str, Any] = Field(default_factory=dict)
    """The data's fingerprint and length, the global batch, the position."""
    exactness: Literal["bit-exact"] | tuple[str, ...] = BIT_EXACT
    """Or why a run without interruptions would have ended with other bits."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not bit-exact; none where it is."""
        return () if self.exactness == BIT_EXACT else tuple(self.exactness)
