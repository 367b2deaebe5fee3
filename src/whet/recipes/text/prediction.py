"""Predict the classes of texts in batches of similar length."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn

from whet.base.errors import UsageError
from whet.device.abstract import AbstractDevice
from whet.recipes.text.data import AnyTokenizer, token_column
from whet.recipes.text.evaluation import Scores, check_finite, probabilities
from whet.recipes.text.prediction_files import TextQuery
from whet.recipes.text.readers.samples import AUTO, SEPARATORS, ColumnOverrides, split_label

BATCH_SIZE: Final = 64
_MIN_WINDOW: Final = 1_024
_WINDOW_BATCHES: Final = 16
_MAX_CHARACTERS: Final = 32 * 1024**2
"""The maximum number of characters in a window of queries sorted by length. Bounds the memory for large files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A query and its result. The result is None if the query has an error."""

    query: TextQuery
    result: dict[str, Any] | None


class TextPredictor:
    """Predicts classes with a trained model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: AnyTokenizer,
        classes: Sequence[str],
        max_length: int,
        is_multi_label: bool,
        has_pairs: bool | None,
        columns: ColumnOverrides,
        separator: str | None = AUTO,
    ) -> None:
        self.classes = tuple(classes)
        self.is_multi_label = is_multi_label
        self.has_pairs = has_pairs
        """Whether the model was trained on pairs; None if the run does not record it."""
        self.columns = columns
        """The column options of the training run."""
        self._separators = SEPARATORS if separator == AUTO else () if separator is None else (separator,)
        self._model = model
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._put: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def to(self, device: AbstractDevice) -> None:
        """Move the model to a device."""
        device.put_model(self._model)
        self._put = device.put

    def __call__(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return the label, its probability and the probabilities of all classes for each text.

        If the model was trained on pairs, every two consecutive texts form a pair.
        """
        if not self.has_pairs:
            queries = [TextQuery(row=str(row), text=text) for row, text in enumerate(texts, start=1)]
        elif len(texts) % 2:
            raise UsageError(
                "the run was trained on pairs of texts", got=f"{len(texts)} texts", try_='"first text" "second text"'
            )
        else:
            pairs = zip(texts[::2], texts[1::2], strict=True)
            queries = [TextQuery(row=str(row), text=text, pair=pair) for row, (text, pair) in enumerate(pairs, start=1)]
        return [prediction.result for prediction in self.predict(queries) if prediction.result is not None]

    def predict(
        self, queries: Iterable[TextQuery], *, batch_size: int = BATCH_SIZE, scores: Scores | None = None
    ) -> Iterator[Prediction]:
        """Yield the prediction for each query, in order. Labeled queries are added to `scores`."""
        remaining = iter(queries)
        while window := _next_window(remaining, size=max(_MIN_WINDOW, _WINDOW_BATCHES * batch_size)):
            valid = [query for query in window if query.error is None]
            predicted = self._probabilities(valid, batch_size=batch_size)
            if scores is not None:
                truths = [self.truth(query) for query in valid]
                known = [index for index, truth in enumerate(truths) if truth is not None]
                if known:
                    scores.add([predicted[index] for index in known], [truths[index] for index in known])
            # Only valid queries have results; `next` keeps them aligned with the window.
            rows = iter(predicted)
            for query in window:
                yield Prediction(query=query, result=None if query.error is not None else self._result(next(rows)))

    def truth(self, query: TextQuery) -> int | list[float] | None:
        """Return the class of a query in the form that `Scores.add` accepts; None if it is unlabeled or unknown."""
        if query.labels is None:
            return None
        names = self._known_classes(query.labels)
        if names is None or (not self.is_multi_label and len(names) != 1):
            return None
        if self.is_multi_label:
            return [float(name in names) for name in self.classes]
        return self.classes.index(names[0])

    def _known_classes(self, labels: tuple[str, ...]) -> list[str] | None:
        """Return the classes in `labels`, or None if one is unknown.

        A label may contain several classes joined by the separator.
        """
        if all(label in self.classes for label in labels):
            return list(labels)
        if not self.is_multi_label or len(labels) != 1:
            return None
        for separator in self._separators:
            names = split_label(labels[0], separator)
            if names and all(name in self.classes for name in names):
                return names
        return None

    def _probabilities(self, queries: Sequence[TextQuery], *, batch_size: int) -> list[list[float]]:
        if not queries:
            return []
        column = token_column(
            [query.text for query in queries],
            pairs=[query.pair or "" for query in queries] if queries[0].pair is not None else (),
            tokenizer=self._tokenizer,
            max_length=self._max_length,
        )
        # Sort by length: batches of similar length have little padding.
        order = column.lengths.argsort(stable=True)
        predicted: list[list[float]] = [[]] * len(queries)
        with torch.inference_mode():
            for rows in order.split(batch_size):
                longest = int(column.lengths[rows].max())
                logits = self._model(column.padded(rows, length=longest).map_tensors(self._put))
                batch = probabilities(logits, is_multi_label=self.is_multi_label)
                check_finite(batch.numpy())
                for row, values in zip(rows.tolist(), batch.tolist(), strict=True):
                    predicted[row] = values
        return predicted

    def _result(self, row: Sequence[float]) -> dict[str, Any]:
        best = max(range(len(row)), key=lambda index: row[index])
        result: dict[str, Any] = {
            "label": self.classes[best],
            "probability": row[best],
            "probabilities": dict(zip(self.classes, row, strict=True)),
        }
        if self.is_multi_label:
            result["labels"] = [name for name, probability in result["probabilities"].items() if probability > 0.5]
        return result


def _next_window(queries: Iterator[TextQuery], *, size: int) -> list[TextQuery]:
    """Return the next queries, limited by number and by characters."""
    window: list[TextQuery] = []
    characters = 0
    for query in islice(queries, size):
        window.append(query)
        characters += len(query.text) + len(query.pair or "")
        if characters > _MAX_CHARACTERS:
            break
    return window
