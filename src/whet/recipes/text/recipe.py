"""The text recipe: which class a text belongs to. torch is imported when it is needed, so that a plan needs none."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import OtherDataError, UsageError
from whet.plan.workload import Workload
from whet.recipes.text import config as text_config
from whet.recipes.text.backbone import folder_of
from whet.recipes.text.config import TextConfig
from whet.recipes.updated import Embedded, explained
from whet.run.folder import open_run

if TYPE_CHECKING:
    from torch import Tensor

    from whet.data.batch import Micro
    from whet.recipes.looking import DataLook
    from whet.recipes.text.choosing import Classifier
    from whet.recipes.text.data import TextData
    from whet.recipes.text.using.answering import Answering


_EMBEDDED = Embedded(
    is_made="the embedded texts are docstrings of six installed libraries",
    sources={"python": "Python", "torch": "torch", "transformers": "transformers", "numpy": "numpy"},
    otherwise="one of them has changed since, sympy or networkx perhaps",
    instead="texts of your own (data=FILE)",
)


class TextRecipe:
    """Classifies texts; by default the docstrings of installed libraries by library."""

    name = "text"
    Config = TextConfig
    goal = "accuracy"
    lower_is_better = frozenset(("cross_entropy",))
    _data: "TextData | None" = None
    """What was read last: an evaluation shows classes and texts by their names."""

    def describe(self, config: TextConfig, data: "TextData | None" = None) -> Workload:
        if data is None:
            return text_config.describe(config)
        from whet.recipes.text.hub import model_folder

        # A name on the hub is a folder by now.
        workload = text_config.describe(config, model_folder(config.model) if config.is_pretrained else None)
        return text_config.describe_data(
            workload, config, num_samples=len(data.train["label"]), mean_length=data.mean_length, classes=data.classes
        )

    def assumptions(self, config: TextConfig) -> tuple[str, ...]:
        """What `describe` takes for granted before anything is loaded."""
        if not config.is_pretrained or folder_of(config.model) is not None:
            return ()
        return (f"model={config.model} is no folder here, so BERT base is counted; a training counts the real one",)

    def data(self, config: TextConfig) -> "TextData":
        from whet.recipes.text.choosing import max_length_of, tokenizer_of
        from whet.recipes.text.data import cut_lines, tokenize
        from whet.recipes.text.reading import read_told_corpus
        from whet.recipes.text.weights import class_weights

        texts = read_told_corpus(config)
        corpus, kept = texts.corpus, None
        if config.init_from is not None:
            # The old weights know the old tokens; the classes must be the same too.
            refuse_imported(config.init_from)
            kept = open_run(config.init_from).kept
            refuse_other_classes(corpus.classes, kept.get("classes"), where=config.init_from)
        tokenizer = tokenizer_of(config, corpus, kept=kept)
        data = tokenize(
            corpus,
            tokenizer=tokenizer,
            max_length=max_length_of(config, tokenizer),
            class_weights=class_weights(config.class_weights, corpus),
        )
        # The embedded texts are no news.
        self._data = replace(data, notes=(*texts.told, *cut_lines(data))) if texts.told else data
        return self._data

    def model(self, config: TextConfig, data: "TextData") -> "Classifier":
        from whet.recipes.text.choosing import model_of

        return model_of(config, data)

    def loss(self, model: "Classifier", micro: "Micro") -> "Tensor | tuple[Tensor, Tensor]":
        from whet.recipes.text.loss import classification_loss

        return classification_loss(model(micro.tokens), micro)

    def evaluate(self, model: "Classifier", micros: Iterator["Micro"]) -> dict[str, Any]:
        from whet.recipes.text.judging import judge

        return judge(model, micros, self._data)

    def tally(self, model: "Classifier", micros: Iterator["Micro"]) -> dict[str, Any]:
        from whet.recipes.text.judging import tally

        return tally(model, micros, self._data)

    def conclude(self, model: "Classifier", tallies: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002
        from whet.recipes.text.judging import conclude

        return conclude(tallies, self._data)

    def keep(self, config: TextConfig, data: "TextData") -> dict[str, Any]:
        from whet.recipes.text.choosing import kept_of

        return {
            "max_length": data.max_length,
            "classes": list(data.classes),
            "tokenizer": data.tokenizer.to_json(),
            "data": data.fingerprint,
            "baseline": {} if data.baseline is None else {"naive Bayes": data.baseline},
            "is_multi_label": data.is_multi_label,
            "has_pairs": data.has_pairs,
            **kept_of(config, data),
        }

    def explain_other_data(
        self, error: OtherDataError, config: TextConfig, versions: Mapping[str, str | None]
    ) -> UsageError:
        """Only the embedded texts change by themselves."""
        return explained(error, _EMBEDDED, versions) if config.is_embedded else error

    def look_at_data(self, config: TextConfig, path: Path, *, fix: Path | None, leave: tuple[str, ...]) -> "DataLook":
        from whet.recipes.text.inspection.look import look_at_data

        return look_at_data(config, path, fix=fix, leave=leave)

    def question(self, kept: dict[str, Any]) -> str:  # noqa: ARG002
        """What it can be asked."""
        return "some text"

    def predict(self, config: TextConfig, kept: dict[str, Any]) -> "tuple[Classifier, Answering]":
        """A model without its weights, and what to ask once it has them."""
        from whet.recipes.text.choosing import kept_model, kept_tokenizer
        from whet.recipes.text.using.answering import Answering

        model = kept_model(config, kept)
        has_pairs = kept.get("has_pairs")
        return model, Answering(
            model,
            tokenizer=kept_tokenizer(kept),
            classes=[str(name) for name in kept["classes"]],
            max_length=int(kept["max_length"]),
            is_multi_label=bool(kept.get("is_multi_label")),
            has_pairs=has_pairs if isinstance(has_pairs, bool) else None,
            columns=config.column_wishes,
            separator=config.label_separator,
        )

    def write_model_files(self, model: "Classifier", kept: dict[str, Any], folder: Path, *, to: str) -> dict[str, Any]:
        from whet.recipes.text.using.model_files import write_model_files

        return write_model_files(model, kept, folder, to=to)


def refuse_imported(folder: str) -> None:
    """Imported weights know tokens that nobody told of."""
    if (Path(folder) / "import.json").exists():
        raise UsageError(
            "imported weights bring no tokenizer, so the text recipe cannot start from them",
            got=f"init_from={folder}",
            try_="init_from=RUN, a run of this recipe; or a recipe of your own",
        )


def refuse_other_classes(ours: Sequence[str], theirs: object, *, where: str) -> None:
    """A run whose weights are taken over must know the same classes."""
    if not isinstance(theirs, list) or list(ours) != theirs:
        raise UsageError(f"{where} has other classes", got=", ".join(ours)[:200], try_=f"data with {theirs}")


def recipe() -> TextRecipe:
    return TextRecipe()
