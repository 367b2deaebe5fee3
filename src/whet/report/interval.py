"""How is the interval of a mean shown? One of a share ends at 0 and 1: Student's t does not know that it has to."""

_SHARES = {"accuracy", "f1", "precision", "recall", "auc", "top1", "top5", "exact"}
_OTHERS = {"loss", "error"}
"""A loss on top of a share is none."""


def is_share(name: str) -> bool:
    """Whether a metric of this name is a part of a whole.

    >>> [is_share(name) for name in ("macro_f1", "best accuracy on dev", "brier", "accuracy_loss")]
    [True, True, False, False]
    """
    words = set(name.lower().replace("_", " ").split())
    return bool(words & _SHARES) and not words & _OTHERS


def interval_words(name: str, *, mean: float, low: float, high: float, form: str) -> str:
    """The bounds as they are shown; a share that is told in percent is left as it is.

    >>> interval_words("accuracy", mean=0.2136, low=-0.1906, high=0.6179, form=".4g")
    '0 to 0.6179'
    """
    if is_share(name) and 0 <= mean <= 1:
        low, high = max(0.0, low), min(1.0, high)
    return f"{low:{form}} to {high:{form}}"
