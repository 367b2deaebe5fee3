"""Quality of hyperparameter search: the winner compared with a grid, and the steps that pruning saves.

    python benchmarks/search_quality.py lr        12 trials of the text recipe and a grid of 25 learning rates
    python benchmarks/search_quality.py pruning   5 searches with and without pruning, the same settings in both

Every trial is a real run in its own process; nothing is replayed. Figures are for docs/bench/.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from whet.api.search import search
from whet.report.search_report import winner_text
from whet.run.search_result import SearchResult

LOW, HIGH = 1e-5, 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("lr", "pruning"))
    parser.add_argument("--recipe", default="text")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--grid", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--first", type=int, default=10, help="seed of the first repeat; 0 to 3 chose the pruner")
    parser.add_argument("--pruner", default="PercentilePruner")
    parser.add_argument("--subset", type=float, default=0.3, help="of the pruning part: trials of at most 10 s")
    parser.add_argument("--words", nargs="*", default=[], help="settings for all trials, such as epochs=2")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="whet-search-"))
    try:
        {"lr": against_grid, "pruning": with_and_without}[options.part](options, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def against_grid(options: argparse.Namespace, root: Path) -> None:
    """Compare the winner's learning rate with the best of a grid."""
    shared = {"root": root, "device": options.device, "say": print}
    began = time.monotonic()
    actual = search(
        options.recipe, [f"lr={LOW}..{HIGH}:log", *options.words], trials=options.trials, name="actual", **shared
    )
    seconds = time.monotonic() - began
    winner = actual.winner
    assert winner is not None
    print(f"search: {options.trials} trials and their seeds in {seconds:.0f} s; {winner_text(actual)}", flush=True)
    rates = [LOW * (HIGH / LOW) ** (number / (options.grid - 1)) for number in range(options.grid)]
    grid = search(
        options.recipe,
        [f"lr=[{','.join(f'{rate:.6g}' for rate in rates)}]", *options.words],
        trials=options.grid,
        name="grid",
        sampler="GridSampler",
        pruner="NopPruner",
        seeds=0,
        **shared,
    )
    ranked = sorted(_complete(grid), key=lambda trial: -(trial.value or 0))
    for trial in sorted(ranked, key=lambda trial: trial.settings["lr"]):
        print(f"grid: lr {trial.settings['lr']:.3g}  {grid.goal} {trial.value:.4f}")
    best, own = ranked[0].settings["lr"], winner.settings["lr"]
    factor = max(best / own, own / best)
    print(f"best of the grid: lr {best:.3g} ({ranked[0].value:.4f}); the search: lr {own:.3g}, {factor:.2f}x away")
    print(f"under 10 minutes: {seconds < 600}; within 2x: {factor <= 2}")


def with_and_without(options: argparse.Namespace, root: Path) -> None:
    """Count the steps that pruning saves, and check the winner; random sampling, so that both try the same settings."""
    same, shares, longest = 0, [], 0.0
    for repeat in range(options.first, options.first + options.repeats):
        results = {}
        for pruner in ("NopPruner", options.pruner):
            results[pruner] = search(
                options.recipe,
                [f"lr={LOW}..{HIGH}:log", "dropout=0..0.4", f"seed={repeat}", *options.words],
                trials=options.trials,
                name=f"{pruner}-{repeat}",
                sampler="RandomSampler",
                pruner=pruner,
                subset=options.subset,
                seeds=0,
                root=root,
                device=options.device,
            )
        whole, pruned = results["NopPruner"], results[options.pruner]
        assert [t.settings for t in whole.trials] == [t.settings for t in pruned.trials]
        share = 1 - _steps(pruned) / _steps(whole)
        shares.append(share)
        longest = max(longest, *(trial.seconds for trial in whole.trials))
        is_same = whole.winner is not None and pruned.winner is not None and whole.winner.number == pruned.winner.number
        same += is_same
        ends = [f"{r.winner.settings['lr']:.3g} ({r.winner.mean:.4f})" for r in (whole, pruned) if r.winner]
        print(
            f"repeat {repeat}: {_steps(whole):,} steps without, {_steps(pruned):,} with: {100 * share:.0f} % saved; "
            f"winners lr {' and '.join(ends)}: {'the same' if is_same else 'not the same'}",
            flush=True,
        )
    print(f"saved {100 * min(shares):.0f} to {100 * max(shares):.0f} %; the same winner in {same} of {options.repeats}")
    print(f"longest trial {longest:.1f} s")


def _steps(result: SearchResult) -> int:
    return sum(trial.steps for trial in result.trials)


def _complete(result: SearchResult) -> list:
    return [trial for trial in result.trials if trial.state == "complete" and trial.value is not None]


if __name__ == "__main__":
    main()
