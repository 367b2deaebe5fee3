"""Desktop notifications when a run ends or needs attention."""

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from whet.machine.desktop import notify

if TYPE_CHECKING:
    from whet.training.callbacks.event_log import EventHandler

_ATTENTION_KINDS = ("warning", "skip", "pressure")


class DesktopNotifier:
    """Is told of every event of a run like a screen, passes it on, and notifies now and then."""

    def __init__(
        self,
        name: str,
        *,
        on_event: "EventHandler | None",
        say: Callable[[str], None],
        send: Callable[[str, str], str | None] | None = None,
    ) -> None:
        self._name = name
        self._on_event = on_event
        self._say = say
        self._send = send or partial(notify, terminal=sys.stderr)
        self._told: set[str] = set()
        self._numbers: dict[str, float] = {}

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        if self._on_event is not None:
            self._on_event(kind, fields)
        if kind == "step":
            self._numbers["loss"] = fields["loss"]
        elif kind == "eval":
            self._numbers |= {n: v for n, v in fields.items() if n != "step" and isinstance(v, int | float)}
        elif kind == "end":
            self._tell(fields["state"], fields.get("reason"), step=fields["step"])
        elif kind in _ATTENTION_KINDS and kind not in self._told and fields.get("level") not in ("normal", "warn"):
            self._told.add(kind)
            self._tell("needs attention", fields.get("reason"), step=fields.get("step", 0))

    def _tell(self, what: str, why: str | None, *, step: int) -> None:
        numbers = "".join(f", {name} {value:.4g}" for name, value in self._numbers.items())
        problem = self._send(
            f"whet: {self._name} {what}", f"{why}; step {step:,}" if why else f"step {step:,}{numbers}"
        )
        if problem is not None and "refusal" not in self._told:
            self._told.add("refusal")
            self._say(f"{self._name}: no notification: {problem}")
