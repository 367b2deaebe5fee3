"""The text recipe: which class a text belongs to. torch is imported when it is needed, so that a plan needs none."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from whet.plan.workload import Workload
from whet.recipes.text import config as text_config
from whet.recipes.text.config import TextConfig

if TYPE_CHECKING:
    from torch import Tensor

    from whet.data.batch import Micro
    from whet.recipes.text.data import TextData
    from whet.recipes.text.model import Encoder


class TextRecipe:
    """Classifies texts; by default the docstrings of installed libraries by library."""

    name = "text"
    Config = TextConfig
    goal = "accuracy"

    def describe(self, config: TextConfig, data: "TextData | None" = None) -> Workload:
        workload = text_config.describe(config)
        if data is None:
            return workload
        return text_config.describe_data(
            workload, config, num_samples=len(data.train["label"]), mean_length=data.mean_length, classes=data.classes
        )

    def data(self, config: TextConfig) -> "TextData":
        from whet.recipes.text.data import learn_tokenizer, tokenize
        from whet.recipes.text.reading import read_corpus

        corpus = read_corpus(config)
        tokenizer = learn_tokenizer(corpus, arch=config.arch)
        return tokenize(corpus, tokenizer=tokenizer, max_length=config.arch.max_length)

    def model(self, config: TextConfig, data: "TextData") -> "Encoder":
        from whet.recipes.text.model import Encoder

        return Encoder(config.arch, num_classes=len(data.classes), dropout=config.dropout)

    def loss(self, model: "Encoder", micro: "Micro") -> "Tensor":
        from torch.nn import functional

        return functional.cross_entropy(model(micro.tokens), micro.label)

    def evaluate(self, model: "Encoder", micros: Iterator["Micro"]) -> dict[str, float]:
        from torch.nn import functional

        right = total = 0
        loss = 0.0
        for micro in micros:
            logits = model(micro.tokens)
            loss += float(functional.cross_entropy(logits, micro.label, reduction="sum"))
            right += int((logits.argmax(1) == micro.label).sum())
            total += len(micro)
        return {"accuracy": right / total, "dev_loss": loss / total}

    def keep(self, config: TextConfig, data: "TextData") -> dict[str, Any]:
        return {"classes": list(data.classes)}


def recipe() -> TextRecipe:
    return TextRecipe()
