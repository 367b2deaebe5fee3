"""Which NVIDIA cards does the driver see? Asks nvidia-smi; whether torch can use them is torch's to say."""

import re
from typing import Literal, NamedTuple

from whet.machine.programs import Run, clean_name, complete_lines, positive_number, run_program, whole_number

Driver = Literal["missing", "not running", "no card", "working"]

_FIELDS = ("name", "memory.total", "driver_version", "compute_cap", "utilization.gpu")
_FIELDS_BEFORE_510 = ("name", "memory.total", "driver_version", "utilization.gpu")


class Card(NamedTuple):
    name: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    capability: str | None = None
    busy_percent: float | None = None


class Cards(NamedTuple):
    driver: Driver
    cards: tuple[Card, ...] = ()


NO_DRIVER = Cards("missing")


def ask_driver(*, run: Run = run_program) -> Cards:
    """What nvidia-smi says; drivers before 510 do not know compute_cap and are asked again without it."""
    found = parse_cards(run(_command(_FIELDS), any_exit=True), fields=_FIELDS)
    if found.driver == "not running":
        again = parse_cards(run(_command(_FIELDS_BEFORE_510), any_exit=True), fields=_FIELDS_BEFORE_510)
        if again.driver == "working":
            return again
    return found


def _command(fields: tuple[str, ...]) -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def parse_cards(text: str | None, *, fields: tuple[str, ...] = _FIELDS) -> Cards:
    """One line per card. No program at all means that no driver is installed; words instead of a table, that it fails.

    >>> parse_cards("NVIDIA H200, 143771, 580.65.06, 9.0, 0\\n").cards[0].capability
    '9.0'
    >>> parse_cards("No devices were found\\n").driver, parse_cards(None).driver
    ('no card', 'missing')
    """
    if text is None:
        return NO_DRIVER
    lines = [line for line in complete_lines(text) if line.strip()]
    if any("No devices were found" in line for line in lines):
        return Cards("no card")
    cards = [card for card in (_card(line, fields) for line in lines) if card is not None]
    return Cards("working", tuple(cards)) if cards else Cards("not running")


def _card(line: str, fields: tuple[str, ...]) -> Card | None:
    # A card's name could hold a comma; the other fields cannot, so the name takes what is left over.
    parts = [part.strip() for part in line.rsplit(",", len(fields) - 1)]
    if len(parts) != len(fields):
        return None
    values = dict(zip(fields, parts, strict=True))
    name, driver = clean_name(values["name"]), values["driver_version"]
    if name is None or not re.fullmatch(r"\d{1,5}(\.\d{1,5}){1,3}", driver, re.ASCII):
        return None
    megabytes = positive_number(values["memory.total"])
    capability = values.get("compute_cap", "")
    busy = whole_number(values["utilization.gpu"])
    return Card(
        name=name,
        memory_bytes=megabytes * 1024**2 if megabytes else None,
        driver=driver,
        capability=capability if re.fullmatch(r"\d{1,2}\.\d", capability, re.ASCII) else None,
        busy_percent=float(busy) if busy is not None and busy <= 100 else None,
    )
