"""Policy and value metrics of a Hex net."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.recipes.hex.model import policy_losses, value_losses

if TYPE_CHECKING:
    from whet.data.batch import MicroBatch
    from whet.recipes.hex.model import HexNet

NUM_BINS = 10
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


def evaluate(model: "HexNet", micro_batches: Iterator["MicroBatch"]) -> dict[str, Any]:
    """The metrics of a net over micro-batches."""
    return conclude([tally(model, micro_batches)])


def tally(model: "HexNet", micro_batches: Iterator["MicroBatch"]) -> dict[str, Any]:
    """What is known of these positions, as plain JSON: several processes may tally a part each."""
    ranks, wins, results, losses = [], [], [], []
    for micro in micro_batches:
        said = model(micro.board)
        has_move = micro.move >= 0
        chosen = said.policy.gather(1, micro.move.clamp(min=0)[:, None])
        # Ties count against it: a net that says the same everywhere has found nothing.
        rank = (said.policy >= chosen).sum(1) - 1
        ranks.append(rank.masked_fill(~has_move, -1).cpu().numpy())
        wins.append(said.win.cpu().numpy().astype(np.float64))
        results.append(micro.win.cpu().numpy().astype(np.float64))
        losses.append((float(policy_losses(said, micro).sum()), float(value_losses(said, micro).sum())))
    parts = {"ranks": ranks, "wins": wins, "results": results}
    told = {name: np.concatenate(arrays).tolist() if arrays else [] for name, arrays in parts.items()}
    return {**told, "policy": sum(policy for policy, _ in losses), "value": sum(value for _, value in losses)}


def conclude(tallies: list[dict[str, Any]]) -> dict[str, Any]:
    """What tallies over different positions say together."""
    ranks, wins, results = ([np.asarray(told[name]) for told in tallies] for name in ("ranks", "wins", "results"))
    found = metrics(ranks, wins, results)
    num_moves = max(1, sum(int((rank >= 0).sum()) for rank in ranks))
    num_positions = max(1, sum(map(len, wins)))
    found["policy_loss"] = sum(told["policy"] for told in tallies) / num_moves
    found["value_loss"] = sum(told["value"] for told in tallies) / num_positions
    return found


def metrics(ranks: Iterable[Any], wins: Iterable[Any], results: Iterable[Any]) -> dict[str, Any]:
    """From the rank of each played move (-1: none), the said probability of winning, and who won (0 or 1)."""
    rank, win, result = (np.concatenate(list(parts)) for parts in (ranks, wins, results))
    rank = rank[rank >= 0]
    return {
        "policy_top1": float((rank == 0).mean()) if len(rank) else 0.0,
        "policy_top5": float((rank < 5).mean()) if len(rank) else 0.0,
        "value_accuracy": float((_votes(win) == result).mean() + 0.5 * (win == 0.5).mean()),
        "brier": float(np.square(win - result).mean()),
        "calibration_error": calibration_error(win, result),
    }


def calibration_error(win: Floats, result: Floats) -> float:
    """How far what was said is from how often it came true, over ten bins of what was said, weighed by positions."""
    places = np.minimum((win * NUM_BINS).astype(int), NUM_BINS - 1)
    said, came_true = (np.bincount(places, weights=w, minlength=NUM_BINS) for w in (win, result))
    return float(np.abs(said - came_true).sum() / max(1, len(win)))


def _votes(win: Floats) -> Floats:
    """Who is said to win; an even chance is nobody."""
    return np.where(win == 0.5, np.nan, (win > 0.5).astype(float))
