"""The classification loss and the metrics of a classifier.

Every metric is computed from sums whose size depends on the number of classes, not on the number of texts. Files of any
length can therefore be scored, and several processes can add up their parts. Classes that neither occur nor are
predicted are excluded from means over classes, as in scikit-learn.
"""

from collections.abc import Iterator
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from whet.base.errors import WhetError
from whet.data.batch import DictBatch, Packed, Padded

if TYPE_CHECKING:
    from whet.data.batch import Field
    from whet.recipes.text.data import TextData
    from whet.recipes.text.factory import Classifier

NUM_BINS: Final = 15
"""Equally wide bins of the calibration error (Guo et al. 2017, "On Calibration of Modern Neural Networks")."""
MAX_CONFUSION_CLASSES: Final = 1_000
"""The maximum number of classes for a confusion matrix, which has a cell for each pair of classes."""
NUM_MISTAKES: Final = 8

Array = Any
"""A numpy array."""


# --- loss -------------------------------------------------------------------------------------------------------------


def classification_loss(
    logits: Tensor, micro: DictBatch, *, averages_over_texts: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the mean loss over texts. With class weights, return the pair (weighted sum, sum of weights).

    The pair makes the loss of a global batch independent of its split into micro-batches. Its quotient is the loss of
    torch's CrossEntropyLoss(weight=...), which divides by the weights in the batch: the more texts of a rare class a
    batch contains, the less each of them counts. With `averages_over_texts`, the weighted sum is divided by the number
    of texts instead.
    """
    losses = per_text_loss(logits, micro.label, reduced=False)
    if "weight" not in micro:
        return losses.mean()
    if averages_over_texts:
        return (losses * micro.weight).mean()
    return (losses * micro.weight).sum(), micro.weight.sum()


def per_text_loss(logits: Tensor, label: Tensor, *, reduced: bool = True) -> Tensor:
    """Return the loss of each text. With reduced=False, multi-label data keeps a loss per class, (texts, classes)."""
    if label.dim() == 1:
        return functional.cross_entropy(logits, label, reduction="none")
    losses = functional.binary_cross_entropy_with_logits(logits, label.to(logits.dtype), reduction="none")
    return losses.mean(1) if reduced else losses


def probabilities(logits: Tensor, *, is_multi_label: bool) -> Tensor:
    """Return the probability of each class, in float64 on the CPU.

    In float32, rounding would create ties between classes. Not every device supports float64, but the CPU does.
    """
    logits = logits.float().cpu().double()
    return torch.sigmoid(logits) if is_multi_label else logits.softmax(1)


# --- scores -----------------------------------------------------------------------------------------------------------


class Scores:
    """Sums over labeled texts, from which metrics are computed."""

    def __init__(self, num_classes: int, *, is_multi_label: bool) -> None:
        self.is_multi_label = is_multi_label
        self._num_classes = num_classes
        shapes: dict[str, tuple[int, ...]] = {
            "num_texts": (),
            "num_right": (),
            **dict.fromkeys(("true_positives", "predicted", "support"), (num_classes,)),
        }
        if not is_multi_label and num_classes <= MAX_CONFUSION_CLASSES:
            shapes["confusion"] = (num_classes, num_classes)
        self._sums: dict[str, Array] = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()}
        # For each bin: number of predictions, sum of their probabilities, number of correct predictions.
        self._sums |= {"squares": np.zeros(()), "bins": np.zeros((3, NUM_BINS))}

    @property
    def num_texts(self) -> int:
        return int(self._sums["num_texts"])

    @property
    def confusion(self) -> Array:
        """The confusion matrix, with true classes as rows; None for multi-label data or too many classes."""
        return self._sums.get("confusion")

    def add(self, probabilities: Array, truth: Array) -> Array:
        """Add predictions, and return a boolean array of the texts that were classified correctly.

        Args:
            probabilities: (texts, classes).
            truth: Class indices (texts), or zeros and ones (texts, classes) for multi-label data.
        """
        sums, probabilities, truth = self._sums, np.asarray(probabilities, dtype=np.float64), np.asarray(truth)
        # Check before counting, so that an error leaves the sums unchanged.
        check_finite(probabilities)
        if self.is_multi_label:
            is_true, is_predicted = truth > 0.5, probabilities > 0.5
            is_right = (is_true == is_predicted).all(1)
            # Each class of each text is a separate binary prediction.
            sums["squares"] += float(((probabilities - is_true) ** 2).mean(1).sum())
            self._fill_bins(probabilities.ravel(), is_true.ravel())
        else:
            predicted = probabilities.argmax(1)
            is_right = predicted == truth
            is_true, is_predicted = (one_hot(chosen, self._num_classes) for chosen in (truth, predicted))
            sums["squares"] += float(((probabilities - is_true) ** 2).sum())
            self._fill_bins(probabilities.max(1), is_right)
            if self.confusion is not None:
                # Use add.at, which counts repeated index pairs. Plain indexing would count each pair once.
                np.add.at(self.confusion, (truth, predicted), 1)
        sums["num_texts"] += len(probabilities)
        sums["num_right"] += is_right.sum()
        sums["true_positives"] += (is_true & is_predicted).sum(0)
        sums["predicted"] += is_predicted.sum(0)
        sums["support"] += is_true.sum(0)
        return is_right

    def as_json(self) -> dict[str, Any]:
        """Return all sums, for `merge` in another process."""
        sums = {name: array.tolist() for name, array in self._sums.items()}
        return {"num_classes": self._num_classes, "is_multi_label": self.is_multi_label, "sums": sums}

    def merge(self, other: dict[str, Any]) -> None:
        """Add the sums from `as_json` of another process."""
        for name, array in self._sums.items():
            array += np.asarray(other["sums"][name], dtype=array.dtype)

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all texts."""
        sums, f1 = self._sums, self.classes()["f1"]
        either = sums["predicted"] + sums["support"]
        occurs, both = either > 0, int(either.sum())
        counts, confidence, right = sums["bins"]
        return {
            "accuracy": int(sums["num_right"]) / self.num_texts,
            "macro_f1": float(np.mean(np.asarray(f1)[occurs])) if occurs.any() else 0.0,
            "micro_f1": 2 * int(sums["true_positives"].sum()) / both if both else 0.0,
            "calibration_error": float(np.abs(confidence - right).sum() / counts.sum()),
            "brier": float(sums["squares"]) / self.num_texts,
        }

    def classes(self) -> dict[str, list[float]]:
        """Return precision, recall, F1 and support of each class. A score is 0 if its denominator is 0."""
        hits, predicted, support = (self._sums[name] for name in ("true_positives", "predicted", "support"))
        return {
            "precision": _ratio(hits, predicted),
            "recall": _ratio(hits, support),
            "f1": _ratio(2 * hits, predicted + support),
            "support": support.tolist(),
        }

    def _fill_bins(self, confidence: Array, is_right: Array) -> None:
        # A probability of exactly 1 belongs to the last bin.
        bins = np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        for row, weights in zip(self._sums["bins"], (None, confidence, is_right), strict=True):
            row += np.bincount(bins, weights=weights, minlength=NUM_BINS)


def check_finite(probabilities: Array) -> None:
    """Raise an error for NaN, for which argmax would silently return the first class."""
    if not np.isfinite(probabilities).all():
        raise WhetError(
            "the model predicts NaN",
            got="NaN instead of a probability",
            try_="an earlier checkpoint; a lower lr, or precision=fp32",
        )


def one_hot(indices: Array, num_classes: int) -> Array:
    """Return class indices as a boolean matrix, (texts, classes)."""
    return np.arange(num_classes) == indices[:, None]


def _ratio(numerator: Array, denominator: Array) -> list[float]:
    ratio: list[float] = np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0).tolist()
    return ratio


