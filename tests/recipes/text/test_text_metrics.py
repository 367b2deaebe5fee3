"""Scores of a classifier equal their definitions, for any batching."""

import numpy as np
import pytest

from whet.recipes.text.evaluation import NUM_BINS, Scores

pytestmark = pytest.mark.torch


def expected_scores(
    probabilities: np.ndarray, truth: np.ndarray
) -> tuple[dict[str, float], list[tuple[float, float, float, int]]]:
    """Compute the scores by their definitions, one text and one class at a time."""
    num_texts, num_classes = probabilities.shape
    is_multi_label = truth.ndim == 2
    answers, truths, predictions = [], [], []
    for row in range(num_texts):
        if is_multi_label:
            answers.append({c for c in range(num_classes) if probabilities[row, c] > 0.5})
            truths.append({c for c in range(num_classes) if truth[row, c] == 1})
            predictions += [(probabilities[row, c], c in truths[-1]) for c in range(num_classes)]
        else:
            likeliest = max(range(num_classes), key=lambda c: probabilities[row, c])
            answers.append({likeliest})
            truths.append({int(truth[row])})
            predictions.append((probabilities[row, likeliest], likeliest == truth[row]))
    rows, present = [], []
    for c in range(num_classes):
        both = sum(c in a and c in t for a, t in zip(answers, truths, strict=True))
        answered, there = sum(c in a for a in answers), sum(c in t for t in truths)
        precision, recall = both / answered if answered else 0, both / there if there else 0
        f1 = 2 * precision * recall / (precision + recall) if both else 0
        rows.append((precision, recall, f1, there))
        present += [f1] if answered + there else []
    both = sum(len(a & t) for a, t in zip(answers, truths, strict=True))
    error = 0.0
    for low in range(NUM_BINS):
        inside = [
            (p, r) for p, r in predictions if low / NUM_BINS <= p < (low + 1) / NUM_BINS or (p == 1 and low == 14)
        ]
        if inside:
            gap = sum(p for p, _ in inside) / len(inside) - sum(r for _, r in inside) / len(inside)
            error += abs(gap) * len(inside) / len(predictions)
    squares = [
        sum((probabilities[row, c] - (c in truths[row])) ** 2 for c in range(num_classes))
        / (num_classes if is_multi_label else 1)
        for row in range(num_texts)
    ]
    return {
        "accuracy": sum(a == t for a, t in zip(answers, truths, strict=True)) / num_texts,
        "macro_f1": sum(present) / len(present),
        "micro_f1": 2 * both / (sum(map(len, answers)) + sum(map(len, truths))),
        "calibration_error": error,
        "brier": sum(squares) / num_texts,
    }, rows


@pytest.mark.parametrize("is_multi_label", [False, True])
def test_scores_match_their_definitions_for_any_batching(is_multi_label: bool) -> None:
    chance = np.random.default_rng(3)
    num_texts, num_classes = 400, 5
    logits = chance.normal(size=(num_texts, num_classes)) * 2
    logits[:, 4] = -40  # A class that neither occurs nor is answered, and
    logits[:, 3] -= 6  # one that is hardly ever found.
    if is_multi_label:
        probabilities = 1 / (1 + np.exp(-logits))
        truth = (chance.random(probabilities.shape) < probabilities**2).astype(np.float32)
        truth[:, 4] = 0
    else:
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        truth = np.where(chance.random(num_texts) < 0.6, probabilities.argmax(1), chance.integers(0, 4, num_texts))
    probabilities[0] = np.eye(num_classes)[0]  # Certain: the upper edge of the last bin.
    expected, rows = expected_scores(probabilities, truth)
    for size in (num_texts, 1, 37):
        scores = Scores(num_classes, is_multi_label=is_multi_label)
        right = [scores.add(probabilities[a : a + size], truth[a : a + size]) for a in range(0, num_texts, size)]
        assert scores.metrics() == pytest.approx(expected, abs=1e-12)
        assert np.concatenate(right).mean() == expected["accuracy"]
        classes = scores.classes()
        result = list(zip(*(classes[name] for name in ("precision", "recall", "f1", "support")), strict=True))
        assert np.allclose(result, rows)
        assert (scores.confusion is None) == is_multi_label
    assert 0 < expected["macro_f1"] < expected["micro_f1"] < 1
    assert expected["calibration_error"] > 0.05
    if not is_multi_label:
        assert expected["micro_f1"] == expected["accuracy"]
        assert scores.confusion.sum() == num_texts
        assert scores.confusion.trace() == round(expected["accuracy"] * num_texts)


def test_calibration_bins_are_kept_apart() -> None:
    # Overconfident in the last bin, underconfident in the one before it: merged, they would look calibrated.
    scores = Scores(2, is_multi_label=False)
    scores.add(np.array([[0.95, 0.05], [0.9, 0.1]]), np.array([1, 0]))
    assert scores.metrics()["calibration_error"] == pytest.approx((0.95 + 0.1) / 2)
