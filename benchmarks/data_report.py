"""Speed and peak memory of `whet data text`; each figure is from its own process.

    python benchmarks/data_report.py [--rows 1000000] [--folder DIR]

The texts are sentences of 8 to 60 words drawn from 20,000 made-up words (mean 220 characters), with the defects that
real files have: 1 % exact and 1 % near duplicates, 0.1 % with HTML, mojibake and so on. DIR keeps the files for later
runs. Peak memory includes Python and numpy. On a busy machine, CPU seconds are more reliable than wall-clock time.
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

MEASURED = """
import json, resource, sys, time
from pathlib import Path
from whet.recipes.text.data_report.inspector import DatasetInspector
from whet.recipes.text.data_report.clean_copy import write_clean_copy
began, used = time.perf_counter(), time.process_time()
inspector = DatasetInspector(Path(sys.argv[1]))
report = inspector.run()
if len(sys.argv) > 2:
    write_clean_copy(inspector, Path(sys.argv[2]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
counts = {finding.kind: finding.count for finding in report.findings}
print(json.dumps({"rows": report.rows, "seconds": time.perf_counter() - began, "cpu": time.process_time() - used,
                  "peak": peak, "defects": counts}))
"""
LABELS = [f"topic{letter}" for letter in "abcdefghijklmnopqrst"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        for name in ("rows.csv", "rows.jsonl"):
            file = folder / f"{given.rows}-{name}"
            if not file.exists():
                write(file, given.rows)
            show(f"{name}, {file.stat().st_size / 1e6:,.0f} MB", measure(file))
        show("rows.jsonl with a cleaned copy", measure(file, Path(scratch) / "clean.jsonl"))


def measure(*words: Path) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", MEASURED, *words], check=True, capture_output=True)
    return json.loads(done.stdout)


def show(what: str, got: dict[str, object]) -> None:
    rows, seconds, cpu, peak = (float(str(got[name])) for name in ("rows", "seconds", "cpu", "peak"))
    speeds = f"{rows / seconds:,.0f} rows/s; {cpu:.0f} s of the processor, {rows / cpu:,.0f} rows/s"
    print(f"{what}: {rows:,.0f} rows in {seconds:.0f} s ({speeds}), {peak / 1e6:.0f} MB at its peak")
    print(f"  defects {got['defects']}")


def write(file: Path, count: int) -> None:
    draft = file.with_name(f"building-{file.name}")
    with draft.open("w", newline="") as out:
        if file.suffix == ".csv":
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(["text", "label"])
            writer.writerows(texts(count))
        else:
            out.writelines(json.dumps({"text": text, "label": label}) + "\n" for text, label in texts(count))
    draft.rename(file)


def texts(count: int) -> Iterator[tuple[str, str]]:
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(20_000)]
    kept: list[tuple[str, str]] = []
    for number in range(count):
        text, label = " ".join(draw.choices(words, k=draw.randint(8, 60))), draw.choice(LABELS)
        if number % 100 == 99:
            text, label = draw.choice(kept)
        elif number % 100 == 98:
            text, label = draw.choice(kept)
            text = text.upper()
        elif number % 1_000 == 7:
            text += draw.choice(["<br/>", " caf\u00c3\u00a9", "\x00", " &amp; co", " \u043a\u043e\u0442"])
        if len(kept) < 10_000:
            kept.append((text, label))
        yield text, label


if __name__ == "__main__":
    main()
