"""Write a cleaned copy of a dataset and list every change."""

import itertools
import json
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from whet.base.errors import UsageError, WhetError
from whet.recipes.text.data_report.inspector import KIND_CODES, DatasetInspector, file_state
from whet.recipes.text.data_report.report import DEFECT_KINDS, CleanCopyResult
from whet.recipes.text.data_report.text_checks import emptiness, fix_text, text_defects
from whet.recipes.text.readers.rows import TextRow, TextSource, read_header, write_record
from whet.recipes.text.readers.samples import SampleReader, TextSample, cell_text
from whet.run import durable

_KIND_OF_CODE = {code: kind for kind, code in KIND_CODES.items()}
_MAX_SHOWN = 2_000
_LINE_FORMATS = ("JSON lines", "CSV", "TSV")
_UNREADABLE = frozenset({"not-utf8", "not-a-row", "truncated", "columns", "long"})
"""There is nothing to copy of such rows."""


@dataclass
class _CleanCopyCounts:
    kept: int = 0
    changed: int = 0


def write_clean_copy(
    inspection: DatasetInspector, out: Path, *, leave: frozenset[str] = frozenset()
) -> CleanCopyResult:
    """Writes a cleaned copy: a file for a file, a folder for several; nothing is written over."""
    return _CleanCopyWriter(inspection, out, leave=leave).run()


def check_output(out: Path, sources: Iterable[TextSource]) -> None:
    """Before anything is read: what is there already is never replaced, and the original never touched."""
    sources = tuple(sources)
    for path in (out, *([change_list_path(out)] if len(sources) == 1 else [])):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} is there already", got="it is never written over", try_="--fix ANOTHER-NAME")
    for source in sources:
        inside = source.path if source.path.is_dir() else source.path.parent
        if len(sources) > 1 and out.resolve().is_relative_to(inside.resolve()):
            raise UsageError("a copy does not belong into the original", got=out, try_="--fix DIR outside of it")
    durable.check_writable(out.absolute())


def check_leave(leave: Iterable[str]) -> None:
    """Kinds that are unknown, or whose rows cannot be copied."""
    kinds = set(leave)
    unknown = sorted(kinds - DEFECT_KINDS.keys())
    if unknown:
        raise UsageError("no such kind of defect", got=", ".join(unknown), try_="one of " + ", ".join(DEFECT_KINDS))
    if kinds & _UNREADABLE:
        got = ", ".join(sorted(kinds & _UNREADABLE))
        raise UsageError("rows that cannot be read cannot be left", got=got, try_="other kinds after --leave")


def change_list_path(out: Path) -> Path:
    """Where the list of changes lies beside a cleaned file."""
    return out.with_name(f"{out.stem}.removed.jsonl")


