"""Ten thousand clean labeled texts, and functions that plant defects."""

import csv
import io
import random
from dataclasses import dataclass, field
from pathlib import Path

NEW_LINE = b"\n"
LABELS = ("sport", "politics", "science", "travel")
_WORDS = """
    river lamp window garden bridge winter copper silver paper morning evening market castle forest engine letter mirror
    island harbour meadow candle shadow thunder blanket carpet ladder basket pocket kettle bottle hammer needle ribbon
    saddle anchor feather pebble orchard valley tunnel village cottage barrel curtain dragon falcon badger otter heron
    walnut cherry almond pepper ginger honey butter velvet cotton marble granite amber coral pearl ruby quartz
"""
_VERBS = "holds follows meets finds carries leaves reaches lifts paints mends watches hears counts covers turns"
_MANNERS = "slowly quietly often never again early late gladly twice nearby once softly"


@dataclass
class Table:
    """Three splits as lines of CSV files, and the locations of planted defects by kind."""

    lines: dict[str, list[bytes]]
    planted: dict[str, list[str]] = field(default_factory=dict)

    def put(self, kind: str, split: str, line: bytes, *, end: bytes = b"\n", shows: bool = True) -> None:
        """Add a row to a split, and record it as an example of a kind."""
        if shows:
            self.planted.setdefault(kind, []).append(self.place(split, len(self.lines[split])))
        self.lines[split].append(line + end)

    def place(self, split: str, number: int) -> str:
        """Locate a row; a text with a line break takes two lines."""
        return f"{split}.csv:{b''.join(self.lines[split][:number]).count(NEW_LINE) + 1}"

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        for split, lines in self.lines.items():
            (folder / f"{split}.csv").write_bytes(b"".join(lines))
        return folder


def row(text: str, label: str) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([text, label])
    return out.getvalue().encode()


def clean_rows(count: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """Distinct sentences with accents, quotes, commas and line breaks."""
    draw, seen, rows = random.Random(seed), set[str](), []
    nouns, verbs, manners = _WORDS.split(), _VERBS.split(), _MANNERS.split()
    while len(rows) < count:
        words = draw.sample(nouns, 5)
        text = f"The {words[0]} {draw.choice(verbs)} the {words[1]} {draw.choice(manners)}, near a {words[2]}"
        quoted, broken = f' and "the {words[3]}".', f";\nthe {words[4]} too."
        ending = draw.choice([".", "!", quoted, broken, " \u2013 caf\u00e9 & co.", " < 5 km."])
        if text not in seen:
            seen.add(text)
            rows.append((text + ending, LABELS[len(rows) % 4]))
    return rows


def clean_table() -> Table:
    rows = clean_rows(10_000)
    splits = {"train": rows[:8_000], "val": rows[8_000:9_000], "test": rows[9_000:]}
    header = [b"text,label\n"]
    return Table(lines={split: header + [row(*one) + b"\n" for one in inside] for split, inside in splits.items()})


def planted_table() -> Table:
    """The clean table with every kind of defect that a CSV file can have, each at a known line."""
    table = clean_table()
    fresh = iter(clean_rows(10_400)[10_000:])

    def text() -> str:
        return next(fresh)[0]

    def put(kind: str, words: str, label: str = "sport", *, split: str = "train") -> None:
        table.put(kind, split, row(words, label))

    table.put("not-utf8", "train", b"The caf\xe9 by the river opens late,travel")
    table.put("truncated", "train", b'"The end of this text was cut')
    table.put("truncated", "val", b"The label of this text was cut")
    table.put("columns", "train", b"The lamp, the river and the bridge, at last,sport")
    put("long", "word " * 210_000)
    put("header", "text", "label")
    put("header", "The river meets the badger there", "category")
    put("empty", "")
    put("spaces", " \u00a0\u200b ")
    put("punctuation", "?! ... --")
    put("nul", text() + " A\x00B")
    put("control", text() + " \x1b[31mred")
    put("bom", text() + " \ufeffand on")
    put("mojibake", text() + " na\u00c3\u00afve")
    put("mojibake", text() + " the fox\u00e2\u20ac\u2122s tail")
    put("mojibake", text() + " the otter\u201a\u00c4\u00f4s tail")
    put("lost-characters", text() + " caf\ufffd")
    put("html", text() + "<br />And on")
    put("html", text() + " Tom &amp; Mary")
    put("script", "\u0420\u0435\u043a\u0430 \u0442\u0435\u0447\u0451\u0442 \u043a \u043c\u043e\u0440\u044e")
    put("label-in-text", text() + " (science)", "science")
    put("label-in-text", "Science: " + text(), "science")
    put("label-in-text", text() + " label=science", "science")
    put("label-named", text() + " So politics goes", "politics")
    put("no-label", text(), "")
    put("misspelled-label", text(), "Sport")
    table.put("misspelled-label", "train", row(text(), "poltics"))
    table.put("misspelled-label", "train", row(text(), "poltics"), shows=False)
    put("single-label", text(), "weather")
    for number in range(3):
        table.put("one-split-label", "val", row(text(), "gardening"), shows=number == 0)

    lines, first = table.lines, clean_rows(20)
    table.put("duplicate", "train", row(*first[0]))
    put("near-duplicate", "  " + first[1][0].upper().replace(" ", "  "), first[1][1])
    table.put("leak", "val", row(*first[2]))
    table.put("leak", "test", row(*clean_rows(8_002)[8_001]))
    put("near-leak", first[3][0].lower() + " ", first[3][1], split="test")
    put("near-leak", first[4][0].replace("The", "THE") + "\ufeff", first[4][1], split="test")
    table.planted["bom"].append(table.place("test", len(lines["test"]) - 1))
    twice = text()
    for label in ("sport", "travel"):
        put("two-labels", twice, label)
    lines["train"][0] = b"\xef\xbb\xbf" + lines["train"][0]
    table.planted["bom"].append("train.csv:2")
    table.put("line-endings", "test", row(text(), "sport"), end=b"\r\n")
    return table
