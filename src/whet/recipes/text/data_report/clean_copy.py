"""Run `whet data text`: inspect a dataset, and write a cleaned copy with a list of all changes.

To write the copy, the rows are read a second time and are copied, fixed or removed. Existing files are never replaced.
"""

import itertools
import json
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from whet.base.errors import UsageError, WhetError
from whet.recipes.recipe import DataInspection
from whet.recipes.text.config import TextConfig
from whet.recipes.text.data_report.inspector import KIND_CODES, DatasetInspector, file_state
from whet.recipes.text.data_report.report import DEFECT_KINDS, CleanCopyResult, clean_copy_lines, report_lines
from whet.recipes.text.data_report.text_checks import emptiness, fix_text, text_defects
from whet.recipes.text.readers.rows import TextRow, TextSource, read_header, write_record
from whet.recipes.text.readers.samples import SampleReader, TextSample, cell_text
from whet.run import durable

_KIND_OF_CODE = {code: kind for kind, code in KIND_CODES.items()}
_MAX_SHOWN = 2_000
_LINE_FORMATS = ("JSON lines", "CSV", "TSV")
_UNREADABLE = frozenset({"not-utf8", "not-a-row", "truncated", "columns", "long"})
"""Kinds of defects whose rows cannot be parsed and therefore cannot be copied."""


def report_on_data(config: TextConfig, path: Path, *, fix: Path | None, leave: tuple[str, ...]) -> DataInspection:
    """Inspect a file or folder, and write a cleaned copy to `fix` if it is given."""
    inspector = DatasetInspector(path, overrides=config.column_overrides, separator=config.label_separator)
    _check_leave(leave)
    if fix is not None:
        _check_output(fix, inspector.index.sources)
    report = inspector.run()
    lines, as_json = report_lines(report), report.as_json()
    if fix is not None:
        result = write_clean_copy(inspector, fix, leave=frozenset(leave))
        lines, as_json = [*lines, *clean_copy_lines(result)], {**as_json, "fixed": result.as_json()}
    return DataInspection(lines=tuple(lines), as_json=as_json, num_findings=len(report.findings))


def write_clean_copy(inspector: DatasetInspector, out: Path, *, leave: frozenset[str] = frozenset()) -> CleanCopyResult:
    """Write a cleaned copy of an inspected dataset: a file for a single file, otherwise a folder.

    Args:
        leave: The kinds of defects to leave unfixed.
    """
    return _CleanCopyWriter(inspector, out, leave=leave).run()


def _check_output(out: Path, sources: Iterable[TextSource]) -> None:
    """Check, before reading any rows, that the copy replaces nothing and is not inside the original folder."""
    sources = tuple(sources)
    for path in (out, *([_change_list_path(out)] if len(sources) == 1 else [])):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists", got="files are never overwritten", try_="--out ANOTHER-NAME")
    for source in sources:
        folder = source.path if source.path.is_dir() else source.path.parent
        if len(sources) > 1 and out.resolve().is_relative_to(folder.resolve()):
            raise UsageError("the copy is inside the original", got=out, try_="--out DIR outside it")
    durable.check_writable(out.absolute())


def _check_leave(leave: Iterable[str]) -> None:
    kinds = set(leave)
    unknown = sorted(kinds - DEFECT_KINDS.keys())
    if unknown:
        raise UsageError("no such kind of defect", got=", ".join(unknown), try_="one of " + ", ".join(DEFECT_KINDS))
    if kinds & _UNREADABLE:
        got = ", ".join(sorted(kinds & _UNREADABLE))
        raise UsageError("unreadable rows cannot be kept", got=got, try_="other kinds after --leave")


def _change_list_path(out: Path) -> Path:
    """Return the path of the list of changes, next to the cleaned file."""
    return out.with_name(f"{out.stem}.removed.jsonl")


