"""Read Parquet and Arrow files with pyarrow, one batch at a time."""

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError, first_line
from whet.base.extras import install_hint
from whet.recipes.text.readers.rows import TextRow, TextSource

_BATCH_ROWS = 1_000


def read_columnar(source: TextSource) -> Iterator[TextRow]:
    """Yield all rows, numbered from 1. Class indices are replaced with class names."""
    names = {**_names_in_schema(_schema(source)), **source.class_names}
    line = 0
    for batch in _batches(source):
        for cells in batch.to_pylist():
            line += 1
            yield TextRow(line=line, cells={key: _class_name(value, names.get(key)) for key, value in cells.items()})


def class_names(features: object) -> dict[str, tuple[str, ...]]:
    """Return the class names of each ClassLabel column in the features of a `datasets.Dataset`.

    >>> class_names({"label": {"names": ["bad", "good"], "_type": "ClassLabel"}, "text": {"_type": "Value"}})
    {'label': ('bad', 'good')}
    """
    if not isinstance(features, dict):
        return {}
    names: dict[str, tuple[str, ...]] = {}
    for column, feature in features.items():
        # In a sequence of labels, the feature is nested: {"feature": {...}} or [{...}].
        inner = feature.get("feature", feature) if isinstance(feature, dict) else feature
        inner = inner[0] if isinstance(inner, list) and inner else inner
        if isinstance(inner, dict) and inner.get("_type") == "ClassLabel" and isinstance(inner.get("names"), list):
            names[str(column)] = tuple(map(str, inner["names"]))
    return names


def _class_name(value: Any, names: tuple[str, ...] | None) -> Any:
    if names is None:
        return value
    if isinstance(value, list):
        return [_class_name(each, names) for each in value]
    # Hugging Face datasets use -1 for a missing label.
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


def _names_in_schema(schema: Any) -> dict[str, tuple[str, ...]]:
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    except ValueError:
        return {}
    return class_names(metadata.get("info", {}).get("features")) if isinstance(metadata, dict) else {}


def _schema(source: TextSource) -> Any:
    arrow = _pyarrow(source.path)
    with _arrow_errors(source.path):
        if source.format == "Parquet":
            return arrow.parquet.read_schema(source.path)
        with _open_arrow(arrow, source.path) as reader:
            return reader.schema


def _batches(source: TextSource) -> Iterator[Any]:
    arrow = _pyarrow(source.path)
    with _arrow_errors(source.path):
        if source.format == "Parquet":
            with arrow.parquet.ParquetFile(source.path) as file:
                yield from file.iter_batches(batch_size=_BATCH_ROWS)
            return
        with _open_arrow(arrow, source.path) as reader:
            # Stream readers are iterable; file readers are indexed.
            batches = (
                reader
                if hasattr(reader, "read_next_batch")
                else (reader.get_batch(number) for number in range(reader.num_record_batches))
            )
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield batch.slice(start, _BATCH_ROWS)


def _open_arrow(arrow: Any, path: Path) -> Any:
    """Memory-map a file, so that only the rows in use take memory."""
    mapped = arrow.memory_map(str(path))
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    return arrow.ipc.open_file(mapped) if is_file else arrow.ipc.open_stream(mapped)


@contextlib.contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Convert errors of pyarrow, which derive from ValueError or OSError, to UsageError."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeError):
            raise
        raise UsageError(f"cannot read {path}", got=first_line(error), try_="write the file again") from error


def _pyarrow(path: Path) -> Any:
    try:
        for module in ("pyarrow.ipc", "pyarrow.parquet"):
            importlib.import_module(module)
        return importlib.import_module("pyarrow")
    except ImportError:
        raise UsageError(f"{path} needs pyarrow", got="it is not installed", try_=install_hint("parquet")) from None
