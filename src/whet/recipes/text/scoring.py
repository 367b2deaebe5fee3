"""How good are answers, class by class, and how far can their probabilities be trusted? Counted batch by batch.

Every score comes from counts that grow with the number of classes and not of texts, so a file of any length can be
scored. Classes that neither occur nor are answered are left out of a mean over classes, as scikit-learn does.
"""

from typing import Any, Final

import numpy as np

from whet.base.errors import WhetError

NUM_BINS: Final = 15
"""Of the calibration error, all equally wide (Guo et al. 2017, "On Calibration of Modern Neural Networks")."""
MOST_CONFUSED: Final = 1_000
"""Of more classes there is no matrix: it has a cell for each two of them."""

Array = Any
"""An array of numpy."""


class Scores:
    """Sums over texts with known classes; ask `metrics` when all are added."""

    def __init__(self, num_classes: int, *, is_multi_label: bool) -> None:
        self.is_multi_label = is_multi_label
        self.num_texts = 0
        self.confusion: Array = None
        """A row for each true class, a column for what it was taken for; None where a text may have several."""
        if not is_multi_label and num_classes <= MOST_CONFUSED:
            self.confusion = np.zeros((num_classes, num_classes), dtype=np.int64)
        self._num_classes = num_classes
        self._num_right = 0
        self._squares = 0.0
        # Per class: texts of it that were found, texts that it was the answer to, texts of it.
        self._found, self._answered, self.support = np.zeros((3, num_classes), dtype=np.int64)
        # Per bin: how many answers, the sum of their probabilities, how many were right.
        self._bins = np.zeros((3, NUM_BINS))

    def add(self, shares: Array, truth: Array) -> Array:
        """Takes in the probabilities (texts, classes) and class numbers (texts), or zeros and ones (texts, classes).

        Gives back which texts were judged right: their class is the likeliest, or exactly their classes are likely.
        """
        shares = np.asarray(shares, dtype=np.float64)
        truth = np.asarray(truth)
        refuse_no_numbers(shares)
        if self.is_multi_label:
            is_true, is_answer = truth > 0.5, shares > 0.5
            is_right = (is_true == is_answer).all(1)
            # Each class of each text is a question of its own, answered with a probability.
            self._squares += float(((shares - is_true) ** 2).mean(1).sum())
            self._fill_bins(shares.ravel(), is_true.ravel())
        else:
            answers = shares.argmax(1)
            is_right = answers == truth
            is_true, is_answer = (np.arange(self._num_classes) == chosen[:, None] for chosen in (truth, answers))
            self._squares += float(((shares - is_true) ** 2).sum())
            self._fill_bins(shares.max(1), is_right)
            if self.confusion is not None:
                np.add.at(self.confusion, (truth, answers), 1)
        self.num_texts += len(shares)
        self._num_right += int(is_right.sum())
        self._found += (is_true & is_answer).sum(0)
        self._answered += is_answer.sum(0)
        self.support += is_true.sum(0)
        return is_right

    def as_json(self) -> dict[str, Any]:
        """All sums so far, for who puts them together with others."""
        confusion = None if self.confusion is None else self.confusion.tolist()
        sums = {"num_texts": self.num_texts, "num_right": self._num_right, "squares": self._squares}
        counts = {"found": self._found, "answered": self._answered, "support": self.support, "bins": self._bins}
        return {
            "num_classes": self._num_classes,
            "is_multi_label": self.is_multi_label,
            **sums,
            "confusion": confusion,
            **{name: array.tolist() for name, array in counts.items()},
        }

    def take(self, other: dict[str, Any]) -> None:
        """Adds the sums over other texts."""
        self.num_texts += other["num_texts"]
        self._num_right += other["num_right"]
        self._squares += other["squares"]
        if self.confusion is not None:
            self.confusion += np.asarray(other["confusion"], dtype=np.int64)
        for array, name in ((self._found, "found"), (self._answered, "answered"), (self.support, "support")):
            array += np.asarray(other[name], dtype=np.int64)
        self._bins += np.asarray(other["bins"])

    def metrics(self) -> dict[str, float]:
        """The scores over all texts."""
        f1 = self.classes()["f1"]
        occurs = (self._answered + self.support) > 0
        both = int(self._answered.sum() + self.support.sum())
        counts, shares, right = self._bins
        return {
            "accuracy": self._num_right / self.num_texts,
            "macro_f1": float(np.mean(np.asarray(f1)[occurs])) if occurs.any() else 0.0,
            "micro_f1": 2 * int(self._found.sum()) / both if both else 0.0,
            "calibration_error": float(np.abs(shares - right).sum() / counts.sum()),
            "brier": self._squares / self.num_texts,
        }

    def classes(self) -> dict[str, list[float]]:
        """Precision, recall, F1 and support of each class; 0 where nothing was answered or nothing was there."""
        found = self._found.astype(np.float64)
        return {
            "precision": _shares(found, self._answered),
            "recall": _shares(found, self.support),
            "f1": _shares(2 * found, self._answered + self.support),
            "support": self.support.tolist(),
        }

    def _fill_bins(self, shares: Array, is_right: Array) -> None:
        places = np.minimum((shares * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        for row, weights in zip(self._bins, (None, shares, is_right), strict=True):
            row += np.bincount(places, weights=weights, minlength=NUM_BINS)


def refuse_no_numbers(shares: Array) -> None:
    """The likeliest of classes without a probability would be the first one, by its place."""
    if not np.isfinite(shares).all():
        raise WhetError(
            "the model's answers are not numbers",
            got="NaN instead of a probability",
            try_="an earlier checkpoint; a lower lr, or precision=fp32",
        )


def _shares(parts: Array, wholes: Array) -> list[float]:
    shares: list[float] = np.divide(parts, wholes, out=np.zeros(len(parts)), where=wholes > 0).tolist()
    return shares
