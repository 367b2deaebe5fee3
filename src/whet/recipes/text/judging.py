"""How good is the classifier, which classes does it confuse, and where was it wrong with the most conviction?"""

from collections.abc import Iterator
from heapq import nlargest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whet.data.ragged import Packed, Padded
from whet.recipes.text.loss import shares, text_losses
from whet.recipes.text.scoring import Scores

if TYPE_CHECKING:
    from whet.data.batch import Field, Micro
    from whet.recipes.text.choosing import Classifier
    from whet.recipes.text.data import TextData

NUM_SAMPLES = 8


class Mistake(NamedTuple):
    """A text that was judged wrong."""

    conviction: float
    """How far the worst of its classes was from the truth, in probability."""
    micro: "Micro"
    row: int
    expected: tuple[int, ...]
    predicted: tuple[int, ...]


def judge(model: "Classifier", micros: Iterator["Micro"], data: "TextData | None") -> dict[str, Any]:
    """Metrics, the scores of each class, the confusion matrix and the clearest mistakes.

    `data` knows the names of the classes and the words. Where a text may have several classes there is no matrix: none
    was taken for another.
    """
    return conclude([tally(model, micros, data)], data)


def tally(model: "Classifier", micros: Iterator["Micro"], data: "TextData | None") -> dict[str, Any]:
    """What is known of these texts, as plain JSON: several processes may tally a part each."""
    loss = 0.0
    scores: Scores | None = None
    mistakes: list[Mistake] = []
    for micro in micros:
        logits, label = model(micro.tokens), micro.label
        loss += float(text_losses(logits, label).sum())
        is_single, num_classes = label.dim() == 1, logits.shape[1]
        if scores is None:
            scores = Scores(num_classes, is_multi_label=not is_single)
        # On the CPU: not every device has float64, and a tie that rounding makes is no answer.
        found = shares(logits.float().cpu().double(), is_multi_label=not is_single).numpy()
        truth = label.cpu().numpy()
        is_right = scores.add(found, truth)
        answers = found > 0.5
        if is_single:
            truth, answers = (np.arange(num_classes) == chosen[:, None] for chosen in (truth, found.argmax(1)))
        for row in np.flatnonzero(~is_right):
            worst = float(np.abs(found[row] - truth[row]).max())
            classes = (tuple(np.flatnonzero(chosen[row] > 0.5).tolist()) for chosen in (truth, answers))
            mistakes.append(Mistake(worst, micro, int(row), *classes))
        mistakes = nlargest(NUM_SAMPLES, mistakes, key=_rank)
    clearest = [] if data is None else [(_rank(mistake), _shown(mistake, data)) for mistake in mistakes]
    return {"loss": loss, "scores": None if scores is None else scores.as_json(), "mistakes": clearest}


def conclude(tallies: list[dict[str, Any]], data: "TextData | None") -> dict[str, Any]:
    """What tallies over different texts say together."""
    counted = [told["scores"] for told in tallies if told["scores"] is not None]
    assert counted, "an evaluation has texts"
    scores = Scores(counted[0]["num_classes"], is_multi_label=counted[0]["is_multi_label"])
    for counts in counted:
        scores.take(counts)
    loss = sum(told["loss"] for told in tallies)
    told: dict[str, Any] = {**scores.metrics(), "cross_entropy": loss / scores.num_texts}
    if data is None:
        return told
    told["classes"] = {"labels": list(data.classes), **scores.classes()}
    if scores.confusion is not None:
        told["confusion"] = {"labels": list(data.classes), "counts": scores.confusion.tolist()}
    mistakes = [(tuple(rank), shown) for part in tallies for rank, shown in part["mistakes"]]
    told["samples"] = [shown for _, shown in nlargest(NUM_SAMPLES, mistakes, key=lambda mistake: mistake[0])]
    return told


def _rank(mistake: Mistake) -> tuple[float, int]:
    return mistake.conviction, -int(mistake.micro.ids[mistake.row])


def _shown(mistake: Mistake, data: "TextData") -> dict[str, Any]:
    return {
        "input": data.tokenizer.decode(_tokens(mistake.micro.tokens, mistake.row)).strip(),
        "expected": ", ".join(data.classes[place] for place in mistake.expected),
        "predicted": ", ".join(data.classes[place] for place in mistake.predicted),
        "conviction": mistake.conviction,
    }


def _tokens(field: "Field", row: int) -> list[int]:
    if isinstance(field, Packed):
        ids: list[int] = field.values[field.starts[row] : field.starts[row + 1]].tolist()
    elif isinstance(field, Padded):
        ids = field.values[row, : field.lengths[row]].tolist()
    else:
        ids = field[row].tolist()
    return ids
