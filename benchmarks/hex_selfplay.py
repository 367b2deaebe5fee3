"""Strength gained by self-play: the champion after some minutes against a net that was trained on games only.

    python benchmarks/hex_selfplay.py [--minutes 20] [--against RUN] [--folder DIR] [--device cpu] [key=value ...]

RUN is a run of `whet train hex`; without it, one is trained first. Then `whet train hex selfplay=True` runs for the
given minutes from scratch, its first generation and its games included, and is killed. Its champion and RUN play with
equal searches: none, and the given numbers of simulations. Exit code 1: the target was missed with one of them. Without
a target, longer searches are reported too, which leave too little to win on 5x5 for any player (docs/hex.md), and all
of them on even openings.
"""

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from hex_strength import train

from whet.base import env
from whet.recipes.hex.arena import Contest, OpeningKind, hold_contest
from whet.recipes.hex.self_play_state import read_state

BAR = 0.60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="key=value for the self-play")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--folder", type=Path, help="where the self-play is kept, or is there already")
    parser.add_argument("--games", type=int, default=400)
    parser.add_argument("--simulations", type=int, nargs="*", default=[4], help="searches that the bar holds for")
    parser.add_argument(
        "--longer", type=int, nargs="*", default=[16, 64], help="simulations of longer searches that are reported them"
    )
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        against = given.against or Path(scratch) / "against"
        if not against.exists():
            train(against, [], device=given.device, home=Path(scratch))
        folder = given.folder or Path(scratch) / "selfplay"
        if given.minutes > 0:
            improve(folder, given.words, minutes=given.minutes, device=given.device, home=Path(scratch))
        state = read_state(folder)
        met = partial(meet, folder, against, games=given.games, device=given.device)
        judged = [met(count, count) for count in (0, *given.simulations)]
        beside = [met(count, count) for count in given.longer]
        beside += [met(count, count, openings="even") for count in (0, *given.simulations, *given.longer)]
    for done in state.generations[1:]:
        kept = "champion" if done.is_champion else "left"
        print(f"generation {done.number}: {done.num_positions:,} positions, won {done.win_rate:.1%}, {kept}")
    for contest in judged:
        print("\n".join(contest.lines))
        print(f"  bar       {BAR:.0%}: {'reached' if contest.rating.win_rate >= BAR else 'MISSED'}")
    for contest in beside:
        print("\n".join(contest.lines))
    sys.exit(0 if all(contest.rating.win_rate >= BAR for contest in judged) else 1)


def meet(
    one: Path, other: Path, looks: int, others: int, *, games: int, device: str, openings: OpeningKind = "random"
) -> Contest:
    """Let the champion play the net trained on games, with equal numbers of simulations."""
    players = [f"{path}@{count}" if count else str(path) for path, count in ((one, looks), (other, others))]
    return hold_contest(*players, num_games=games, openings=openings, device=device)


def improve(folder: Path, words: list[str], *, minutes: float, device: str, home: Path) -> None:
    """Run self-play, and kill it when its time is over."""
    command = [sys.executable, "-m", "whet", "train", "hex", "selfplay=True", "loop.generations=1000", *words]
    command += ["--device", device, "--run", str(folder), "--max-restarts", "0"]
    child = subprocess.Popen(command, env=env.child_environment(WHET_HOME=str(home / "fresh")))
    try:
        child.wait(timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


if __name__ == "__main__":
    main()
