"""Predict every row of a file, stream the results as CSV or JSON lines, and score labeled rows.

Rows are streamed, so memory does not grow with the file. This module does not import torch.
"""

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
    from whet.recipes.text.prediction import Prediction, TextPredictor

OutputFormat = Literal["csv", "jsonl"]
OUTPUT_FORMATS: tuple[OutputFormat, ...] = ("csv", "jsonl")
_FILE_STARTS = (b"row,text,", b'{"row": ')
_TABLE_SUFFIXES = (".csv", ".tsv", ".tab")
_MAX_ERROR_LENGTH: Final = 200
_MAX_LISTED_ERRORS: Final = 10


# --- input ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TextQuery:
    """A text to classify, or the error of a row that has no readable text."""

    row: str
    """The line on which the row begins, from 1. `12.3` is the third text of the row in line 12."""
    text: str = ""
    pair: str | None = None
    labels: tuple[str, ...] | None = None
    """The labels in the file; None if the file has none."""
    error: str | None = None


class QueryReader:
    """Reads the texts of a file: rows of a table, JSON lines, or one text per line."""

    def __init__(
        self, path: Path, overrides: ColumnOverrides, *, trained_on: ColumnOverrides, has_pairs: bool | None
    ) -> None:
        """Detect the format.

        Args:
            overrides: Columns named on the command line.
            trained_on: Columns named for the training run, used if the file has them.
            has_pairs: Whether the model was trained on pairs; None if unknown.
        """
        if path.is_dir():
            raise UsageError("whet predict reads one file", got=f"{path} is a folder", try_="one of the files in it")
        (source,) = find_sources(path)
        # Read the file as a test split, whose rows need no label.
        self._source = replace(source, split="test")
        self._is_plain = _is_plain_text(self._source, overrides, trained_on)
        self._has_pairs = has_pairs
        self._overrides = overrides if self._is_plain else self._resolve_columns(overrides, trained_on)
        self.is_json = source.format == "JSON lines"
        self.description: str = "plain text, one per line" if self._is_plain else source.format
        """The format, and the columns once the first row has been read."""
        if self._is_plain and has_pairs:
            raise _no_pairs_error(path, "plain text")

    def __iter__(self) -> Iterator[TextQuery]:
        if self._is_plain:
            yield from _plain_queries(self._source)
            return
        reader = SampleReader(self._source, self._overrides)
        for sample in reader:
            if reader.columns is not None:
                self.description = f"{self._source.format}; {reader.columns.describe()}"
            has_label = reader.columns is not None and reader.columns.label is not None
            yield _query(sample, has_label=has_label)

    def _resolve_columns(self, overrides: ColumnOverrides, trained_on: ColumnOverrides) -> ColumnOverrides:
        source = self._source
        names = column_names(source)
        # Columns from the command line take precedence over those of the training run.
        resolved = _present_columns(names, trained_on).model_copy(update=overrides.model_dump(exclude_none=True))
        if names:
            try:
                columns = find_columns(names, resolved, path=source.path, needs_label=overrides.label is not None)
            except UsageError as error:
                # Translate the hint: columns are KEY=VALUE options in training, and flags here.
                try_ = re.sub(r"^(\w+)_column=", r"--\1-column ", error.try_ or "")
                raise UsageError(error.what, got=error.got, try_=try_) from None
            self._check_pairs(columns.pair)
        return resolved

    def _check_pairs(self, pair: str | None) -> None:
        """Require a second text if the model was trained on pairs. Otherwise reject it: it would be ignored."""
        if self._has_pairs and pair is None:
            raise _no_pairs_error(self._source.path, "no column for the second text")
        if self._has_pairs is False and pair is not None:
            raise UsageError(
                "the run was trained on single texts",
                got=f"{self._source.path} has pairs, the second text in {pair!r}",
                try_="--text-column NAME for the text to predict",
            )


def _no_pairs_error(path: Path, got: str) -> UsageError:
    return UsageError(
        "the run was trained on pairs of texts", got=f"{path}: {got}", try_="a table, and --pair-column NAME"
    )


def _is_plain_text(source: TextSource, overrides: ColumnOverrides, trained_on: ColumnOverrides) -> bool:
    """Return whether a file that looks like a table is plain text: its first line names no text column."""
    is_table = source.path.suffix.lower() in _TABLE_SUFFIXES or overrides.text is not None
    if source.format not in ("CSV", "TSV") or is_table:
        return False
    try:
        _, names = read_header(source)
        find_columns(names, _present_columns(names, trained_on), path=source.path, needs_label=False)
    except UsageError:
        return True
    return False


def _present_columns(names: list[str], overrides: ColumnOverrides) -> ColumnOverrides:
    """Return the column overrides of the training run that name a column of this file."""
    known = {name.strip().lower() for name in names}
    given = overrides.model_dump(exclude_none=True)
    return ColumnOverrides(**{role: name for role, name in given.items() if name.strip().lower() in known})


def _plain_queries(source: TextSource) -> Iterator[TextQuery]:
    for line in read_lines(source):
        if line.error is not None:
            yield TextQuery(row=str(line.number), error=_error_text(line.error))
        elif line.text.strip():
            yield TextQuery(row=str(line.number), text=line.text.strip())


def _query(sample: TextSample, *, has_label: bool) -> TextQuery:
    row = f"{sample.row.line}.{sample.number}" if sample.number else str(sample.row.line)
    if sample.error is not None:
        return TextQuery(row=row, error=_error_text(sample.error))
    text, pair = sample.text.strip(), None if sample.pair is None else sample.pair.strip()
    if not text or pair == "":
        return TextQuery(row=row, error="has an empty text")
    if not _is_encodable(text) or not _is_encodable(pair or ""):
        return TextQuery(row=row, error="has a lone surrogate (half a character)")
    labels = sample.labels if has_label and (sample.labels or sample.is_list) else None
    return TextQuery(row=row, text=text, pair=pair, labels=labels)


