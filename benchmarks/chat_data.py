"""Speed and memory of `whet data chat`, compared with the tokenizer alone.

    python benchmarks/chat_data.py                    # speed on 64 MB, interleaved with encode_batch
    python benchmarks/chat_data.py --gigabytes 2      # and the peak memory on a file of that size

Both sides tokenize the same texts with the same vocabulary in alternation. whet's time is that of the whole command:
starting Python, reading the file twice, splitting, tokenizing, packing, hashing and writing. encode_batch gets texts in
batches, and its ids are read, because the library converts them lazily.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from whet.recipes.chat.embedded import python_facts, whet_facts

BATCH = 4096


def generate(path: Path, size: int) -> None:
    """Write different conversations until the file has `size` bytes."""
    draw = random.Random(0)
    facts = [(question, fact.answer) for fact in (*whet_facts(), *python_facts()) for question in fact.questions]
    written = number = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            turns = []
            for question, answer in draw.choices(facts, k=draw.randint(1, 8)):
                words = answer.split()
                draw.shuffle(words)
                turns.append({"from": "human", "value": f"{question} ({draw.randint(0, 10**6)})"})
                turns.append({"from": "gpt", "value": f"{answer} {' '.join(words)}"})
            written += file.write(json.dumps({"id": f"g{number}", "conversations": turns}) + "\n")
            number += 1


class Cost(NamedTuple):
    """Time and memory of a process."""

    seconds: float
    processor_seconds: float
    """CPU seconds of all cores, more reliable on a busy machine."""


def prepare(path: Path, out: Path, *words: str) -> Cost:
    """Run the whole command."""
    command = [sys.executable, "-m", "whet", "--quiet", "data", "chat", str(path), "--out", str(out), *words]
    start, before = time.perf_counter(), children_seconds()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Cost(time.perf_counter() - start, children_seconds() - before)


def encode(engine: Tokenizer, texts: list[str]) -> Cost:
    """Run the tokenizer alone."""
    start, before = time.perf_counter(), time.process_time()
    for first in range(0, len(texts), BATCH):
        for result in engine.encode_batch(texts[first : first + BATCH], add_special_tokens=False):
            _ = result.ids
    return Cost(time.perf_counter() - start, time.process_time() - before)


def children_seconds() -> float:
    """Return the CPU time of finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_bytes() -> int:
    """Return the peak memory of finished child processes; Linux counts in kB, macOS in bytes."""
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file = folder / "chats.jsonl"
        generate(file, args.megabytes * 10**6)
        prepare(file, folder / "first")
        small = peak_bytes()
        engine = Tokenizer.from_file(str(folder / "first" / "tokenizer.json"))
        with file.open(encoding="utf-8") as lines:
            texts = [turn["value"] for line in lines for turn in json.loads(line)["conversations"]]
        size = sum(len(text.encode()) for text in texts)
        print(f"{args.megabytes} MB of JSON, {size / 1e6:.0f} MB of text; peak of whet {small / 1e6:.0f} MB")
        given, learned = "vocabulary given", "vocabulary learned"
        ratios: dict[str, list[tuple[float, float]]] = {given: [], learned: []}
        for number in range(args.rounds):
            before = encode(engine, texts)
            for name, words in (
                ("vocabulary given", ("--tokenizer", str(folder / "first"))),
                ("vocabulary learned", ()),
            ):
                whole = prepare(file, folder / f"{name}-{number}", *words)
                after = encode(engine, texts)
                mean = Cost(*((one + other) / 2 for one, other in zip(before, after, strict=True)))
                ratios[name].append((mean.seconds / whole.seconds, mean.processor_seconds / whole.processor_seconds))
                print(
                    f"round {number + 1}, {name}: encode_batch {size / mean.seconds / 1e6:.2f} MB/s of text, "
                    f"whet {size / whole.seconds / 1e6:.2f} MB/s"
                )
                before = after
        for name, seen in ratios.items():
            for kind, values in zip(("speed", "speed by processor time"), zip(*seen, strict=True), strict=True):
                middle = statistics.median(values)
                print(f"{name}: {kind} {middle:.2f} of encode_batch ({min(values):.2f} to {max(values):.2f})")
        if args.gigabytes:
            generate(file, int(args.gigabytes * 10**9))
            seconds = prepare(file, folder / "large").seconds
            print(
                f"{args.gigabytes:g} GB: {seconds:.0f} s, {args.gigabytes * 1e3 / seconds:.2f} MB/s of JSON; "
                f"peak {peak_bytes() / 1e6:.0f} MB, {small / 1e6:.0f} MB for {args.megabytes} MB"
            )


if __name__ == "__main__":
    main()
