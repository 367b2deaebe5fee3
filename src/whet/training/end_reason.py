"""The reason why a session ended, as a sentence for the event log, the report and the result of `train`."""

import signal
from typing import TYPE_CHECKING

from whet.base.errors import WhetError
from whet.base.process import TerminatedError, signal_name
from whet.training.callback import Action
from whet.training.progress import State

if TYPE_CHECKING:
    from whet.training.run_config import RunConfig


def stop_reason(action: Action) -> str:
    """Return the reason for a requested stop.

    >>> stop_reason(Action(stop="SIGINT", signal=signal.SIGINT)), stop_reason(Action.STOP("good enough"))
    ('stopped by Ctrl-C', 'stopped: good enough')
    """
    return f"stopped by {_stopped_by(action.signal)}" if action.signal else f"stopped: {action.stop}"


def describe_end(state: State, config: "RunConfig", error: BaseException | None) -> str:
    """Return why a session ended: all steps are done, it was stopped, or it failed."""
    if isinstance(error, KeyboardInterrupt | TerminatedError):
        name = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else "SIGTERM"
        return f"stopped by {name}, and nothing more was saved"
    if isinstance(error, WhetError):
        # The third line, the suggestion, is only shown on the screen.
        return f"failed: {error.what}" + (f": {error.got}" if error.got else "")
    if isinstance(error, Exception):
        notes = "; ".join(getattr(error, "__notes__", ()))
        return f"failed: {type(error).__name__}: {error}".rstrip(": ") + (f" ({notes})" if notes else "")
    if error is not None:
        return f"stopped by {type(error).__name__}, and nothing more was saved"
    if state.ended_early:
        return _early_stop(state, config)
    if state.is_finished:
        return _all_done(state)
    return state.stop_reason or f"stopped: the loop was left after step {state.step:,}"


def _all_done(state: State) -> str:
    if state.epoch >= state.epochs:
        return f"all {state.epochs:,} epochs done" if state.epochs > 1 else "1 epoch done"
    return f"all {state.max_steps:,} steps done"


def _early_stop(state: State, config: "RunConfig") -> str:
    count = state.num_worse
    reason = f"stopped early: no better {config.goal} in {count} evaluation{'s' if count > 1 else ''}"
    if state.best_score is None or state.best_step is None:
        return reason
    best = state.best_score if config.mode == "max" else -state.best_score
    return f"{reason}, best {best:.4g} at step {state.best_step:,}"


def _stopped_by(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal_name(number)
