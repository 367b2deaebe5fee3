"""Run the speed benchmarks (peers, overhead, regret); each writes a dated page into docs/bench/.

    python benchmarks/all.py --device cpu [--only overhead regret] [--small]

`--small` is a smoke test with a few steps each, and writes nothing.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from results import BELOW_TARGET, head, write

HERE = Path(__file__).parent
PARTS = {
    "peers": ("Comparison with other loops", ["--device", "{device}"], ["--small", "--loops", "bare", "whet"]),
    "overhead": ("Overhead of a step", [], ["--rounds", "2", "--steps", "4", "--milliseconds", "0.1"]),
    "regret": ("Regret of a measured plan", ["--device", "{device}"], ["conv", "--budget", "2"]),
}
"""Title, arguments, and arguments of the smoke test."""


def run(name: str, *, device: str, is_small: bool) -> int:
    title, arguments, smoke_arguments = PARTS[name]
    args = [word.format(device=device) for word in arguments] + (smoke_arguments if is_small else [])
    command = ["python", f"benchmarks/{name}.py", *args]
    print(f"--- {' '.join(command)}", flush=True)
    lines: list[str] = []
    started = [sys.executable, HERE / f"{name}.py", *args]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    code = process.returncode
    if code not in (0, BELOW_TARGET):
        print(f"--- {name} broke off with exit code {code}: nothing is written")
    elif not is_small:
        # Benchmarks without --device run on the CPU.
        where = device if arguments else "cpu"
        # peers.py writes its own page.
        page = lines if name == "peers" else [*head(title, where, " ".join(command)), "```", *lines, "```"]
        print(f"--- {write(name, where, chr(10).join(page).rstrip() + chr(10))}")
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    codes = [run(name, device=given.device, is_small=given.small) for name in given.only]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