class _CleanCopyWriter:
    def __init__(self, inspector: DatasetInspector, out: Path, *, leave: frozenset[str]) -> None:
        self._inspector, self._out, self._leave = inspector, out, leave
        self._index = inspector.index
        self._sources = inspector.index.sources
        self._num_kept = self._num_changed = 0
        codes = bytearray(0 if _KIND_OF_CODE.get(code) in leave else code for code in inspector.removal_codes)
        # For each removed duplicate, the row that it repeats; -1 for all other rows.
        self._others = array("q", [-1]) * len(codes)
        for duplicate in self._index.hashes.removable():
            if not codes[duplicate.row] and duplicate.kind not in leave:
                codes[duplicate.row] = KIND_CODES[duplicate.kind]
                self._others[duplicate.row] = duplicate.other
        self._codes = bytes(codes)

    def run(self) -> CleanCopyResult:
        with tempfile.TemporaryFile() as changes:
            files = self._write(changes)
        return CleanCopyResult(
            files=tuple(map(str, files[:-1])),
            list_file=str(files[-1]),
            rows=len(self._codes),
            kept=self._num_kept,
            changed=self._num_changed,
        )

    def _write(self, changes: IO[bytes]) -> list[Path]:
        starts = itertools.accumulate(map(self._index.rows_of, range(len(self._sources))), initial=0)
        copies = [self._copy(number, next(starts), changes) for number in range(len(self._sources))]
        durable.make_directory(self._out.absolute().parent)
        if len(copies) == 1:
            files = [self._out, _change_list_path(self._out)]
            durable.publish_files(list(zip(files, (copies[0], self._change_list(changes)), strict=True)))
            return files
        names = [*_file_names(self._sources), "removed.jsonl"]

        def fill(draft: Path) -> None:
            for name, content in zip(names, (*copies, self._change_list(changes)), strict=True):
                durable.write_draft(draft / name, data=content, is_last=name == names[-1])

        durable.publish_directory(self._out, fill=fill)
        return [self._out / name for name in names]

    def _change_list(self, changes: IO[bytes]) -> Iterator[bytes]:
        """Yield the list of changes, or raise an error if an input file has changed.

        The list is written last, so that this error discards the whole copy.
        """
        for source, state in zip(self._sources, self._inspector.file_states, strict=True):
            if file_state(source.path) != state:
                raise WhetError(
                    f"{source.path} changed while it was copied", got="another size or time", try_="run it again"
                )
        changes.seek(0)
        yield from iter(lambda: changes.read(1024**2), b"")

    def _copy(self, number: int, first_row: int, changes: IO[bytes]) -> Iterator[bytes]:
        """Yield the lines of the cleaned copy of a source file."""
        source, row = self._sources[number], first_row
        fields, names = read_header(source) if source.format in ("CSV", "TSV") else ([], [])
        if fields:
            yield write_record(fields, delimiter=source.delimiter).encode() + b"\n"
        reader = SampleReader(source, self._inspector.overrides)
        if number in self._inspector.mixed_endings:
            self._log(changes, str(source.path), action="changed", why=["line-endings"])
        for _, group in itertools.groupby(reader, key=lambda sample: sample.row.line):
            samples = list(group)
            if samples[0].row.has_bom:
                self._log(changes, reader.where(samples[0].row), action="changed", why=["bom"])
            cells = self._fix_row(samples, reader, first_row=row, changes=changes)
            row += len(samples)
            if cells is not None:
                line = _format_row(samples[0].row, cells, source=source, names=names)
                yield line.encode(errors="surrogatepass") + b"\n"

    def _fix_row(
        self, samples: list[TextSample], reader: SampleReader, *, first_row: int, changes: IO[bytes]
    ) -> dict[str, Any] | None:
        """Return the fixed cells of a row: the same object if nothing changed, and None if the row is removed."""
        cells, kept = samples[0].row.cells, []
        for position, sample in enumerate(samples):
            row = first_row + position
            where, code = self._index.where(row), self._codes[row]
            # A nonzero code removes the whole sample. Otherwise its cells are fixed.
            why = [_KIND_OF_CODE[code]] if code else []
            if not why:
                fixed, why = self._fix_sample(cells, sample, reader)
                # Also remove a text that is empty after fixing, for example one that consists of HTML tags.
                if not why or not emptiness(_sample_text(fixed, sample, reader)):
                    cells = fixed
                    kept.append(position)
                    self._num_kept += 1
                    self._num_changed += bool(why)
                    if why:
                        self._log(changes, where, action="changed", why=why, sample=sample)
                    continue
            self._log(changes, where, action="removed", why=why, sample=sample, other=self._others[row])
        if not kept:
            return None
        return cells if len(kept) == len(samples) else _select_samples(cells, len(samples), kept)

    def _fix_sample(
        self, cells: dict[str, Any], sample: TextSample, reader: SampleReader
    ) -> tuple[dict[str, Any], list[str]]:
        """Fix the text and label of a sample. Return the cells of the row and the kinds of defects that were fixed."""
        columns = reader.columns
        assert columns is not None
        why: set[str] = set()
        for name in (columns.text, columns.pair):
            value = None if name is None else _cell_of_sample(cells.get(name), sample)
            if name is None or not isinstance(value, str):
                continue
            defects = {kind for kind in text_defects(value) if DEFECT_KINDS[kind].action == "changed"} - self._leave
            if defects:
                why |= defects
                cells = _with_cell(cells, name, fix_text(value, defects), sample)
        correct = self._inspector.corrections.get(sample.labels[0] if sample.labels else "")
        can_correct = columns.label is not None and not sample.is_list and "misspelled-label" not in self._leave
        if correct is not None and can_correct:
            assert columns.label is not None
            why.add("misspelled-label")
            cells = _with_cell(cells, columns.label, correct, sample)
        return cells, sorted(why)

    def _log(
        self,
        changes: IO[bytes],
        where: str,
        *,
        action: str,
        why: list[str],
        sample: TextSample | None = None,
        other: int = -1,
    ) -> None:
        entry: dict[str, Any] = {"where": where, "action": action, "why": why}
        entry["descriptions"] = [DEFECT_KINDS[kind].description for kind in why]
        if other >= 0:
            entry["other"] = self._index.where(other)
        if sample is not None:
            entry["row"] = _shown_row(sample)
        changes.write(json.dumps(entry, ensure_ascii=False).encode(errors="replace") + b"\n")


