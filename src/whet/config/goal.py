"""The goal of a run: the metric that selects the best checkpoint, and whether a lower or a higher value is better."""

import re
from typing import Literal, cast

from whet.base.errors import UsageError

GoalMode = Literal["min", "max"]

_MINIMIZED_WORDS = """
    loss error errors err perplexity ppl bits bpb bpc bpd mse mae rmse msle rmsle mape smape nll crossentropy ce bce
    xent wer cer ter eer fid kid lpips brier ece kl divergence regret fpr fnr hinge deviance
"""
_MAXIMIZED_WORDS = """
    accuracy acc f1 fbeta auc auroc auprc roc precision recall map ap mrr ndcg bleu sacrebleu rouge rougel meteor chrf
    r2 iou miou dice jaccard mcc kappa psnr ssim likelihood elbo reward return win wins elo correct exact match em top
    sensitivity specificity tpr tnr pass pearson spearman correlation similarity
"""
_MINIMIZED, _MAXIMIZED = frozenset(_MINIMIZED_WORDS.split()), frozenset(_MAXIMIZED_WORDS.split())
# Words that imply a direction only if no other word does. For example, fid_score is minimized.
_WEAK_MAXIMIZED = frozenset(("score", "scores"))
_NEGATIONS = frozenset(("neg", "negative", "minus"))


def metric_mode(name: str) -> GoalMode | None:
    """Return "min" or "max" if the words in the name of a metric imply a direction, else None.

    >>> [metric_mode(name) for name in ("val_loss", "test_macro_f1", "bits_per_byte", "neg_mean_squared_error")]
    ['min', 'max', 'min', 'max']
    >>> metric_mode("closeness") is metric_mode("accuracy_loss") is None
    True
    """
    # "valLoss" is split at the capital only if "valloss" implies nothing, because "mIoU" is one word.
    for text in (name, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)):
        words = re.findall(r"[a-z0-9]+", text.lower().replace("cross_entropy", "crossentropy"))
        # Ignore digits after a word, as in top5, rouge2 or fid50k, except in names such as f1 and r2.
        known = {word if word in _MINIMIZED | _MAXIMIZED else re.split(r"\d", word)[0] for word in words}
        is_min, is_max = bool(known & _MINIMIZED), bool(known & _MAXIMIZED)
        if is_min and is_max:
            return None
        if not is_min and not is_max:
            is_max = bool(known & _WEAK_MAXIMIZED)
        if is_min or is_max:
            is_negated = bool(known & _NEGATIONS)
            return "min" if is_min != is_negated else "max"
    return None


def resolve_mode(goal: str | None, mode: str) -> GoalMode:
    """Return `mode`, or the direction that the name of the goal implies if `mode` is "auto".

    Raise UsageError if the name implies none.

    >>> resolve_mode("val_loss", "auto"), resolve_mode("val_loss", "max")
    ('min', 'max')
    """
    if mode not in ("auto", "min", "max"):
        raise UsageError("mode must be auto, min or max", got=repr(mode), try_='mode="min" or mode="max"')
    if mode != "auto":
        return cast("GoalMode", mode)
    if goal is None:
        # Without a goal, no metrics are compared, so the mode has no effect.
        return "max"
    known = metric_mode(goal)
    if known is None:
        raise UsageError(
            "the name of the goal does not imply whether lower or higher is better",
            got=f"goal={goal!r}",
            try_='mode="min" if lower is better, mode="max" if higher is better',
        )
    return known
