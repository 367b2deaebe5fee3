"""How much does a class count in the loss? All alike, rare ones more, or as you say. No torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from whet.base.errors import UsageError, nearest
from whet.recipes.text.corpus import Corpus

ClassWeights = Literal["none", "balanced"] | dict[str, float]


def read_class_weights(value: Any) -> Any:
    """The words that a command line gives as what they mean; pydantic judges the rest.

    >>> read_class_weights("{rare: 5, 'a, b': 0.5}"), read_class_weights(None), read_class_weights("balanced")
    ({'rare': 5.0, 'a, b': 0.5}, 'none', 'balanced')
    """
    if value is None:
        return "none"
    if not isinstance(value, str) or not (value.startswith("{") and value.endswith("}")):
        return value
    weights: dict[str, float] = {}
    for item in _items(value[1:-1]):
        name, _, number = item.rpartition(":")
        try:
            weights[name.strip().strip("'\"")] = float(number)
        except ValueError:
            raise UsageError(
                "class_weights cannot be read", got=item.strip(), try_="class_weights='{rare: 5, common: 1}'"
            ) from None
    return weights


def _items(text: str) -> list[str]:
    """What stands between commas that are inside no quotes."""
    items, quote = [""], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        if letter == "," and not quote:
            items.append("")
        else:
            items[-1] += letter
    return [item for item in items if item.strip()]


def class_weights(wish: ClassWeights, corpus: Corpus) -> tuple[float, ...] | None:
    """The weight of each class in order; None when all count alike. A class that you do not name counts 1."""
    if wish == "none":
        return None
    if wish == "balanced":
        return balanced(corpus.train.label_sets or corpus.train.labels, num_classes=len(corpus.classes))
    assert isinstance(wish, Mapping)
    for name, weight in wish.items():
        if name not in corpus.classes:
            meant = nearest(name, corpus.classes)
            known = ", ".join(corpus.classes)[:200]
            raise UsageError("class_weights names no class of the data", got=name, try_=meant or known)
        if not 0 <= weight < float("inf"):
            raise UsageError("a class weight is a number from 0 on", got=f"{name}: {weight}", try_=f"{{{name}: 1}}")
    return tuple(float(wish.get(name, 1.0)) for name in corpus.classes)


def balanced(labels: Sequence[int] | Sequence[tuple[int, ...]], *, num_classes: int) -> tuple[float, ...]:
    """Weights that give every class the same share of the loss, with a mean of 1 over the rows.

    >>> balanced([0, 0, 0, 1], num_classes=2)
    (0.6666666666666666, 2.0)
    """
    seen = Counter(index for label in labels for index in (label if isinstance(label, tuple) else (label,)))
    return tuple(len(labels) / (num_classes * seen[index]) if seen[index] else 1.0 for index in range(num_classes))
