"""Predict every row of a file, stream the results as CSV or JSON lines, and score labeled rows."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from whet.base.errors import UsageError, WhetError
from whet.base.units import format_plural
from whet.recipes.text.readers.rows import RowError, TextSource, read_header, read_lines
from whet.recipes.text.readers.samples import ColumnOverrides, SampleReader, TextSample, find_columns
from whet.recipes.text.readers.sources import column_names, find_sources
from whet.run.disk import open_regular_file

if TYPE_CHECKING:
    from whet.recipes.text.evaluation import Scores
    from whet.recipes.text.prediction import Answered, Answering


OutputFormat = Literal["csv", "jsonl"]
OUTPUT_FORMATS: tuple[OutputFormat, ...] = ("csv", "jsonl")
_FILE_STARTS = (b"row,text,", b'{"row": ')


def prediction_lines(
    answers: "Iterable[Answered]", form: OutputFormat, *, classes: Sequence[str], has_pairs: bool
) -> Iterator[str]:
    """Lines with their ends: of CSV a header first. A row that could not be read has an error and no label."""
    if form == "jsonl":
        for answer in answers:
            yield json.dumps(_record(answer), ensure_ascii=False, allow_nan=False) + "\n"
        return
    halves = ("text", "text_pair") if has_pairs else ("text",)
    yield _csv_line(["row", *halves, "label", "probability", *(f"p:{name}" for name in classes), "error"])
    for answer in answers:
        question, verdict = answer.question, answer.verdict
        texts = [question.text, question.pair or ""][: len(halves)]
        if verdict is None:
            yield _csv_line([question.row, *texts, "", "", *[""] * len(classes), question.fault or ""])
            continue
        label = "|".join(verdict["labels"]) if "labels" in verdict else verdict["label"]
        shares = (f"{verdict['probabilities'][name]:.7g}" for name in classes)
        yield _csv_line([question.row, *texts, label, f"{verdict['probability']:.7g}", *shares, ""])


def is_prediction_file(path: Path) -> bool:
    """Whether a file begins as our answers do (or is empty), so that newer ones may take its place."""
    try:
        with open_regular_file(path) as file:
            start = file.read(max(map(len, _FILE_STARTS)))
    except (OSError, WhetError):
        return False
    return not start or start.startswith(_FILE_STARTS)


def _record(answer: "Answered") -> dict[str, Any]:
    question = answer.question
    row: int | str = int(question.row) if question.row.isdecimal() else question.row
    if answer.verdict is None:
        return {"row": row, "error": question.fault}
    pair = {} if question.pair is None else {"text_pair": question.pair}
    return {"row": row, "text": question.text, **pair, **answer.verdict}


def _csv_line(cells: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


_TABLE_ENDINGS = (".csv", ".tsv", ".tab")
_MAX_ERROR_LENGTH = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class TextQuery:
    """A text to be judged, or the fault of a row that holds none."""

    row: str
    """The line it begins in, counted from 1; `12.3` for the third text of one row."""
    text: str = ""
    pair: str | None = None
    labels: tuple[str, ...] | None = None
    """What the file says that it is; None where it says nothing."""
    fault: str | None = None


class QueryReader:
    """The questions of a file, in its order; `told` says how it was understood once the first was read."""

    def __init__(
        self, path: Path, overrides: ColumnOverrides, *, usual: ColumnOverrides, has_pairs: bool | None
    ) -> None:
        """`overrides` are columns that you name now; `usual` those of the training, taken where the file has them."""
        if path.is_dir():
            raise UsageError("whet predict reads a file", got=f"{path} is a folder", try_="one of the files in it")
        (source,) = find_sources(path)
        # Rows to be judged need no label, as those of a test part.
        self._source = replace(source, part="test")
        self._is_plain = _is_plain(self._source, overrides, usual)
        self._has_pairs = has_pairs
        self._wishes = overrides if self._is_plain else self._columns_of(overrides, usual)
        self.is_json = source.form == "JSON lines"
        self.told: str = "plain text, one on each line" if self._is_plain else source.form
        if self._is_plain and has_pairs:
            raise _no_pairs(path, "plain text")

    def __iter__(self) -> Iterator[TextQuery]:
        if self._is_plain:
            yield from _plain_queries(self._source)
            return
        reader = SampleReader(self._source, self._wishes)
        for sample in reader:
            if reader.columns is not None:
                self.told = f"{self._source.form}; {reader.columns.told()}"
            has_label = reader.columns is not None and reader.columns.label is not None
            yield _query(sample, has_label=has_label)

    def _columns_of(self, overrides: ColumnOverrides, usual: ColumnOverrides) -> ColumnOverrides:
        source = self._source
        names = column_names(source)
        both = _present_columns(names, usual).model_copy(update=overrides.model_dump(exclude_none=True))
        if names:
            try:
                found = find_columns(names, both, path=source.path, needs_label=overrides.label is not None)
            except UsageError as error:
                # There the columns are keys, here they are options.
                try_ = re.sub(r"^(\w+)_column=", r"--\1-column ", error.try_ or "")
                raise UsageError(error.what, got=error.got, try_=try_) from None
            self._refuse_other_kind(found.pair)
        return both

    def _refuse_other_kind(self, pair: str | None) -> None:
        """A model of pairs needs both halves, and another one would overlook the second."""
        if self._has_pairs and pair is None:
            raise _no_pairs(self._source.path, "no column for the second text")
        if self._has_pairs is False and pair is not None:
            raise UsageError(
                "the run was trained on single texts",
                got=f"{self._source.path} has pairs, the second in {pair!r}",
                try_="--text-column NAME for the one to be judged",
            )


def _no_pairs(path: Path, got: str) -> UsageError:
    return UsageError(
        "the run was trained on pairs of texts", got=f"{path}: {got}", try_="a table, and --pair-column NAME"
    )


def _is_plain(source: TextSource, overrides: ColumnOverrides, usual: ColumnOverrides) -> bool:
    """Whether a file that might be a table is none: no column of its first line is known as a text."""
    if source.form not in ("CSV", "TSV") or source.path.suffix.lower() in _TABLE_ENDINGS or overrides.text is not None:
        return False
    try:
        _, names = read_header(source)
        find_columns(names, _present_columns(names, usual), path=source.path, needs_label=False)
    except UsageError:
        return True
    return False


def _present_columns(names: list[str], usual: ColumnOverrides) -> ColumnOverrides:
    """The usual columns, as far as there are such."""
    known = {name.strip().lower() for name in names}
    said = {what: name for what, name in usual.model_dump(exclude_none=True).items() if name.strip().lower() in known}
    return ColumnOverrides(**said)


def _plain_queries(source: TextSource) -> Iterator[TextQuery]:
    for line in read_lines(source):
        if line.fault is not None:
            yield TextQuery(row=str(line.number), fault=_describe_error(line.fault))
        elif line.text.strip():
            yield TextQuery(row=str(line.number), text=line.text.strip())


def _query(sample: TextSample, *, has_label: bool) -> TextQuery:
    row = f"{sample.row.line}.{sample.number}" if sample.number else str(sample.row.line)
    if sample.fault is not None:
        return TextQuery(row=row, fault=_describe_error(sample.fault))
    text, pair = sample.text.strip(), None if sample.pair is None else sample.pair.strip()
    if not text or pair == "":
        return TextQuery(row=row, fault="has an empty text")
    if not _is_writable(text) or not _is_writable(pair or ""):
        return TextQuery(row=row, fault="has half a character (a lone surrogate)")
    labels = sample.labels if has_label and (sample.labels or sample.is_list) else None
    return TextQuery(row=row, text=text, pair=pair, labels=labels)


def _is_writable(text: str) -> bool:
    """JSON may name halves of characters, which are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe_error(fault: RowError) -> str:
    return f"{fault.what}: {fault.got}"[:_MAX_ERROR_LENGTH]


