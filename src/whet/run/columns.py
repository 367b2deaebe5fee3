"""What are the numbers of a run, field by field? One row for each event of a short run, for each block of a long one.

Of a field, each row holds five numbers, as a block does: count, least, greatest, sum, and how many were not finite. An
event is a block of one.
"""

from array import array
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from whet.run.event import Event, as_number
from whet.run.tally import NUMBERS_PER_FIELD, Block

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_FARTHEST = 2**62
"""A step beyond this is damage."""


class Table(Protocol):
    """Rows in the order they were written."""

    @property
    def steps(self) -> Integers: ...
    @property
    def times(self) -> Floats: ...
    @property
    def samples(self) -> Floats:
        """As far as the rows tell it themselves; NaN where they do not."""

    @property
    def last_step(self) -> int: ...
    @property
    def fields(self) -> Collection[str]: ...
    def numbers(self, field: str) -> Floats:
        """The five numbers of each row, as an array of five columns."""


class EventTable:
    """The numbers of events of one kind; more may be added."""

    def __init__(self) -> None:
        self._steps, self._times = array("q"), array("d")
        self._values: dict[str, array[float]] = {}
        self._is_there: dict[str, bytearray] = {}

    def add(self, event: Event) -> None:
        """Takes in one event."""
        row = len(self._steps)
        self._steps.append(max(-_FARTHEST, min(_FARTHEST, event.step)))
        self._times.append(event.time)
        for name, value in event.fields.items():
            if type(value) is float:
                self._put(row, name, value)
            elif isinstance(value, dict):
                for key, item in value.items():
                    self._put(row, f"{name}/{key}", as_number(item))
            else:
                self._put(row, name, as_number(value))

    def _put(self, row: int, name: str, value: float | None) -> None:
        if value is None:
            return
        values = self._values.get(name)
        if values is None:
            values = self._values[name] = array("d")
            self._is_there[name] = bytearray()
        there = self._is_there[name]
        if len(values) <= row:
            missing = row - len(values)
            values.extend([0.0] * missing)
            there.extend(bytes(missing))
            values.append(value)
            there.append(1)

    @property
    def steps(self) -> Integers:
        return np.array(self._steps, dtype=np.int64)

    @property
    def times(self) -> Floats:
        return np.array(self._times, dtype=np.float64)

    @property
    def samples(self) -> Floats:
        told = self.numbers("samples")
        return np.where(told[:, 0] > 0, told[:, 1], np.nan)

    @property
    def last_step(self) -> int:
        return max(self._steps, default=0)

    @property
    def fields(self) -> Collection[str]:
        return self._values.keys()

    def numbers(self, field: str) -> Floats:
        rows = np.zeros((len(self._steps), NUMBERS_PER_FIELD))
        if field in self._values:
            values = np.array(self._values[field], dtype=np.float64)
            is_there = np.array(self._is_there[field], dtype=bool)
            is_finite = np.isfinite(values) & is_there
            known = rows[: len(values)]
            known[:, 0] = is_finite
            known[:, 1:4] = np.where(is_finite, values, 0.0)[:, None]
            known[:, 4] = is_there & ~is_finite
        return rows


class BlockTable:
    """The numbers of one kind of events, a row for each block that holds such events."""

    def __init__(self, blocks: Sequence[Block], *, kind: str) -> None:
        blocks = [block for block in blocks if kind in block.kinds]
        self._kind = kind
        self.steps = np.array([max(-_FARTHEST, min(_FARTHEST, block.least_step)) for block in blocks], dtype=np.int64)
        self.times = np.array([block.first_time for block in blocks], dtype=np.float64)
        self.last_step = max((min(_FARTHEST, block.greatest_step) for block in blocks), default=0)
        self._groups: dict[tuple[str, ...], tuple[Integers, Floats]] = {}
        rows: dict[tuple[str, ...], list[int]] = {}
        for row, block in enumerate(blocks):
            rows.setdefault(block.fields, []).append(row)
        for fields, places in rows.items():
            packed = b"".join([blocks[place].numbers for place in places])
            numbers = np.frombuffer(packed, dtype="<f8").reshape(len(places), len(fields), NUMBERS_PER_FIELD)
            self._groups[fields] = np.array(places, dtype=np.int64), numbers

    @property
    def samples(self) -> Floats:
        # Those of the steps first: they lie where the block begins, as its step and its time do.
        of_steps = self._gather("step/samples")
        told = np.where(of_steps[:, :1] > 0, of_steps, self.numbers("samples"))
        return np.where(told[:, 0] > 0, told[:, 1], np.nan)

    @property
    def fields(self) -> Collection[str]:
        prefix = f"{self._kind}/"
        names = {name: None for fields in self._groups for name in fields if name.startswith(prefix)}
        return tuple(name.removeprefix(prefix) for name in names)

    def numbers(self, field: str) -> Floats:
        return self._gather(f"{self._kind}/{field}")

    def _gather(self, name: str) -> Floats:
        found = np.zeros((len(self.steps), NUMBERS_PER_FIELD))
        for fields, (rows, numbers) in self._groups.items():
            if name in fields:
                found[rows] = numbers[:, fields.index(name)]
        return found


class JoinedTable:
    """The rows of two tables, one behind the other: of a run that grows the first stays, and only the second is new."""

    def __init__(self, first: Table, second: Table) -> None:
        self._parts = first, second
        self.steps = np.concatenate([part.steps for part in self._parts])
        self.times = np.concatenate([part.times for part in self._parts])
        self.last_step = max((part.last_step for part in self._parts if len(part.steps)), default=0)

    @property
    def samples(self) -> Floats:
        return np.concatenate([part.samples for part in self._parts])

    @property
    def fields(self) -> Collection[str]:
        return dict.fromkeys(name for part in self._parts for name in part.fields)

    def numbers(self, field: str) -> Floats:
        return np.concatenate([part.numbers(field) for part in self._parts])
