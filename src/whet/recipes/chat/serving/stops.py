"""At which texts does an answer end? What could still become one of them is held back until it is known."""

from collections.abc import Sequence


class Stops:
    """Takes pieces of an answer, gives what may be shown."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.has_come = False
        """Whether one of them was met: the answer is over."""

    def push(self, piece: str) -> str:
        """What is sure to belong to the answer.

        >>> stops = Stops(["END"])
        >>> stops.push("the E"), stops.push("NDLESS"), stops.has_come
        ('the ', '', True)
        """
        text, self._held = self._held + piece, ""
        places = [place for stop in self._texts if (place := text.find(stop)) >= 0]
        if places:
            self.has_come = True
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, and no stop came of it."""
        held, self._held = self._held, ""
        return "" if self.has_come else held


def _overlap(text: str, stop: str) -> int:
    """How many signs at the end of the text are a beginning of the stop."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
