"""The events of a run of many short epochs, as a handler of events receives them."""

from collections.abc import Callable
from typing import Any

EPOCHS = 3_000


def send_many_epochs(handler: Callable[[str, dict[str, Any]], None]) -> None:
    """Send the events of a run that is stopped after 3,000 epochs of one step, with a warning in the middle."""
    handler("start", {"step": 0, "total_steps": EPOCHS})
    for epoch in range(1, EPOCHS + 1):
        handler("step", {"step": epoch, "samples": 32 * epoch, "epoch": epoch - 1, "loss": 1 / epoch})
        handler("eval", {"step": epoch, "accuracy": 0.5, "confusion": {"labels": ["a"]}})
        handler("epoch", {"epoch": epoch, "epoch_seconds": 0.01})
        if epoch == EPOCHS // 2:
            handler("warning", {"reason": "the disk is full", "retry": "soon"})
    handler("end", {"step": EPOCHS, "state": "stopped", "reason": "stopped by Ctrl-C"})
