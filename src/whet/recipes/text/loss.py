"""What is minimised? Cross entropy over the classes, or over each class by itself where a text may have several."""

import torch
from torch import Tensor
from torch.nn import functional

from whet.data.batch import Micro


def classification_loss(logits: Tensor, micro: Micro) -> Tensor | tuple[Tensor, Tensor]:
    """The mean over texts; with class weights the pair (weighted sum, sum of weights), whatever the micro-batch."""
    losses = text_losses(logits, micro.label, reduced=False)
    if "weight" not in micro.fields:
        return losses.mean()
    return (losses * micro.weight).sum(), micro.weight.sum()


def text_losses(logits: Tensor, label: Tensor, *, reduced: bool = True) -> Tensor:
    """The loss of each text; not reduced, of each class of each text where it may have several."""
    if label.dim() == 1:
        return functional.cross_entropy(logits, label, reduction="none")
    losses = functional.binary_cross_entropy_with_logits(logits, label.to(logits.dtype), reduction="none")
    return losses.mean(1) if reduced else losses


def shares(logits: Tensor, *, is_multi_label: bool) -> Tensor:
    """The probability of each class."""
    return torch.sigmoid(logits) if is_multi_label else logits.softmax(1)