def _is_encodable(text: str) -> bool:
    """Return whether UTF-8 can encode a text. JSON can contain escaped lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _error_text(error: RowError) -> str:
    return f"{error.what}: {error.got}"[:_MAX_ERROR_LENGTH]


# --- output -----------------------------------------------------------------------------------------------------------


class FilePredictions:
    """The predictions for a file as output lines. Notes and scores are complete once all lines have been read."""

    def __init__(
        self,
        predictor: "TextPredictor",
        path: Path,
        *,
        columns: Mapping[str, str | None],
        output_format: str | None,
        batch_size: int,
    ) -> None:
        self._predictor = predictor
        self._batch_size = batch_size
        self._queries = QueryReader(
            path, ColumnOverrides(**columns), trained_on=predictor.columns, has_pairs=predictor.has_pairs
        )
        self._format = _output_format(output_format, default="jsonl" if self._queries.is_json else "csv")
        self.num_rows = 0
        self.num_failed = 0
        self._errors: list[str] = []
        self._num_unknown = 0
        self._scores: Scores | None = None

    def lines(self) -> Iterator[str]:
        """Yield the output lines in file order."""
        from whet.recipes.text.evaluation import Scores

        predictor = self._predictor
        self._scores = Scores(len(predictor.classes), is_multi_label=predictor.is_multi_label)
        predictions = predictor.predict(self._queries, batch_size=self._batch_size, scores=self._scores)
        return prediction_lines(
            self._count(predictions),
            self._format,
            classes=predictor.classes,
            has_pairs=bool(predictor.has_pairs),
        )

    def notes(self) -> list[str]:
        """Return notes about how the file was interpreted and which rows failed."""
        lines = [f"read {format_plural(self.num_rows, 'row')} of {self._queries.description}", *self._errors]
        if self.num_failed > len(self._errors):
            lines.append(f"and {format_plural(self.num_failed - len(self._errors), 'more row')} without a prediction")
        if self._num_unknown:
            lines.append(
                f"not scored: {format_plural(self._num_unknown, 'row')} with a label that the run does not know"
            )
        return lines

    def score_lines(self) -> list[str]:
        """Return the metrics and a table of the classes; empty if no row has a label."""
        scores = self._scores
        if scores is None or not scores.num_texts:
            return []
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in scores.metrics().items())
        classes = scores.classes()
        table = [("class", *classes)]
        for name, *values in zip(self._predictor.classes, *classes.values(), strict=True):
            table.append((name, *(f"{value:,}" if isinstance(value, int) else f"{value:.3f}" for value in values)))
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        lines = [f"{format_plural(scores.num_texts, 'row')} with labels: {metrics}"]
        for name, *cells in table:
            row = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            lines.append(f"  {name:<{widths[0]}}  {row}")
        return lines

    def _count(self, predictions: "Iterator[Prediction]") -> "Iterator[Prediction]":
        for prediction in predictions:
            self.num_rows += 1
            query = prediction.query
            if prediction.result is None:
                self.num_failed += 1
                if len(self._errors) < _MAX_LISTED_ERRORS:
                    self._errors.append(f"row {query.row} {query.error}")
            elif query.labels is not None and self._predictor.truth(query) is None:
                self._num_unknown += 1
            yield prediction


def _output_format(given: str | None, *, default: OutputFormat) -> OutputFormat:
    if given is None:
        return default
    for output_format in OUTPUT_FORMATS:
        if given == output_format:
            return output_format
    raise UsageError("no such output format", got=given, try_=" or ".join(OUTPUT_FORMATS))


def prediction_lines(
    predictions: "Iterable[Prediction]", output_format: OutputFormat, *, classes: Sequence[str], has_pairs: bool
) -> Iterator[str]:
    """Yield lines with their endings, starting with a header for CSV. A failed row has an error and no label."""
    if output_format == "jsonl":
        for prediction in predictions:
            yield json.dumps(_record(prediction), ensure_ascii=False, allow_nan=False) + "\n"
        return
    text_columns = ("text", "text_pair") if has_pairs else ("text",)
    yield _csv_line(["row", *text_columns, "label", "probability", *(f"p:{name}" for name in classes), "error"])
    for prediction in predictions:
        query, result = prediction.query, prediction.result
        texts = [query.text, query.pair or ""][: len(text_columns)]
        if result is None:
            yield _csv_line([query.row, *texts, "", "", *[""] * len(classes), query.error or ""])
            continue
        # Join multiple labels with a separator that the readers detect.
        label = "|".join(result["labels"]) if "labels" in result else result["label"]
        probabilities = (f"{result['probabilities'][name]:.7g}" for name in classes)
        yield _csv_line([query.row, *texts, label, f"{result['probability']:.7g}", *probabilities, ""])


def is_prediction_file(path: Path) -> bool:
    """Return whether a file is empty or starts like a prediction file, so that it may be replaced."""
    try:
        with open_regular_file(path) as file:
            start = file.read(max(map(len, _FILE_STARTS)))
    except (OSError, WhetError):
        return False
    return not start or start.startswith(_FILE_STARTS)


def _record(prediction: "Prediction") -> dict[str, Any]:
    query = prediction.query
    row: int | str = int(query.row) if query.row.isdecimal() else query.row
    if prediction.result is None:
        return {"row": row, "error": query.error}
    pair = {} if query.pair is None else {"text_pair": query.pair}
    return {"row": row, "text": query.text, **pair, **prediction.result}


def _csv_line(cells: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()
