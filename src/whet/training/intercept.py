"""Redirect the sessions of a user's training function: run a short segment, or stop before the first step.

`whet prove train.py:main` calls the user's `main()` in child processes. The function calls `whet.train` or
`whet.Session` as usual. Inside `intercept`, sessions ask this module where to write and how far to train.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError

if TYPE_CHECKING:
    from whet.step.loss import LossFunction
    from whet.training.callbacks.event_log import EventHandler
    from whet.training.run_config import RunConfig
    from whet.training.run_context import RunContext


class FirstStepReached(BaseException):
    """Raised before the first step. Holds the config and the loss of the training run."""

    def __init__(self, config: "RunConfig", loss: "LossFunction") -> None:
        super().__init__()
        self.config, self.loss = config, loss


class SegmentEnded(BaseException):
    """Raised at the end of a proof's session, because the code after it is not part of the training run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofSegment:
    """A short part of a training run that a proof executes in a separate run folder."""

    run: Path
    steps: int
    every: int
    """Number of steps between checkpoints."""
    device: str
    on_event: "EventHandler"
    command: tuple[str, ...]


class Interception:
    """A replacement for the config of sessions.

    With a segment, the first session trains it; without one, sessions raise FirstStepReached before their first step.
    """

    def __init__(self, segment: ProofSegment | None = None) -> None:
        self._segment = segment
        self._owner: RunConfig | None = None
        self.is_ended = False

    def redirect(self, config: "RunConfig") -> "RunConfig":
        """Return the config that a session must use instead of its own."""
        segment = self._segment
        if segment is None or self._owner is not None:
            # Only the first session is part of the proof. Others, such as one nested in it, write nothing.
            return replace(config, path=None)
        overrides = {**config.overrides, **({} if segment.device == "auto" else {"device": segment.device})}
        own = overrides.get("checkpoint_steps", "auto")
        overrides["checkpoint_steps"] = segment.every if own == "auto" else min(segment.every, int(str(own)))
        training = config.training.model_copy(
            update=segment_changes(config.training.max_steps, config.training.eval_every, steps=segment.steps)
        )
        self._owner = replace(
            config,
            training=training,
            config=training.as_json(),
            path=segment.run,
            # A measured plan may differ between processes.
            plan=None,
            overrides=overrides,
            on_event=segment.on_event,
            command=list(segment.command),
        )
        return self._owner

    def before_step(self, config: "RunConfig", loss: "LossFunction", *, run: "RunContext | None" = None) -> None:
        """Raise FirstStepReached if there is no segment.

        With a segment, report hashes of the user's variables at every step at which the run may be interrupted, so that
        the proof can compare them.
        """
        segment = self._segment
        if segment is None:
            raise FirstStepReached(config, loss)
        if run is None or run.unsaved_state is None or config is not self._owner or run.state.step % segment.every:
            return
        run.unsaved_state.add_loss(loss)
        variables = run.unsaved_state.variables(sys._getframe(1))
        segment.on_event("variables", {"step": run.state.step, "digests": variables})

    def after_session(self, config: "RunConfig") -> None:
        """Raise SegmentEnded at the end of the session that trains the segment."""
        if config is self._owner:
            self.is_ended = True
            raise SegmentEnded


_active: Interception | None = None


def active() -> Interception | None:
    """Return the interception that is in effect; None in a normal training run."""
    return _active


@contextmanager
def intercept(interception: Interception) -> Iterator[Interception]:
    """Intercept all sessions of this process inside the `with` block."""
    global _active
    before, _active = _active, interception
    try:
        yield interception
    finally:
        _active = before


def segment_changes(max_steps: int | None, eval_every: int | str, *, steps: int) -> dict[str, Any]:
    """Return the options that shorten a training run to a segment: fewer steps, and two evaluations."""
    half = math.ceil(steps / 2)
    return {
        "max_steps": min(steps, max_steps or steps),
        "eval_every": half if isinstance(eval_every, str) else min(half, eval_every),
        "epochs_per_session": None,
    }


def check_fixed_batch() -> None:
    """Raise UsageError for global_batch_size="auto" in a function that is proved or measured."""
    if _active is not None:
        raise UsageError(
            "a proof or a measurement of a script needs a fixed global batch size",
            got='global_batch_size="auto"',
            try_="global_batch_size=N",
        )
