"""Callbacks, which observe a run and can request a save, a rollback or a stop.

class StopBelow(whet.Callback):
    def on_evaluate(self, state, metrics):
        return whet.Action.STOP("good enough") if metrics["loss"] < 0.1 else whet.Action.NONE
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from whet.base.errors import UsageError
from whet.training.progress import State

if TYPE_CHECKING:
    from whet.step.step import Outcome
    from whet.training.run_context import RunContext

NO_SAVE, SAVE_WHEN_IDLE, SAVE_NOW = 0, 1, 2
"""Values of `Action.save`, ordered so that merging two actions keeps the more urgent one.

SAVE_WHEN_IDLE is skipped while another checkpoint is being written.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """A request to the training loop: NONE, SAVE, ROLLBACK(why) or STOP(why).

    Actions are merged with `|`. The loop carries them out between steps; with several ranks, all ranks do so at the
    same step, when they next synchronize. STOP includes a checkpoint and survives a rollback.
    """

    NONE: ClassVar["Action"]
    SAVE: ClassVar["Action"]

    save: int = NO_SAVE
    rollback: str | None = None
    """Reason for a rollback to the last checkpoint; None for no rollback."""
    stop: str | None = None
    """Reason to stop; None to continue."""
    signal: int = 0
    """The signal that caused `stop`, which sets the exit code; 0 if there was none."""
    on_all_ranks: bool = False
    """Whether every rank requests this action at the same step, so that all ranks can synchronize right away."""

    @staticmethod
    def ROLLBACK(why: str) -> "Action":  # noqa: N802
        """Request a rollback to the last checkpoint. The steps since then are repeated."""
        return Action(rollback=why)

    @staticmethod
    def STOP(why: str) -> "Action":  # noqa: N802
        """Request a checkpoint followed by a stop. The same call later resumes the run."""
        return Action(stop=why)

    def __or__(self, other: "Action") -> "Action":
        # Avoid creating an object in the common case, which occurs in every step.
        if self is Action.NONE or other is Action.NONE:
            return other if self is Action.NONE else self
        return Action(
            save=max(self.save, other.save),
            rollback=self.rollback or other.rollback,
            stop=self.stop or other.stop,
            signal=self.signal or other.signal,
            on_all_ranks=self.on_all_ranks or other.on_all_ranks,
        )


Action.NONE = Action()
Action.SAVE = Action(save=SAVE_NOW)