def _format_row(row: TextRow, cells: dict[str, Any], *, source: TextSource, names: list[str]) -> str:
    if cells is row.cells and source.format in _LINE_FORMATS:
        return row.raw
    if names:
        values = (cells.get(name) for name in names)
        return write_record(["" if value is None else str(value) for value in values], delimiter=source.delimiter)
    return json.dumps(cells, ensure_ascii=False, default=str)


def _cell_of_sample(cell: Any, sample: TextSample) -> Any:
    """Return the value of a cell for a sample. A row of several samples has cells with one entry for each."""
    return cell[sample.number - 1] if sample.number and isinstance(cell, list) else cell


def _sample_text(cells: dict[str, Any], sample: TextSample, reader: SampleReader) -> str:
    assert reader.columns is not None
    return cell_text(_cell_of_sample(cells.get(reader.columns.text), sample))


def _with_cell(cells: dict[str, Any], name: str, value: str, sample: TextSample) -> dict[str, Any]:
    before = cells.get(name)
    if sample.number and isinstance(before, list):
        position = sample.number - 1
        return {**cells, name: [*before[:position], value, *before[position + 1 :]]}
    return {**cells, name: value}


def _select_samples(cells: dict[str, Any], num_samples: int, kept: list[int]) -> dict[str, Any]:
    """Keep only some samples of a row. Lists of length `num_samples` have one entry per sample."""
    return {
        name: [value[position] for position in kept] if isinstance(value, list) and len(value) == num_samples else value
        for name, value in cells.items()
    }


def _shown_row(sample: TextSample) -> str:
    text = sample.row.raw if sample.row.raw and not sample.number else sample.text
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + f"... ({len(text):,} characters)"


def _file_names(sources: tuple[TextSource, ...]) -> list[str]:
    """Return the names of the copied files: unchanged for line formats, else SPLIT.jsonl."""
    names = []
    for source in sources:
        if source.format in _LINE_FORMATS:
            names.append(source.path.name)
            continue
        same_split = [other for other in sources if other.split == source.split]
        shard = f"-{same_split.index(source):05}-of-{len(same_split):05}" if len(same_split) > 1 else ""
        names.append(f"{source.split or 'rows'}{shard}.jsonl")
    return names
