"""Early stopping: end a run that no longer improves."""

from collections.abc import Mapping

from whet.training.callback import Action, Callback, State


class EarlyStopping(Callback):
    """Ends the run after `patience` evaluations without a better goal."""

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_evaluate(self, state: State, metrics: Mapping[str, float]) -> Action:  # noqa: ARG002
        # The state remembers it, so that a resumed run is finished as well. Every rank has the same score.
        state.ended_early = state.num_worse >= self.patience
        return Action.NONE
