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
"""Of the texts that wait for their batch together: what is held at once does not grow with the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A question, and what the model says; None for a question that is none."""

    question: TextQuery
    verdict: dict[str, Any] | None


class Answering:
    """Answers with a model that has its weights; `put` brings a batch to where the model is."""

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
        """Whether the model was trained on pairs; None for a run that does not say."""
        self.columns = columns
        """Those that the training named."""
        self._signs = SEPARATORS if separator == AUTO else () if separator is None else (separator,)
        self._model = model
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._put: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def use(self, device: AbstractDevice) -> None:
        """From now on the model computes there."""
        device.put_model(self._model)
        self._put = device.put

    def __call__(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """The verdicts on texts: label, probability, and the probability of every class.

        A model of pairs takes the texts in twos.
        """
        if not self.has_pairs:
            asked = [TextQuery(row=str(row), text=text) for row, text in enumerate(texts, start=1)]
        elif len(texts) % 2:
            raise UsageError(
                "the run was trained on pairs of texts", got=f"{len(texts)} texts", try_='"first text" "second text"'
            )
        else:
            both = zip(texts[::2], texts[1::2], strict=True)
            asked = [TextQuery(row=str(row), text=text, pair=pair) for row, (text, pair) in enumerate(both, start=1)]
        return [answer.verdict for answer in self.answers(asked) if answer.verdict is not None]

    def answers(
        self, questions: Iterable[TextQuery], *, batch: int = BATCH_SIZE, scores: Scores | None = None
    ) -> Iterator[Answered]:
        """Every question with its verdict, in order; those whose classes are known count in `scores`."""
        waiting = iter(questions)
        while window := _window(waiting, size=max(_MIN_WINDOW, _WINDOW_BATCHES * batch)):
            whole = [question for question in window if question.fault is None]
            found = self._shares(whole, batch=batch)
            if scores is not None:
                truths = [self.truth(question) for question in whole]
                known = [place for place, truth in enumerate(truths) if truth is not None]
                if known:
                    scores.add([found[place] for place in known], [truths[place] for place in known])
            rows = iter(found)
            for question in window:
                verdict = None if question.fault is not None else self._verdict(next(rows))
                yield Answered(question=question, verdict=verdict)

    def truth(self, question: TextQuery) -> int | list[float] | None:
        """The class that a question names, as scores want it; None where it names none that the model knows."""
        if question.labels is None:
            return None
        names = self._known(question.labels)
        if names is None or (not self.is_multi_label and len(names) != 1):
            return None
        if self.is_multi_label:
            return [float(name in names) for name in self.classes]
        return self.classes.index(names[0])

    def _known(self, labels: tuple[str, ...]) -> list[str] | None:
        """The classes that labels name; one label may join several with a sign, as it did in training."""
        if all(label in self.classes for label in labels):
            return list(labels)
        if not self.is_multi_label or len(labels) != 1:
            return None
        for sign in self._signs:
            names = split_label(labels[0], sign)
            if names and all(name in self.classes for name in names):
                return names
        return None

    def _shares(self, questions: Sequence[TextQuery], *, batch: int) -> list[list[float]]:
        if not questions:
            return []
        column = token_column(
            [question.text for question in questions],
            pairs=[question.pair or "" for question in questions] if questions[0].pair is not None else (),
            tokenizer=self._tokenizer,
            max_length=self._max_length,
        )
        order = column.lengths.argsort(stable=True)
        found: list[list[float]] = [[]] * len(questions)
        with torch.inference_mode():
            for rows in order.split(batch):
                longest = int(column.lengths[rows].max())
                logits = self._model(column.padded(rows, length=longest).map_tensors(self._put))
                # As an evaluation does: on the CPU, and no tie that rounding makes.
                told = probabilities(logits.float().cpu().double(), is_multi_label=self.is_multi_label)
                check_finite(told.numpy())
                for row, values in zip(rows.tolist(), told.tolist(), strict=True):
                    found[row] = values
        return found

    def _verdict(self, row: Sequence[float]) -> dict[str, Any]:
        place = max(range(len(row)), key=lambda place: row[place])
        verdict: dict[str, Any] = {
            "label": self.classes[place],
            "probability": row[place],
            "probabilities": dict(zip(self.classes, row, strict=True)),
        }
        if self.is_multi_label:
            verdict["labels"] = [name for name, share in verdict["probabilities"].items() if share > 0.5]
        return verdict


def _window(questions: Iterator[TextQuery], *, size: int) -> list[TextQuery]:
    window: list[TextQuery] = []
    characters = 0
    for question in islice(questions, size):
        window.append(question)
        characters += len(question.text) + len(question.pair or "")
        if characters > _MAX_CHARACTERS:
            break
    return window