class Callback:
    """Base class of callbacks. Override the methods you need; by default they do nothing.

    Methods that return an Action may also return None, which means Action.NONE. If a callback raises an exception, the
    run saves a checkpoint and stops on all ranks before the exception propagates.
    """

    every_seconds: float = 0.0
    """Minimum number of seconds between two calls of `after_step`; 0 means a call after every step.

    The first call happens within the first second, or after the first step if that takes longer.
    """

    def on_start(self, run: "RunContext") -> None:
        """Called before the first step of a session. If the run resumes, its state has already been restored."""

    def before_step(self, state: State) -> None:
        """Called before each step, before its batch is yielded."""

    def after_step(self, state: State, outcome: "Outcome") -> Action | None:  # noqa: ARG002
        """Called after each optimizer step, or at most every `every_seconds` seconds.

        `outcome` holds device tensors; reading one of them waits for the device.
        """
        return Action.NONE

    def on_evaluate(self, state: State, metrics: Mapping[str, float]) -> Action | None:  # noqa: ARG002
        """Called after each evaluation and each call of `session.log`."""
        return Action.NONE

    def on_epoch_end(self, state: State) -> Action | None:  # noqa: ARG002
        """Called after the last step of an epoch, before the checkpoint of that step is saved if one is due."""
        return Action.NONE

    def on_end(self, state: State, error: BaseException | None) -> None:
        """Called when the session ends, after the final checkpoint. `error` is the exception that ended it, or None."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints. It is restored on resume and on rollback.

        The state may contain numbers, strings, tensors, NumPy arrays and generators, and lists, dicts and sets of
        these.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


class _Hook(NamedTuple):
    """An overridden method of a callback, with the minimum interval between its calls."""

    call: Callable[..., Action | None]
    is_users: bool
    every_seconds: float


MAX_FIRST_SECONDS = 1.0
"""The first call of a timed `after_step` is due after at most this many seconds."""


class CallbackList:
    """The callbacks of a run, which are called in order and whose actions are merged.

    Methods that no callback overrides are skipped.
    """

    def __init__(
        self, own: Iterable[Callback], users: Iterable[Callback], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Combine built-in callbacks (`own`), whose errors propagate, and `users`, whose errors stop the run."""
        self._own, self.users = tuple(own), tuple(users)
        self._clock = clock
        _check_callbacks(self.users)
        self.failure: tuple[str, Exception] | None = None
        """The name of the first user callback that failed, with its error; None if none has failed."""
        self._before_step = self._hooks("before_step")
        after_step = self._hooks("after_step")
        self._after_step = [hook for hook in after_step if not hook.every_seconds]
        self._timed = [hook for hook in after_step if hook.every_seconds]
        now = clock()
        self._due_at = {hook: now + min(hook.every_seconds, MAX_FIRST_SECONDS) for hook in self._timed}
        """The time of the next call of each timed hook."""
        self._next_due_at = min(self._due_at.values(), default=math.inf)
        self._on_evaluate = self._hooks("on_evaluate")
        self._on_epoch_end = self._hooks("on_epoch_end")

    @property
    def error(self) -> Exception | None:
        """The error of the first user callback that failed; None if none has failed."""
        return None if self.failure is None else self.failure[1]

    def on_start(self, run: "RunContext") -> None:
        for callback in (*self._own, *self.users):
            callback.on_start(run)

    def before_step(self, state: State) -> None:
        if self._before_step:
            self._call(self._before_step, state)

    def after_step(self, state: State, outcome: "Outcome") -> Action:
        action = self._call(self._after_step, state, outcome)
        if self._clock() < self._next_due_at:
            return action
        return action | self._call(self._due_hooks(), state, outcome)

    def _due_hooks(self) -> list["_Hook"]:
        """Return the timed hooks that are due and schedule their next calls."""
        now = self._clock()
        due = [hook for hook in self._timed if self._due_at[hook] <= now]
        self._due_at |= {hook: now + hook.every_seconds for hook in due}
        self._next_due_at = min(self._due_at.values())
        return due

    def on_evaluate(self, state: State, metrics: Mapping[str, float]) -> Action:
        return self._call(self._on_evaluate, state, metrics)

    def on_epoch_end(self, state: State) -> Action:
        return self._call(self._on_epoch_end, state)

    def on_end(self, state: State, error: BaseException | None) -> None:
        """Call on_end of every callback, even if one of them raises. Raise the first error afterward."""
        first: Exception | None = None
        for callback in (*self._own, *self.users):
            try:
                callback.on_end(state, error)
            except Exception as failure:
                first = first or failure
        if first is not None:
            raise first

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the user callbacks by name. Callbacks without state are left out."""
        return {name: state for name, callback in self._named() if (state := callback.state_dict())}

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore the saved states. Return the names of callbacks that only the checkpoint or only this run has."""
        named = dict(self._named())
        for name, state in saved.items():
            if name in named:
                named[name].load_state_dict(state)
        have_state = {name for name, callback in named.items() if name in saved or callback.state_dict()}
        return sorted(have_state ^ {*saved})

    def _named(self) -> list[tuple[str, Callback]]:
        # Callbacks of the same class are numbered in order: "Sample", "Sample 2", ...
        counts: dict[str, int] = {}
        named = []
        for callback in self.users:
            name = type(callback).__qualname__
            counts[name] = counts.get(name, 0) + 1
            named.append((name if counts[name] == 1 else f"{name} {counts[name]}", callback))
        return named

    def _hooks(self, method: str) -> list["_Hook"]:
        """Return the callbacks' implementations of a method, skipping those that do not override it."""
        base = getattr(Callback, method)
        return [
            _Hook(getattr(callback, method), is_users, callback.every_seconds)
            for callbacks, is_users in ((self._own, False), (self.users, True))
            for callback in callbacks
            if getattr(type(callback), method) is not base
        ]

    def _call(self, hooks: "list[_Hook]", *arguments: Any) -> Action:
        merged = Action.NONE
        for call, is_users, _ in hooks:
            try:
                action = call(*arguments)
                if action is None or action is Action.NONE:
                    continue
                action = _check_action(action)
            except Exception as error:
                # An exception in a user callback must not lose the step: the loop first saves and stops, then raises.
                if not is_users:
                    raise
                name = type(getattr(call, "__self__", call)).__qualname__
                self.failure = self.failure or (name, error)
                action = Action.STOP(f"the callback {name} failed: {type(error).__name__}: {error}")
            merged = merged | action
        return merged


def _check_action(returned: Any) -> Action:
    if isinstance(returned, Action):
        return returned
    raise UsageError(
        "a callback returned something other than an Action",
        got=repr(returned)[:80],
        try_='return whet.Action.STOP("why"), whet.Action.SAVE, or nothing',
    )


def _check_callbacks(callbacks: Iterable[Any]) -> None:
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UsageError(
                "a callback must be an instance of whet.Callback",
                got=repr(callback)[:80],
                try_="class MyCallback(whet.Callback), then callbacks=[MyCallback()]",
            )
