"""Write the metrics of a run as CSV or TensorBoard files into a new folder, completely or not at all."""

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError, WhetError, closest_match
from whet.base.extras import install_hint
from whet.base.model import FrozenModel
from whet.base.units import format_list
from whet.report.export.tables import (
    EXPORTED_KINDS,
    ExportRow,
    ExportTable,
    checked_step,
    find_tables,
    named_event_numbers,
    read_rows,
    without_repeated_health,
)
from whet.run import durable
from whet.run.events import History
from whet.run.folder import Run, open_run

_ROWS_PER_CHUNK = 2_000
# Spreadsheets evaluate cells that begin with one of these characters.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def csv_files(history: History) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the name of each CSV file, and its content as chunks of bytes."""
    for table in find_tables(history):
        yield f"{table.name}.csv", _csv_chunks(history, table)


def _csv_chunks(history: History, table: ExportTable) -> Iterator[bytes]:
    head = io.StringIO()
    csv.writer(head, lineterminator="\n").writerow(_escape_formula(name) for name in table.header)
    yield head.getvalue().encode()
    rows = read_rows(history, table)
    while lines := [_csv_line(row) for row in itertools.islice(rows, _ROWS_PER_CHUNK)]:
        yield "".join(lines).encode()


def _csv_line(row: ExportRow) -> str:
    # repr() returns the shortest text that parses to the same number. A missing number is an empty cell.
    return ",".join(["" if value is None else repr(value) for value in row]) + "\n"


def _escape_formula(name: str) -> str:
    """Return a name that a spreadsheet does not evaluate as a formula."""
    return f"'{name}" if name.startswith(_FORMULA_STARTS) else name


class _ChunkSink(io.RawIOBase):
    """A write-only file whose content can be taken out in chunks."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._taken = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._buffer += data
        return len(data)

    def tell(self) -> int:
        return self._taken + len(self._buffer)

    @property
    def num_waiting(self) -> int:
        return len(self._buffer)

    def take(self) -> bytes:
        """Return the bytes written since the last call."""
        taken = bytes(self._buffer)
        self._taken += len(taken)
        self._buffer.clear()
        return taken


# The largest finite float32. TensorBoard stores values as float32.
_MAX_FLOAT = 3.4028234663852886e38
_CHUNK_BYTES = 1024**2


def tensorboard_files(history: History) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the name of the event file and its content as chunks of bytes."""
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        raise WhetError(
            "TensorBoard files need tensorboard", got="it is not installed", try_=f"{install_hint('tb')}; or --to csv"
        ) from None

    def chunks() -> Iterator[bytes]:
        sink = _ChunkSink()
        writer = RecordWriter(sink)
        writer.write(event_pb2.Event(wall_time=first, file_version="brain.Event:2").SerializeToString())
        for event in without_repeated_health(history.events(kinds=EXPORTED_KINDS)):
            values = [
                summary_pb2.Summary.Value(tag=name, simple_value=_in_float32_range(value))
                for name, value in named_event_numbers(event).items()
            ]
            if not values:
                continue
            summary = summary_pb2.Summary(value=values)
            record = event_pb2.Event(wall_time=event.time, step=checked_step(event), summary=summary)
            writer.write(record.SerializeToString())
            if sink.num_waiting >= _CHUNK_BYTES:
                yield sink.take()
        yield sink.take()

    first = next((event.time for event in history.events()), 0.0)
    yield f"events.out.tfevents.{max(0, int(first)):010d}.whet", chunks()


def _in_float32_range(value: float) -> float:
    return max(-_MAX_FLOAT, min(_MAX_FLOAT, value)) if math.isfinite(value) else value


FileWriter = Callable[[History], Iterator[tuple[str, Iterable[bytes]]]]

FORMATS: dict[str, FileWriter] = {"csv": csv_files, "tensorboard": tensorboard_files}
# Formats of models. `whet.api.export` writes them.
MODEL_FORMATS = ("safetensors", "transformers", "onnx")
# Prefixes of exported files. A folder with any other file is never replaced.
_EXPORT_PREFIXES = ("steps.", "evaluations.", "health.", "events.out.tfevents.")


class ExportResult(FrozenModel):
    """The folder and the files that an export has written."""

    folder: Path
    files: dict[str, int]
    """Sizes of the files in bytes, by name."""


def export_run(run: Run | Path | str, *, to: str, out: Path | str | None = None, force: bool = False) -> ExportResult:
    """Write the metrics of a run into a new folder, by default NAME-FORMAT in the working folder.

    Steps that were repeated after a resume are written once. Raise UsageError if the folder exists, unless `force` is
    set and the folder contains only an export.
    """
    if to not in FORMATS:
        known = (*FORMATS, *MODEL_FORMATS)
        meant = closest_match(to, known)
        raise UsageError("unknown format", got=to, try_=f"--to {meant}" if meant else " or ".join(known))
    run = run if isinstance(run, Run) else open_run(run)
    folder = Path(out if out is not None else f"{run.path.name}-{to}").expanduser().absolute()
    history = History(run)

    def fill(draft: Path) -> list[str]:
        names = []
        for name, chunks in FORMATS[to](history):
            durable.write_draft(draft / name, data=chunks)
            names.append(name)
        return names

    return publish_export(run, folder, fill=fill, is_ours=lambda name: name.startswith(_EXPORT_PREFIXES), force=force)


def publish_export(
    run: Run, folder: Path, *, fill: Callable[[Path], Iterable[str]], is_ours: Callable[[str], bool], force: bool
) -> ExportResult:
    """Create a folder atomically. `fill` writes files into a draft folder and returns their names.

    An existing folder is replaced only with `force`, and only if `is_ours` accepts every file in it.
    """
    _check_target(folder, run=run, is_ours=is_ours, force=force)
    files: dict[str, int] = {}
    old: list[Path] = []

    def fill_and_move_old(draft: Path) -> None:
        files.update((name, (draft / name).stat().st_size) for name in fill(draft))
        if folder.exists() and any(folder.iterdir()):
            # Move the old folder aside only now that the new one is complete.
            old.append(durable.move_aside(folder))

    made = durable.make_directory(folder.parent)
    try:
        durable.publish_directory(folder, fill=fill_and_move_old)
    except BaseException:
        for aside in old:
            durable.move(aside, folder)
        durable.remove_empty(made)
        raise
    for aside in old:
        durable.remove(aside)
    return ExportResult(folder=folder, files=files)


def _check_target(folder: Path, *, run: Run, is_ours: Callable[[str], bool], force: bool) -> None:
    if folder.resolve().is_relative_to(run.path.resolve()):
        raise UsageError("an export must not be inside the run", got=folder, try_="--out DIR outside it")
    with durable.disk_errors("write", folder):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UsageError("the target is not a folder", got=folder, try_="another --out DIR")
        inside = sorted(child.name for child in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in inside if not is_ours(name)]
    if foreign:
        got = format_list(foreign)
        raise UsageError(f"{folder} contains other files than an export", got=got, try_="another --out DIR")
    if inside and not force:
        raise UsageError(f"{folder} already exists", got=", ".join(inside), try_="--force, or another --out DIR")
