"""Duration of `whet check` after torch is imported; each model in its own process, several times.

python benchmarks/check_speed.py [--repeats 3]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

MODELS = {
    "tests/support/sound_models.py:gpt": "a small GPT",
    "tests/support/sound_models.py:convnet": "a small convnet",
    "tests/support/sound_models.py:lstm": "an LSTM and a GRU",
    "examples/check_convnet.py:model": "a convnet for 224 x 224",
    "examples/check_lstm_ctc.py:model": "an LSTM with CTC",
    "examples/check_gpt.py:model": "a GPT of 110 M",
    "tests/support/sound_models.py:gpt_350m": "a GPT of 369 M",
}
ONE = """
import json, sys, time
import torch
start, cpu = time.perf_counter(), time.process_time()
from whet.api.verify import check
found = check(sys.argv[1], machine="m3-max-64gb")
print(json.dumps([time.perf_counter() - start, time.process_time() - cpu, found.num_weights, found.num_operators]))
"""
ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; seconds, median (least to most)")
    print(f"{'model':<24} {'parameters':>12} {'calls':>7}  {'seconds':<20} CPU seconds")
    for word, name in MODELS.items():
        command = [sys.executable, "-c", ONE, word]
        runs = [
            json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
            for _ in range(repeats)
        ]
        walls, cpus = [run[0] for run in runs], [run[1] for run in runs]
        spread = f"{statistics.median(walls):.2f} ({min(walls):.2f} to {max(walls):.2f})"
        print(f"{name:<24} {runs[0][2]:>12,} {runs[0][3]:>7,}  {spread:<20} {statistics.median(cpus):.2f}")


if __name__ == "__main__":
    main()