# --- evaluation -------------------------------------------------------------------------------------------------------


class Mistake(NamedTuple):
    """A misclassified text."""

    error: float
    """The largest difference between the predicted probability of a class and its target, 0 or 1."""
    micro: DictBatch
    row: int
    expected: tuple[int, ...]
    predicted: tuple[int, ...]

    @property
    def rank(self) -> tuple[float, int]:
        """The sort key: larger errors first, then lower sample ids, so that batches do not affect the order."""
        return self.error, -int(self.micro.sample_ids[self.row])


def partial_metrics(model: "Classifier", micro_batches: Iterator[DictBatch], data: "TextData | None") -> dict[str, Any]:
    """Return the summed loss, the scores and the worst mistakes of this process's texts, as plain JSON."""
    loss = 0.0
    scores: Scores | None = None
    mistakes: list[Mistake] = []
    for micro in micro_batches:
        logits, label = model(micro.tokens), micro.label
        loss += float(per_text_loss(logits, label).sum())
        is_multi_label, num_classes = label.dim() != 1, logits.shape[1]
        if scores is None:
            scores = Scores(num_classes, is_multi_label=is_multi_label)
        predicted = probabilities(logits, is_multi_label=is_multi_label).numpy()
        truth = label.cpu().numpy()
        is_right = scores.add(predicted, truth)
        chosen = predicted > 0.5
        if not is_multi_label:
            truth, chosen = one_hot(truth, num_classes), one_hot(predicted.argmax(1), num_classes)
        for row in np.flatnonzero(~is_right):
            error = float(np.abs(predicted[row] - truth[row]).max())
            classes = (tuple(np.flatnonzero(matrix[row] > 0.5).tolist()) for matrix in (truth, chosen))
            mistakes.append(Mistake(error, micro, int(row), *classes))
        # Prune after every micro-batch, because a mistake holds a reference to its micro-batch.
        mistakes = nlargest(NUM_MISTAKES, mistakes, key=lambda mistake: mistake.rank)
    shown = [] if data is None else [(mistake.rank, _show_mistake(mistake, data)) for mistake in mistakes]
    return {"loss": loss, "scores": None if scores is None else scores.as_json(), "mistakes": shown}


