"""Where did the time of a run go?"""

from collections.abc import Mapping

from whet.base.record import Record

_WORDS = {
    "data": "waiting for the next samples",
    "transfer": "copying samples to the device",
    "forward": "computing the loss",
    "backward": "computing the gradients",
    "optimizer": "updating the weights",
    "evaluate": "measuring how good the model is",
    "save": "standing still for checkpoints",
    "rest": "pausing to cool down",
}


class Phase(Record):
    """One part of the time."""

    name: str
    seconds: float
    share: float
    words: str


def phases(seconds: Mapping[str, float]) -> tuple[Phase, ...]:
    """The parts in the order of a step, known ones first, with their shares of the whole."""
    whole = sum(seconds.values())
    if whole <= 0:
        return ()
    names = [*(name for name in _WORDS if name in seconds), *(name for name in seconds if name not in _WORDS)]
    return tuple(
        Phase(name=name, seconds=seconds[name], share=seconds[name] / whole, words=_WORDS.get(name, ""))
        for name in names
    )
