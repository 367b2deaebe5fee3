"""How fast does `whet data chat` prepare conversations, beside the tokenizer alone, and in how much memory?

    python benchmarks/chat_data.py                    # speed on 64 MB, in turns with encode_batch
    python benchmarks/chat_data.py --gigabytes 2      # and the peak memory on a file of that size

Both sides tokenize the same texts with the same vocabulary, in turns. whet's time is that of the whole command:
starting Python, reading the file twice, splitting, tokenizing, packing, hashing and writing. encode_batch is given
ready texts in batches, and its ids are read, since without that there is no result.
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

from tokenizers import Tokenizer

from whet.recipes.chat.embedded.about_python import python_facts
from whet.recipes.chat.embedded.about_whet import whet_facts

BATCH = 4096


def generate(path: Path, size: int) -> None:
    """Conversations that differ, in words that occur: until the file has `size` bytes."""
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


def prepare(path: Path, out: Path, *words: str) -> float:
    """Seconds of the whole command."""
    command = [sys.executable, "-m", "whet", "--quiet", "data", "chat", str(path), "--output-dir", str(out), *words]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def encode(engine: Tokenizer, texts: list[str]) -> float:
    """Seconds of the tokenizer alone."""
    start = time.perf_counter()
    for first in range(0, len(texts), BATCH):
        for found in engine.encode_batch(texts[first : first + BATCH], add_special_tokens=False):
            _ = found.ids
    return time.perf_counter() - start


def peak_bytes() -> int:
    """The most memory that a finished child had; Linux counts in kB, macOS in bytes."""
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file = folder / "chats.jsonl"
        generate(file, asked.megabytes * 10**6)
        prepare(file, folder / "first")
        small = peak_bytes()
        engine = Tokenizer.from_file(str(folder / "first" / "tokenizer.json"))
        with file.open(encoding="utf-8") as lines:
            texts = [turn["value"] for line in lines for turn in json.loads(line)["conversations"]]
        size = sum(len(text.encode()) for text in texts)
        print(f"{asked.megabytes} MB of JSON, {size / 1e6:.0f} MB of text; peak of whet {small / 1e6:.0f} MB")
        ratios: dict[str, list[float]] = {"vocabulary given": [], "vocabulary learned": []}
        for number in range(asked.rounds):
            alone = encode(engine, texts)
            given = prepare(file, folder / f"given-{number}", "--tokenizer", str(folder / "first"))
            again = encode(engine, texts)
            learned = prepare(file, folder / f"learned-{number}")
            last = encode(engine, texts)
            ratios["vocabulary given"].append((alone + again) / 2 / given)
            ratios["vocabulary learned"].append((again + last) / 2 / learned)
            print(
                f"round {number + 1}: encode_batch {size / alone / 1e6:.2f}, {size / again / 1e6:.2f}, "
                f"{size / last / 1e6:.2f} MB/s; whet {size / given / 1e6:.2f} MB/s, "
                f"with learning a vocabulary {size / learned / 1e6:.2f} MB/s"
            )
        for name, seen in ratios.items():
            print(f"{name}: {statistics.median(seen):.2f} of encode_batch ({min(seen):.2f} to {max(seen):.2f})")
        if asked.gigabytes:
            generate(file, int(asked.gigabytes * 10**9))
            seconds = prepare(file, folder / "large")
            print(
                f"{asked.gigabytes:g} GB: {seconds:.0f} s, {asked.gigabytes * 1e3 / seconds:.2f} MB/s of JSON; "
                f"peak {peak_bytes() / 1e6:.0f} MB, {small / 1e6:.0f} MB for {asked.megabytes} MB"
            )


if __name__ == "__main__":
    main()
