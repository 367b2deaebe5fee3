"""Train a net on recorded Hex games and compare it with the two-distance player on the same held-out positions.

    python benchmarks/hex_records.py --device cuda [--data DIR] [--run DIR] [key=value ...]

DIR holds hex-neurohex-13x13/raw_games.dat; without --data, the folder in WHET_TEST_DATA. Trains like `whet train hex`
and evaluates both players on the undecided positions of the test split. Nothing is selected on that split. Exit code 1:
a target was missed.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from whet.base import env
from whet.cli.main import run
from whet.device.open import open_device
from whet.recipes.hex.evaluation import metrics
from whet.recipes.hex.game.game_folder import GameFolder
from whet.recipes.hex.game.games import Samples, unroll
from whet.recipes.hex.game.players import Player, TwoDistancePlayer
from whet.recipes.hex.game.record_import import ImportOptions, import_records
from whet.recipes.hex.net_players import NetPlayer, load_net
from whet.report.run_report import summarize

WORDS = (
    "arch.preset=18",
    "global_batch_size=1024",
    "lr=2e-3",
    "epochs=2",
    "weight_decay=0.05",
    "dropout=0.3",
    "ema=true",
    "clip=1.0",
)
SECONDS = 480.0
BARS = {"policy_top1": 1.3, "value_accuracy": 1.1}
"""Targets relative to the two-distance player."""
AIMS = {"policy_top1": 0.40, "value_accuracy": 0.75}
AT_ONCE = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="key=value for the training, beside or instead of ours")
    parser.add_argument("--data", type=Path, default=env.read("WHET_TEST_DATA"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--run", type=Path, help="where the run is kept; one that is there is gone on with")
    parser.add_argument("--out", type=Path, help="all figures as JSON")
    given = parser.parse_args()
    if given.data is None:
        parser.error("--data DIR, or WHET_TEST_DATA")
    with tempfile.TemporaryDirectory() as scratch:
        positions = Path(scratch) / "positions"
        import_records(
            Path(given.data) / "hex-neurohex-13x13" / "raw_games.dat", into=positions, options=ImportOptions()
        )
        path = given.run or Path(scratch) / "run"
        words = [*WORDS, *given.words, f"data={positions}", "--device", given.device, "--run", str(path)]
        start = time.perf_counter()
        if code := run(["train", "hex", *words]):
            sys.exit(code)
        seconds = time.perf_counter() - start
        device = open_device(given.device).device
        net, _ = load_net(path, device=device)
        result = unroll(GameFolder.read(positions).splits["test"])
        judged = {
            "net": judged_on(result, NetPlayer(net, device)),
            "net, two looks": judged_on(result, NetPlayer(net, device, averages_symmetry=True)),
            "two-distance": judged_on(result, TwoDistancePlayer()),
        }
        speed = summarize(path).as_json()
    figures = {"seconds": seconds, "device": device.kind, "words": list(given.words), "test": judged}
    are_held = show(figures)
    if given.out:
        given.out.write_text(json.dumps({**figures, "run": speed}, indent=2))
    sys.exit(0 if are_held else 1)


def judged_on(result: Samples, player: Player) -> dict[str, float]:
    """Return a player's metrics on the undecided positions of the test split; ties are broken randomly."""
    draw = np.random.default_rng(0)
    ranks, wins, results = [], [], []
    numbers = np.flatnonzero(result.moves >= 0)
    for start in range(0, len(numbers), AT_ONCE):
        rows = numbers[start : start + AT_ONCE]
        reported = player.analyze(result.positions.take(rows))
        policy = reported.policy * (1 + 1e-5 * draw.random(reported.policy.shape))
        chosen = np.take_along_axis(policy, result.moves[rows][:, None], axis=1)
        ranks.append((policy > chosen).sum(1))
        wins.append(reported.value.astype(np.float64))
        results.append(result.results[rows].astype(np.float64))
    return metrics(ranks, wins, results)


def show(figures: dict) -> bool:
    """Print the table, and return whether the targets are reached."""
    judged, names = figures["test"], list(figures["test"]["net"])
    print(f"training took {figures['seconds']:.0f} s of {SECONDS:.0f} s on {figures['device']}")
    print("| " + " | ".join(["test part", *names]) + " |")
    print("|" + " --- |" * (len(names) + 1))
    for player, row in judged.items():
        print("| " + " | ".join([player, *(f"{row[name]:.4f}" for name in names)]) + " |")
    are_held = figures["seconds"] <= SECONDS
    for name, times in BARS.items():
        ratio = judged["net"][name] / judged["two-distance"][name]
        are_held &= ratio >= times
        word = "reached" if ratio >= times else "MISSED"
        aim = "reached" if judged["net"][name] >= AIMS[name] else "not reached"
        print(f"{name}: {ratio:.2f} times the two-distance player's, bar {times}: {word}; aim {AIMS[name]}: {aim}")
    return are_held


if __name__ == "__main__":
    main()