class _CleanCopyWriter:
    def __init__(self, inspection: DatasetInspector, out: Path, *, leave: frozenset[str]) -> None:
        self._inspection, self._out, self._leave = inspection, out, leave
        self._sources = inspection.ledger.sources
        self._tally = _CleanCopyCounts()
        rows = len(inspection.ledger)
        self._codes = bytes(0 if _KIND_OF_CODE.get(code) in leave else code for code in inspection.doomed)
        self._others = array("q", [-1]) * rows
        codes = bytearray(self._codes)
        for repeat in inspection.ledger.texts.removable():
            if not codes[repeat.row] and repeat.kind not in leave:
                codes[repeat.row] = KIND_CODES[repeat.kind]
                self._others[repeat.row] = repeat.other
        self._codes = bytes(codes)

    def run(self) -> CleanCopyResult:
        with tempfile.TemporaryFile() as changes:
            names = self._write(changes)
        return CleanCopyResult(
            files=tuple(map(str, names[:-1])),
            list_file=str(names[-1]),
            rows=len(self._codes),
            kept=self._tally.kept,
            changed=self._tally.changed,
        )

    def _write(self, changes: IO[bytes]) -> list[Path]:
        starts = itertools.accumulate(map(self._inspection.ledger.rows_of, range(len(self._sources))), initial=0)
        streams = [self._copied(index, next(starts), changes) for index in range(len(self._sources))]
        if len(streams) == 1:
            files = [self._out, change_list_path(self._out)]
            durable.make_directory(self._out.absolute().parent)
            durable.publish_files(list(zip(files, (streams[0], self._list(changes)), strict=True)))
            return files
        names = [*_file_names(self._sources), "removed.jsonl"]

        def fill(draft: Path) -> None:
            for name, stream in zip(names, (*streams, self._list(changes)), strict=True):
                durable.write_draft(draft / name, data=stream, is_last=name == names[-1])

        durable.make_directory(self._out.absolute().parent)
        durable.publish_directory(self._out, fill=fill)
        return [self._out / name for name in names]

    def _list(self, changes: IO[bytes]) -> Iterator[bytes]:
        """Written last, so that a file that changed meanwhile stops everything."""
        for source, seen in zip(self._sources, self._inspection.states, strict=True):
            if file_state(source.path) != seen:
                raise WhetError(f"{source.path} changed while it was copied", got="another size or time", try_="again")
        changes.seek(0)
        yield from iter(lambda: changes.read(1024**2), b"")

    def _copied(self, index: int, start: int, changes: IO[bytes]) -> Iterator[bytes]:
        source, number = self._sources[index], start
        fields, names = read_header(source) if source.form in ("CSV", "TSV") else ([], [])
        if fields:
            yield write_record(fields, delimiter=source.delimiter).encode() + b"\n"
        reader = SampleReader(source, self._inspection.overrides)
        if index in self._inspection.other_ending:
            self._note(changes, str(source.path), action="changed", why=["line-ends"])
        for _, group in itertools.groupby(reader, key=lambda sample: sample.row.line):
            samples = list(group)
            if samples[0].row.has_bom:
                self._note(changes, reader.where(samples[0].row), action="changed", why=["bom"])
            cells = self._fixed(samples, reader, number=number, changes=changes)
            number += len(samples)
            if cells is not None:
                line = _as_line(samples[0].row, cells, source=source, names=names)
                yield line.encode(errors="surrogatepass") + b"\n"

    def _fixed(
        self, samples: list[TextSample], reader: SampleReader, *, number: int, changes: IO[bytes]
    ) -> dict[str, Any] | None:
        """The cells of a row as they should be, the same object if nothing is wrong; None if nothing is left."""
        cells, kept = samples[0].row.cells, []
        for place, sample in enumerate(samples):
            where, code = self._inspection.ledger.where(number + place), self._codes[number + place]
            why = [_KIND_OF_CODE[code]] if code else []
            if not why:
                better, why = self._put_right(cells, sample, reader)
                text = _text_of(better, sample, reader)
                if not why or not emptiness(text):
                    cells = better
                    kept.append(place)
                    self._tally.kept += 1
                    self._tally.changed += bool(why)
                    if why:
                        self._note(changes, where, action="changed", why=why, sample=sample)
                    continue
            self._note(changes, where, action="removed", why=why, sample=sample, other=self._others[number + place])
        if not kept:
            return None
        return cells if len(kept) == len(samples) else _without(cells, len(samples), kept)

    def _put_right(
        self, cells: dict[str, Any], sample: TextSample, reader: SampleReader
    ) -> tuple[dict[str, Any], list[str]]:
        """The cells with this sample's text and label put right, and why."""
        columns = reader.columns
        assert columns is not None
        why: set[str] = set()
        for name in (columns.text, columns.pair):
            value = cells.get(name) if name is not None else None
            inside = value[sample.number - 1] if sample.number and isinstance(value, list) else value
            if name is None or not isinstance(inside, str):
                continue
            wrong = {kind for kind in text_defects(inside) if DEFECT_KINDS[kind].cure == "changed"} - self._leave
            if wrong:
                why |= wrong
                cells = _with(cells, name, fix_text(inside, wrong), sample)
        meant = self._inspection.meant.get(sample.labels[0] if sample.labels else "")
        if (
            meant is not None
            and columns.label is not None
            and not sample.is_list
            and "misspelt-label" not in self._leave
        ):
            why.add("misspelt-label")
            cells = _with(cells, columns.label, meant, sample)
        return cells, sorted(why)

    def _note(
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
        entry["says"] = [DEFECT_KINDS[kind].says for kind in why]
        if other >= 0:
            entry["other"] = self._inspection.ledger.where(other)
        if sample is not None:
            entry["row"] = _shown(sample)
        changes.write(json.dumps(entry, ensure_ascii=False).encode(errors="replace") + b"\n")


def _as_line(row: TextRow, cells: dict[str, Any], *, source: TextSource, names: list[str]) -> str:
    if cells is row.cells and source.form in _LINE_FORMATS:
        return row.raw
    if names:
        return write_record([_written(cells.get(name)) for name in names], delimiter=source.delimiter)
    return json.dumps(cells, ensure_ascii=False, default=str)


def _text_of(cells: dict[str, Any], sample: TextSample, reader: SampleReader) -> str:
    assert reader.columns is not None
    value = cells.get(reader.columns.text)
    return cell_text(value[sample.number - 1] if sample.number and isinstance(value, list) else value)


def _with(cells: dict[str, Any], name: str, value: str, sample: TextSample) -> dict[str, Any]:
    """The cells with another value; where a row holds several texts, in this one's place."""
    before = cells.get(name)
    if sample.number and isinstance(before, list):
        place = sample.number - 1
        return {**cells, name: [*before[:place], value, *before[place + 1 :]]}
    return {**cells, name: value}


def _shown(sample: TextSample) -> str:
    whole = sample.row.raw if sample.row.raw and not sample.number else sample.text
    return whole if len(whole) <= _MAX_SHOWN else whole[:_MAX_SHOWN] + f"... ({len(whole):,} characters)"


def _without(cells: dict[str, Any], length: int, kept: list[int]) -> dict[str, Any]:
    """A row of several texts without some: every list of that length is one of theirs."""
    return {
        name: [value[place] for place in kept] if isinstance(value, list) and len(value) == length else value
        for name, value in cells.items()
    }


def _written(value: Any) -> str:
    return "" if value is None else str(value)


def _file_names(sources: tuple[TextSource, ...]) -> list[str]:
    """The names of the copies: the same, where a form has lines; else one for each part."""
    names = []
    for source in sources:
        if source.form in _LINE_FORMATS:
            names.append(source.path.name)
            continue
        same = [other for other in sources if other.part == source.part]
        piece = f"-{same.index(source):05}-of-{len(same):05}" if len(same) > 1 else ""
        names.append(f"{source.part or 'rows'}{piece}.jsonl")
    return names
