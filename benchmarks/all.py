"""The benchmarks of speed under one command: peers, overhead, regret; each writes its dated page into docs/bench/.

    python benchmarks/all.py --device cpu [--only overhead regret] [--small]

`--small` tries this file itself with a few steps each, and writes nothing.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from results import FALLS_SHORT, head, write

HERE = Path(__file__).parent
PARTS = {
    "peers": ("Beside other loops", ["--device", "{device}"], ["--small", "--ways", "bare", "whet"]),
    "overhead": ("What a step costs beside the model", [], ["--rounds", "2", "--steps", "4", "--milliseconds", "0.1"]),
    "regret": ("How far a measured plan is from the best", ["--device", "{device}"], ["conv", "--budget", "2"]),
}
"""What each is called, what it is told, and what it is told when it is only tried."""


def run(name: str, *, device: str, is_small: bool) -> int:
    title, told, tried = PARTS[name]
    words = [word.format(device=device) for word in told] + (tried if is_small else [])
    command = ["python", f"benchmarks/{name}.py", *words]
    print(f"--- {' '.join(command)}", flush=True)
    lines: list[str] = []
    started = [sys.executable, HERE / f"{name}.py", *words]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    code = process.returncode
    if code not in (0, FALLS_SHORT):
        print(f"--- {name} broke off with exit code {code}: nothing is written")
    elif not is_small:
        # What takes no device computes on the CPU.
        where = device if told else "cpu"
        # The peers' is a page already.
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
