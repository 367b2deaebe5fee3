"""The specification of one process: loop, workload, device and length."""

from dataclasses import asdict, dataclass
from typing import Any

LOOPS = {
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
"""Loops and their display names."""
FOREIGN_LOOPS = {
    "plain": "plain loop",
    "expert-compiled": "expert, compiled",
    "expert-compiled-overhead": 'expert, mode="reduce-overhead"',
    "trainer": "HF Trainer",
    "lightning": "Lightning",
    "whet_train": "whet, default plan",
    "whet_train-measured": "whet, measured",
    "whet_train-compiled": "whet, compiled",
}
"""Loops of benchmarks/foreign.py and their display names."""
PLAIN_NAMES = {"trainer": "HF Trainer", "trainer-compiled": "HF Trainer, compiled"}
"""Display names for workloads without padding."""
WORKLOADS = ("text32", "text256", "hex", "chat")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Plain values, sent to the process as JSON."""

    loop: str
    workload: str
    device: str
    scale: str
    """full, cpu (a step takes 5 to 100 ms on two cores), or tiny (smoke test)."""
    precision: str
    total_steps: int
    """Length of the linear schedule."""
    has_dropout: bool
    workers: int
    """DataLoader workers."""
    threads: int | None = None
    records_losses: bool = False
    """Whether the process reports the losses of all its steps, and no times."""
    first_losses: int = 0
    """How many losses of the first steps are reported beside times."""

    @property
    def is_compiled(self) -> bool:
        return "-compiled" in self.loop

    @property
    def is_half(self) -> bool:
        return self.precision == "bf16"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def name(self) -> str:
        """Display name of the loop."""
        if self.workload.startswith("foreign"):
            return FOREIGN_LOOPS[self.loop]
        plain = {} if self.workload.startswith("text") else PLAIN_NAMES
        return plain.get(self.loop) or LOOPS.get(self.loop, self.loop)
