"""What does a classifier say about a file, row by row, and how good is that? Streamed: memory does not grow with it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from whet.base.errors import UsageError
from whet.base.units import show_some
from whet.recipes.text.rows.columns import Wishes
from whet.recipes.text.using.predictions import FORMS, Form, prediction_lines
from whet.recipes.text.using.questions import Questions

if TYPE_CHECKING:
    from whet.recipes.text.scoring import Scores
    from whet.recipes.text.using.answering import Answered, Answering

_MOST_NAMED: Final = 10


class FileAnswers:
    """The answers to a file's rows as lines; when all are read, what there is to tell about them."""

    def __init__(
        self, answering: "Answering", path: Path, *, columns: Mapping[str, str | None], form: str | None, batch: int
    ) -> None:
        self._answering = answering
        self._batch = batch
        self._questions = Questions(path, Wishes(**columns), usual=answering.columns, has_pairs=answering.has_pairs)
        self.form = _form(form, otherwise="jsonl" if self._questions.is_json else "csv")
        self.num_rows = 0
        self.num_bad = 0
        self._bad_rows: list[str] = []
        self._num_unknown = 0
        self._scores: Scores | None = None

    def lines(self) -> Iterator[str]:
        """Line by line, in the order of the file."""
        from whet.recipes.text.scoring import Scores

        asked = self._answering
        self._scores = Scores(len(asked.classes), is_multi_label=asked.is_multi_label)
        answers = asked.answers(self._questions, batch=self._batch, scores=self._scores)
        return prediction_lines(
            self._counted(answers), self.form, classes=asked.classes, has_pairs=bool(asked.has_pairs)
        )

    def told(self) -> list[str]:
        """How the file was understood, and which rows could not be judged."""
        lines = [f"read {show_some(self.num_rows, 'row')} of {self._questions.told}", *self._bad_rows]
        if self.num_bad > len(self._bad_rows):
            lines.append(f"and {show_some(self.num_bad - len(self._bad_rows), 'more row')} that could not be judged")
        if self._num_unknown:
            lines.append(f"not scored: {show_some(self._num_unknown, 'row')} with a label that the run does not know")
        return lines

    def scored(self) -> list[str]:
        """The metrics and each class, where rows have labels."""
        scores = self._scores
        if scores is None or not scores.num_texts:
            return []
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.metrics().items())
        classes = scores.classes()
        cells = [("class", *classes)]
        for name, *numbers in zip(self._answering.classes, *classes.values(), strict=True):
            cells.append((name, *(f"{value:,}" if isinstance(value, int) else f"{value:.3f}" for value in numbers)))
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = [f"{show_some(scores.num_texts, 'row')} with labels: {shown}"]
        for name, *numbers in cells:
            shown = "  ".join(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
            lines.append(f"  {name:<{widths[0]}}  {shown}")
        return lines

    def _counted(self, answers: "Iterator[Answered]") -> "Iterator[Answered]":
        for answer in answers:
            self.num_rows += 1
            question = answer.question
            if answer.verdict is None:
                self.num_bad += 1
                if len(self._bad_rows) < _MOST_NAMED:
                    self._bad_rows.append(f"row {question.row} {question.fault}")
            elif question.labels is not None and self._answering.truth(question) is None:
                self._num_unknown += 1
            yield answer


def _form(wish: str | None, *, otherwise: Form) -> Form:
    if wish is None:
        return otherwise
    for form in FORMS:
        if wish == form:
            return form
    raise UsageError("no such format for answers", got=wish, try_=" or ".join(FORMS))
