"""Policy and value metrics of a Hex net."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.recipes.hex.model import policy_losses, value_losses

if TYPE_CHECKING:
    from whet.data.batch import DictBatch
    from whet.recipes.hex.model import HexNet

NUM_BINS = 10
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


def partial_metrics(model: "HexNet", micro_batches: Iterator["DictBatch"]) -> dict[str, Any]:
    """Return the move ranks, predictions, results and summed losses of this process's micro-batches, as JSON."""
    ranks, wins, results, losses = [], [], [], []
    for micro in micro_batches:
        output = model(micro.board)
        has_move = micro.move >= 0
        chosen = output.policy.gather(1, micro.move.clamp(min=0)[:, None])
        # Count ties against the net, so that a uniform policy does not get a good rank.
        rank = (output.policy >= chosen).sum(1) - 1
        ranks.append(rank.masked_fill(~has_move, -1).cpu().numpy())
        wins.append(output.win.cpu().numpy().astype(np.float64))
        results.append(micro.win.cpu().numpy().astype(np.float64))
        losses.append((float(policy_losses(output, micro).sum()), float(value_losses(output, micro).sum())))
    columns = {"ranks": ranks, "wins": wins, "results": results}
    outcomes = {name: np.concatenate(arrays).tolist() if arrays else [] for name, arrays in columns.items()}
    return {**outcomes, "policy": sum(policy for policy, _ in losses), "value": sum(value for _, value in losses)}


def merge_metrics(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the metrics from the partial metrics of all processes."""
    ranks, wins, results = ([np.asarray(part[name]) for part in parts] for name in ("ranks", "wins", "results"))
    result = metrics(ranks, wins, results)
    num_moves = max(1, sum(int((rank >= 0).sum()) for rank in ranks))
    num_positions = max(1, sum(map(len, wins)))
    result["policy_loss"] = sum(part["policy"] for part in parts) / num_moves
    result["value_loss"] = sum(part["value"] for part in parts) / num_positions
    return result


def metrics(ranks: Iterable[Any], wins: Iterable[Any], results: Iterable[Any]) -> dict[str, Any]:
    """Compute metrics from the ranks of played moves (-1 for none), predicted win probabilities and results (0, 1)."""
    rank, win, result = (np.concatenate(list(arrays)) for arrays in (ranks, wins, results))
    rank = rank[rank >= 0]
    return {
        "policy_top1": float((rank == 0).mean()) if len(rank) else 0.0,
        "policy_top5": float((rank < 5).mean()) if len(rank) else 0.0,
        "value_accuracy": float((_predicted_winner(win) == result).mean() + 0.5 * (win == 0.5).mean()),
        "brier": float(np.square(win - result).mean()),
        "calibration_error": calibration_error(win, result),
    }


def calibration_error(win: Floats, result: Floats) -> float:
    """Return the expected calibration error over NUM_BINS equal bins of the predicted probability."""
    bins = np.minimum((win * NUM_BINS).astype(int), NUM_BINS - 1)
    predicted, actual = (np.bincount(bins, weights=w, minlength=NUM_BINS) for w in (win, result))
    return float(np.abs(predicted - actual).sum() / max(1, len(win)))


def _predicted_winner(win: Floats) -> Floats:
    """Return 1 where a win is predicted, 0 where a loss is, and NaN where the probability is exactly 0.5."""
    return np.where(win == 0.5, np.nan, (win > 0.5).astype(float))
