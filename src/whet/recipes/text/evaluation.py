"""The classification loss and metrics."""

from collections.abc import Iterator
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from whet.base.errors import WhetError
from whet.data.batch import MicroBatch, Packed, Padded

if TYPE_CHECKING:
    from whet.data.batch import Field, MicroBatch
    from whet.recipes.text.data import TextData
    from whet.recipes.text.factory import Classifier


def classification_loss(logits: Tensor, micro: MicroBatch) -> Tensor | tuple[Tensor, Tensor]:
    """The mean over texts; with class weights the pair (weighted sum, sum of weights), whatever the micro-batch."""
    losses = per_text_loss(logits, micro.label, reduced=False)
    if "weight" not in micro.fields:
        return losses.mean()
    return (losses * micro.weight).sum(), micro.weight.sum()


def per_text_loss(logits: Tensor, label: Tensor, *, reduced: bool = True) -> Tensor:
    """The loss of each text; not reduced, of each class of each text where it may have several."""
    if label.dim() == 1:
        return functional.cross_entropy(logits, label, reduction="none")
    losses = functional.binary_cross_entropy_with_logits(logits, label.to(logits.dtype), reduction="none")
    return losses.mean(1) if reduced else losses


def probabilities(logits: Tensor, *, is_multi_label: bool) -> Tensor:
    """The probability of each class."""
    return torch.sigmoid(logits) if is_multi_label else logits.softmax(1)


NUM_BINS: Final = 15
"""Of the calibration error, all equally wide (Guo et al. 2017, "On Calibration of Modern Neural Networks")."""
MAX_CONFUSION_CLASSES: Final = 1_000
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
        if not is_multi_label and num_classes <= MAX_CONFUSION_CLASSES:
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
        check_finite(shares)
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
            "precision": _ratio(found, self._answered),
            "recall": _ratio(found, self.support),
            "f1": _ratio(2 * found, self._answered + self.support),
            "support": self.support.tolist(),
        }

    def _fill_bins(self, shares: Array, is_right: Array) -> None:
        places = np.minimum((shares * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        for row, weights in zip(self._bins, (None, shares, is_right), strict=True):
            row += np.bincount(places, weights=weights, minlength=NUM_BINS)


def check_finite(shares: Array) -> None:
    """The likeliest of classes without a probability would be the first one, by its place."""
    if not np.isfinite(shares).all():
        raise WhetError(
            "the model's answers are not numbers",
            got="NaN instead of a probability",
            try_="an earlier checkpoint; a lower lr, or precision=fp32",
        )


def _ratio(parts: Array, wholes: Array) -> list[float]:
    shares: list[float] = np.divide(parts, wholes, out=np.zeros(len(parts)), where=wholes > 0).tolist()
    return shares


NUM_SAMPLES = 8


class Mistake(NamedTuple):
    """A text that was judged wrong."""

    conviction: float
    """How far the worst of its classes was from the truth, in probability."""
    micro: "MicroBatch"
    row: int
    expected: tuple[int, ...]
    predicted: tuple[int, ...]


def evaluate(model: "Classifier", micro_batches: Iterator["MicroBatch"], data: "TextData | None") -> dict[str, Any]:
    """Metrics, the scores of each class, the confusion matrix and the clearest mistakes.

    `data` knows the names of the classes and the words. Where a text may have several classes there is no matrix: none
    was taken for another.
    """
    return conclude([tally(model, micro_batches, data)], data)


def tally(model: "Classifier", micro_batches: Iterator["MicroBatch"], data: "TextData | None") -> dict[str, Any]:
    """What is known of these texts, as plain JSON: several processes may tally a part each."""
    loss = 0.0
    scores: Scores | None = None
    mistakes: list[Mistake] = []
    for micro in micro_batches:
        logits, label = model(micro.tokens), micro.label
        loss += float(per_text_loss(logits, label).sum())
        is_single, num_classes = label.dim() == 1, logits.shape[1]
        if scores is None:
            scores = Scores(num_classes, is_multi_label=not is_single)
        # On the CPU: not every device has float64, and a tie that rounding makes is no answer.
        found = probabilities(logits.float().cpu().double(), is_multi_label=not is_single).numpy()
        truth = label.cpu().numpy()
        is_right = scores.add(found, truth)
        answers = found > 0.5
        if is_single:
            truth, answers = (np.arange(num_classes) == chosen[:, None] for chosen in (truth, found.argmax(1)))
        for row in np.flatnonzero(~is_right):
            worst = float(np.abs(found[row] - truth[row]).max())
            classes = (tuple(np.flatnonzero(chosen[row] > 0.5).tolist()) for chosen in (truth, answers))
            mistakes.append(Mistake(worst, micro, int(row), *classes))
        mistakes = nlargest(NUM_SAMPLES, mistakes, key=_rank)
    clearest = [] if data is None else [(_rank(mistake), _show_mistake(mistake, data)) for mistake in mistakes]
    return {"loss": loss, "scores": None if scores is None else scores.as_json(), "mistakes": clearest}


def conclude(tallies: list[dict[str, Any]], data: "TextData | None") -> dict[str, Any]:
    """What tallies over different texts say together."""
    counted = [told["scores"] for told in tallies if told["scores"] is not None]
    assert counted, "an evaluation has texts"
    scores = Scores(counted[0]["num_classes"], is_multi_label=counted[0]["is_multi_label"])
    for counts in counted:
        scores.take(counts)
    loss = sum(told["loss"] for told in tallies)
    told: dict[str, Any] = {**scores.metrics(), "cross_entropy": loss / scores.num_texts}
    if data is None:
        return told
    told["classes"] = {"labels": list(data.classes), **scores.classes()}
    if scores.confusion is not None:
        told["confusion"] = {"labels": list(data.classes), "counts": scores.confusion.tolist()}
    mistakes = [(tuple(rank), shown) for part in tallies for rank, shown in part["mistakes"]]
    told["samples"] = [shown for _, shown in nlargest(NUM_SAMPLES, mistakes, key=lambda mistake: mistake[0])]
    return told


def _rank(mistake: Mistake) -> tuple[float, int]:
    return mistake.conviction, -int(mistake.micro.ids[mistake.row])


def _show_mistake(mistake: Mistake, data: "TextData") -> dict[str, Any]:
    return {
        "input": data.tokenizer.decode(_tokens(mistake.micro.tokens, mistake.row)).strip(),
        "expected": ", ".join(data.classes[place] for place in mistake.expected),
        "predicted": ", ".join(data.classes[place] for place in mistake.predicted),
        "conviction": mistake.conviction,
    }


def _tokens(field: "Field", row: int) -> list[int]:
    if isinstance(field, Packed):
        ids: list[int] = field.values[field.starts[row] : field.starts[row + 1]].tolist()
    elif isinstance(field, Padded):
        ids = field.values[row, : field.lengths[row]].tolist()
    else:
        ids = field[row].tolist()
    return ids
