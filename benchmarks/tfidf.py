"""TF-IDF and logistic regression, the baseline for text models.

Words (unigrams and bigrams) and character n-grams (2 to 5 inside a word) that occur in two training texts or more;
1 + log(count), times 1 + log((1 + n) / (1 + df)), rows of norm 1 for each of the two kinds. The regression is
multinomial, by L-BFGS; its penalty and class balancing are chosen by macro-F1 on the validation split. The scores with
balanced classes are returned for every penalty too: C = 1 is scikit-learn's default.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from whet.recipes.text.corpus import Corpus

PENALTIES = (1.0, 4.0, 16.0)
_WORD = re.compile(r"\w+|[^\w\s]")


def tfidf_scores(corpus: Corpus) -> dict[str, object]:
    """Return accuracy and macro-F1 on the test split, and the choices made on the validation split."""
    num_classes = len(corpus.classes)
    tables = [_table(texts, corpus) for texts in (corpus.train.texts, corpus.val.texts, corpus.test.texts)]
    train, val, test = _features(tables)
    labels = torch.tensor(corpus.train.labels)
    best: tuple[float, float, bool, Tensor] | None = None
    balanced: dict[str, float] = {}
    for is_balanced in (False, True):
        weights = torch.zeros(train.shape[1], num_classes)
        for penalty in PENALTIES:  # Each starts where the one before has ended.
            weights = _fit(train, labels, weights, penalty=penalty, is_balanced=is_balanced)
            score = scores(confusion((val @ weights).argmax(1).tolist(), corpus.val.labels, num_classes))["macro_f1"]
            if is_balanced:
                on_test = confusion((test @ weights).argmax(1).tolist(), corpus.test.labels, num_classes)
                balanced[f"C={penalty:g}"] = round(scores(on_test)["macro_f1"], 4)
            if best is None or score > best[0]:
                best = (score, penalty, is_balanced, weights.clone())
    assert best is not None
    result = scores(confusion((test @ best[3]).argmax(1).tolist(), corpus.test.labels, num_classes))
    choice = {"val_macro_f1": best[0], "penalty": best[1], "balanced": best[2]}
    return {**result, **choice, "balanced_macro_f1": balanced, "features": train.shape[1]}


def confusion(predicted: Sequence[int], truth: Sequence[int], num_classes: int) -> np.ndarray:
    """Return the confusion matrix: true classes in rows, predicted classes in columns."""
    places = np.asarray(truth) * num_classes + np.asarray(predicted)
    return np.bincount(places, minlength=num_classes**2).reshape(num_classes, num_classes)


def scores(counts: np.ndarray) -> dict[str, float]:
    """Return accuracy and the mean F1 over the classes that occur or are predicted."""
    right, rows, columns = np.diag(counts), counts.sum(1), counts.sum(0)
    occurs = (rows + columns) > 0
    f1 = 2 * right[occurs] / (rows + columns)[occurs]
    return {"accuracy": float(right.sum() / counts.sum()), "macro_f1": float(f1.mean())}


def _table(texts: Iterable[str], corpus: Corpus) -> list[tuple[Counter[str], Counter[str]]]:
    assert not corpus.has_pairs, "texts alone"
    return [(_words(text), _letters(text)) for text in texts]


def _words(text: str) -> Counter[str]:
    words = _WORD.findall(text.lower())
    return Counter([*words, *(f"{one} {two}" for one, two in pairwise(words))])


def _letters(text: str) -> Counter[str]:
    result: list[str] = []
    for word in text.lower().split():
        padded = f" {word} "
        for size in range(2, 6):
            result += [padded[start : start + size] for start in range(max(1, len(padded) - size + 1))]
    return Counter(result)


def _features(tables: list[list[tuple[Counter[str], Counter[str]]]]) -> list[Tensor]:
    """Return each split as a sparse matrix; the last column is 1 for the bias."""
    parts: list[list[list[tuple[int, float]]]] = [[[] for _ in table] for table in tables]
    width = 0
    for kind in (0, 1):
        seen = Counter(term for row in tables[0] for term in row[kind])
        known = [term for term, often in seen.items() if often >= 2]
        places = {term: width + place for place, term in enumerate(known)}
        rarity = {term: 1 + np.log((1 + len(tables[0])) / (1 + seen[term])) for term in known}
        width += len(known)
        for table, part in zip(tables, parts, strict=True):
            for row, counted in enumerate(table):
                values = {t: (1 + np.log(often)) * rarity[t] for t, often in counted[kind].items() if t in places}
                norm = np.sqrt(sum(value**2 for value in values.values())) or 1.0
                part[row] += [(places[term], value / norm) for term, value in values.items()]
    return [_sparse([[*row, (width, 1.0)] for row in part], width=width + 1) for part in parts]


def _sparse(rows: list[list[tuple[int, float]]], *, width: int) -> Tensor:
    owner = [number for number, row in enumerate(rows) for _ in row]
    column, value = zip(*(entry for row in rows for entry in row), strict=True)
    made = torch.sparse_coo_tensor(
        torch.tensor([owner, list(column)]),
        torch.tensor(value, dtype=torch.float32),
        (len(rows), width),
        check_invariants=False,
    )
    return made.coalesce().to_sparse_csr()


def _fit(x: Tensor, labels: Tensor, start: Tensor, *, penalty: float, is_balanced: bool) -> Tensor:
    """Minimize cross entropy times `penalty` (scikit-learn's C) plus half the squared weights, without the bias."""
    num_classes = start.shape[1]
    often = torch.bincount(labels, minlength=num_classes).clamp(min=1)
    weight = (len(labels) / (num_classes * often))[labels] if is_balanced else torch.ones(len(labels))
    transposed = x.to_sparse_coo().t().coalesce().to_sparse_csr()
    target = torch.nn.functional.one_hot(labels, num_classes).float()
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=100, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        with torch.no_grad():
            logs = (x @ weights).log_softmax(1)
            kept = weights.clone()
            kept[-1] = 0
            weights.grad = penalty * (transposed @ ((logs.exp() - target) * weight[:, None])) + kept
            return penalty * -(weight * (logs * target).sum(1)).sum() + kept.square().sum() / 2

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weights.detach()