_MAX_LISTED_ERRORS: Final = 10


class FilePredictions:
    """The answers to a file's rows as lines; when all are read, what there is to tell about them."""

    def __init__(
        self, answering: "Answering", path: Path, *, columns: Mapping[str, str | None], form: str | None, batch: int
    ) -> None:
        self._answering = answering
        self._batch = batch
        self._questions = QueryReader(
            path, ColumnOverrides(**columns), usual=answering.columns, has_pairs=answering.has_pairs
        )
        self.form = _output_format(form, otherwise="jsonl" if self._questions.is_json else "csv")
        self.num_rows = 0
        self.num_bad = 0
        self._bad_rows: list[str] = []
        self._num_unknown = 0
        self._scores: Scores | None = None

    def lines(self) -> Iterator[str]:
        """Line by line, in the order of the file."""
        from whet.recipes.text.evaluation import Scores

        asked = self._answering
        self._scores = Scores(len(asked.classes), is_multi_label=asked.is_multi_label)
        answers = asked.answers(self._questions, batch=self._batch, scores=self._scores)
        return prediction_lines(
            self._counted(answers), self.form, classes=asked.classes, has_pairs=bool(asked.has_pairs)
        )

    def told(self) -> list[str]:
        """How the file was understood, and which rows could not be judged."""
        lines = [f"read {format_plural(self.num_rows, 'row')} of {self._questions.told}", *self._bad_rows]
        if self.num_bad > len(self._bad_rows):
            lines.append(
                f"and {format_plural(self.num_bad - len(self._bad_rows), 'more row')} that could not be judged"
            )
        if self._num_unknown:
            lines.append(
                f"not scored: {format_plural(self._num_unknown, 'row')} with a label that the run does not know"
            )
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
        lines = [f"{format_plural(scores.num_texts, 'row')} with labels: {shown}"]
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
                if len(self._bad_rows) < _MAX_LISTED_ERRORS:
                    self._bad_rows.append(f"row {question.row} {question.fault}")
            elif question.labels is not None and self._answering.truth(question) is None:
                self._num_unknown += 1
            yield answer


def _output_format(wish: str | None, *, otherwise: OutputFormat) -> OutputFormat:
    if wish is None:
        return otherwise
    for form in OUTPUT_FORMATS:
        if wish == form:
            return form
    raise UsageError("no such format for answers", got=wish, try_=" or ".join(OUTPUT_FORMATS))
