"""What one process is told to do: which way trains which work, where, and for how long."""

from dataclasses import asdict, dataclass
from typing import Any

WAYS = {
    "bare": "bare loop",
    "expert": "expert loop",
    "expert-compiled": "expert loop, compiled",
    "trainer": "HF Trainer, pad to longest",
    "trainer-fixed": "HF Trainer, pad to 128",
    "trainer-compiled": "HF Trainer, compiled, pad to 128",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "fabric": "Fabric",
    "whet": "whet, default plan",
    "whet-graph": "whet, graph",
    "whet-compiled": "whet, compiled",
}
"""Every way and how it is called in tables."""
PLAIN_NAMES = {"trainer": "HF Trainer", "trainer-compiled": "HF Trainer, compiled"}
"""Where there is nothing to pad."""
WORKS = ("text32", "text256", "hex", "chat")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Plain values only: it travels as JSON."""

    way: str
    work: str
    device: str
    scale: str
    """full, cpu (small enough that a step takes 5 to 100 ms on two cores), or tiny (tries the files themselves)."""
    precision: str
    total_steps: int
    """The linear schedule ends here."""
    has_dropout: bool
    workers: int
    """Processes that read data for those peers that use a DataLoader."""
    threads: int | None = None
    takes_losses: bool = False

    @property
    def is_compiled(self) -> bool:
        return self.way.endswith("-compiled")

    @property
    def is_half(self) -> bool:
        return self.precision == "bf16"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def name(self) -> str:
        """How tables call the way."""
        plain = {} if self.work.startswith("text") else PLAIN_NAMES
        return plain.get(self.way) or WAYS.get(self.way, self.way)
