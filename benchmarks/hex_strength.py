"""Playing strength of a net on 5x5 after a few minutes of training on a CPU.

    python benchmarks/hex_strength.py [--run DIR] [--games 400] [--device cpu] [key=value ...]

Trains like `whet train hex`, including the generation of games (an empty cache). The net plays the random player
without a search and the two-distance player with 64 simulations per move. Openings are random and paired. Exit code 1:
a target was missed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from whet.base import env
from whet.recipes.hex.arena import Contest, hold_contest

SECONDS = 300.0
"""Limit for generating games and training."""
BARS = {"random": ("", 0.95), "two-distance": ("@64", 0.60)}
"""For each opponent: the suffix of the run's name, and the minimum win rate."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="key=value for the training")
    parser.add_argument("--run", type=Path, help="a run that is there already is not trained")
    parser.add_argument("--games", type=int, default=400)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = given.run or Path(scratch) / "run"
        is_ready = path.exists()
        start = time.perf_counter()
        if not is_ready:
            train(path, given.words, device=given.device, home=Path(scratch))
        seconds = time.perf_counter() - start
        contests = [
            hold_contest(f"{path}{look}", name, num_games=given.games, openings="random", device=given.device)
            for name, (look, _) in BARS.items()
        ]
    if not is_ready:
        print(f"games and training: {seconds:.0f} s of {SECONDS:.0f} s")
    are_held = [is_ready or seconds <= SECONDS, *map(show, contests)]
    sys.exit(0 if all(are_held) else 1)


def train(path: Path, words: list[str], *, device: str, home: Path) -> None:
    """Train, with an empty cache, so that the games are generated too."""
    command = [sys.executable, "-m", "whet", "train", "hex", *words, "--device", device, "--run", str(path)]
    subprocess.run(command, env=env.child_environment(WHET_HOME=str(home / "cache")), check=True)


def show(contest: Contest) -> bool:
    """Print a contest, and return whether its target is reached."""
    look, bar = BARS[contest.two]
    is_reached = contest.rating.win_rate >= bar
    shown = f"with {look[1:]} simulations a move" if look else "without a search"
    print("\n".join((f"against {contest.two}, {shown}", *(f"  {line}" for line in contest.lines[1:]))))
    print(f"  bar       {bar:.0%}: {'reached' if is_reached else 'MISSED'}")
    return is_reached


if __name__ == "__main__":
    main()