def merge_metrics(parts: list[dict[str, Any]], data: "TextData | None") -> dict[str, Any]:
    """Return metrics, scores of each class, the confusion matrix and the worst mistakes of all processes.

    Class names and texts come from `data`. Without it, only metrics are returned. Multi-label data has no confusion
    matrix.
    """
    sums = [part["scores"] for part in parts if part["scores"] is not None]
    assert sums, "an evaluation has texts"
    scores = Scores(sums[0]["num_classes"], is_multi_label=sums[0]["is_multi_label"])
    for each in sums:
        scores.merge(each)
    loss = sum(part["loss"] for part in parts)
    result: dict[str, Any] = {**scores.metrics(), "cross_entropy": loss / scores.num_texts}
    if data is None:
        return result
    result["classes"] = {"labels": list(data.classes), **scores.classes()}
    if scores.confusion is not None:
        result["confusion"] = {"labels": list(data.classes), "counts": scores.confusion.tolist()}
    mistakes = [(tuple(rank), shown) for part in parts for rank, shown in part["mistakes"]]
    result["samples"] = [shown for _, shown in nlargest(NUM_MISTAKES, mistakes, key=lambda mistake: mistake[0])]
    return result


def _show_mistake(mistake: Mistake, data: "TextData") -> dict[str, Any]:
    return {
        "input": data.tokenizer.decode(_token_ids(mistake.micro.tokens, mistake.row)).strip(),
        "expected": ", ".join(data.classes[index] for index in mistake.expected),
        "predicted": ", ".join(data.classes[index] for index in mistake.predicted),
        "error": mistake.error,
    }


def _token_ids(field: "Field", row: int) -> list[int]:
    if isinstance(field, Packed):
        ids: list[int] = field.values[field.starts[row] : field.starts[row + 1]].tolist()
    elif isinstance(field, Padded):
        ids = field.values[row, : field.lengths[row]].tolist()
    else:
        ids = field[row].tolist()
    return ids
