"""The text classification recipe. It imports torch lazily, so that planning works without torch."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import DataChangedError, UsageError, WhetError
from whet.base.extras import install_hint
from whet.plan.workload import Workload
from whet.recipes.recipe import EmbeddedData, Recipe, explain_data_change
from whet.recipes.text import config as text_config
from whet.recipes.text.backbone import local_folder
from whet.recipes.text.config import TextConfig
from whet.run.folder import open_run

if TYPE_CHECKING:
    from torch import Tensor

    from whet.data.batch import DictBatch
    from whet.recipes.recipe import DataInspection
    from whet.recipes.text.data import TextData
    from whet.recipes.text.factory import Classifier
    from whet.recipes.text.prediction import TextPredictor
    from whet.step.optimizers import OptimizerChoice


_EMBEDDED_DATA = EmbeddedData(
    is_made="the embedded texts are docstrings of six installed libraries",
    sources={"python": "Python", "torch": "torch", "transformers": "transformers", "numpy": "numpy"},
    otherwise="one of them has changed since, perhaps sympy or networkx",
    instead="your own texts (data=FILE)",
)


class TextRecipe(Recipe):
    """Text classification. Without `data`, it classifies docstrings of installed libraries by library."""

    name = "text"
    Config = TextConfig
    goal = "accuracy"
    _data: "TextData | None" = None
    """The data that was loaded last. Evaluations show its class names and texts."""

    def describe(self, config: TextConfig, data: "TextData | None" = None) -> Workload:
        if data is None:
            return text_config.describe(config)
        from whet.recipes.text.backbone import model_folder

        # A hub model has been downloaded at this point.
        workload = text_config.describe(config, model_folder(config.model) if config.is_pretrained else None)
        return text_config.describe_data(
            workload,
            config,
            num_samples=len(data.train["label"]),
            mean_length=data.mean_length,
            classes=data.classes,
            vocab_size=data.tokenizer.vocab_size,
        )

    def assumptions(self, config: TextConfig) -> tuple[str, ...]:
        """Return the assumptions that `describe` makes before anything is loaded, and what training needs here."""
        notes = []
        if config.is_pretrained and local_folder(config.model) is None:
            notes.append(
                f"model={config.model} is not a local folder, so the plan assumes BERT base; training uses real sizes"
            )
        try:
            self.check_installed(config)
        except WhetError as error:
            notes.append(f"to train on this machine: {error.what}; {error.try_}")
        return tuple(notes)

    def check_installed(self, config: TextConfig) -> None:
        """Raise an error for a library that is missing. Nothing is read or imported."""
        if config.is_pretrained and importlib.util.find_spec("transformers") is None:
            raise UsageError(
                "a pretrained model needs the extra text",
                got="no package 'transformers'",
                try_=f"{install_hint('text')}, or model=small",
            )
        if config.is_embedded:
            from whet.recipes.text.embedded import check_libraries

            check_libraries()

    def data(self, config: TextConfig) -> "TextData":
        from whet.recipes.text.corpus import class_weights, rare_classes
        from whet.recipes.text.corpus_reader import load_corpus
        from whet.recipes.text.data import tokenize, truncation_notes
        from whet.recipes.text.factory import effective_max_length, make_tokenizer

        loaded = load_corpus(config)
        corpus, metadata = loaded.corpus, None
        if config.init_from is not None:
            # The weights are valid only with their own tokenizer and order of classes.
            _check_not_imported(config.init_from)
            metadata = open_run(config.init_from).metadata
            _check_same_classes(corpus.classes, metadata.get("classes"), where=config.init_from)
        tokenizer = make_tokenizer(config, corpus, metadata=metadata)
        rare = rare_classes(corpus)
        is_balanced = config.class_weights == "auto" and config.is_linear
        data = tokenize(
            corpus,
            tokenizer=tokenizer,
            max_length=effective_max_length(config, tokenizer),
            class_weights=class_weights("balanced" if is_balanced else config.class_weights, corpus),
        )
        # The embedded dataset is always the same and needs no notes.
        notes = (*loaded.notes, *truncation_notes(data), *_uneven_notes(config, rare)) if loaded.notes else ()
        self._data = replace(data, notes=notes, is_uneven=bool(rare))
        return self._data

    def selected_goal(self, config: TextConfig) -> str:
        """Return the metric that selects the best weights; auto: macro-F1 if some classes are rare, else accuracy."""
        if config.goal != "auto":
            return config.goal
        if self._data is not None:
            is_uneven = self._data.is_uneven
        elif config.is_embedded:
            is_uneven = False
        else:
            # A search calls this method before its trials load the data.
            from whet.recipes.text.corpus import rare_classes
            from whet.recipes.text.corpus_reader import load_corpus

            is_uneven = bool(rare_classes(load_corpus(config).corpus))
        return "macro_f1" if is_uneven else "accuracy"

    def model(self, config: TextConfig, data: "TextData") -> "Classifier":
        from whet.recipes.text.factory import make_model

        return make_model(config, data)

    def optimizer(self, config: TextConfig) -> "OptimizerChoice":
        from whet.step.optimizers import OptimizerChoice

        num_texts = 1 if self._data is None else len(self._data.train["label"])
        decay = text_config.weight_decay(config, num_texts=num_texts)
        return OptimizerChoice(name=config.optimizer, lr=config.lr, weight_decay=decay)

    def loss(self, model: "Classifier", micro: "DictBatch") -> "Tensor | tuple[Tensor, Tensor]":
        from whet.recipes.text.evaluation import classification_loss

        averages_over_texts = getattr(model, "averages_over_texts", False)
        return classification_loss(model(micro.tokens), micro, averages_over_texts=averages_over_texts)

    def partial_metrics(self, model: "Classifier", micro_batches: Iterator["DictBatch"]) -> dict[str, Any]:
        from whet.recipes.text.evaluation import partial_metrics

        return partial_metrics(model, micro_batches, self._data)

    def merge_metrics(self, model: "Classifier", parts: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002
        from whet.recipes.text.evaluation import merge_metrics

        return merge_metrics(parts, self._data)

    def metadata(self, config: TextConfig, data: "TextData") -> dict[str, Any]:
        from whet.recipes.text.factory import model_metadata

        return {
            "classes": list(data.classes),
            "max_length": data.max_length,
            "tokenizer": data.tokenizer.to_json(),
            "data": data.fingerprint,
            "baseline": {
                name: metrics[goal]
                for name, metrics in data.baselines.items()
                if (goal := self.selected_goal(config)) in metrics
            },
            "is_multi_label": data.is_multi_label,
            "has_pairs": data.has_pairs,
            **model_metadata(config, data),
        }

    def explain_changed_data(
        self, error: DataChangedError, config: TextConfig, versions: Mapping[str, str | None]
    ) -> UsageError:
        """Return the error with its cause: only the embedded texts change when installed libraries are updated."""
        return explain_data_change(error, _EMBEDDED_DATA, versions) if config.is_embedded else error

    def inspect_data(
        self, config: TextConfig, path: Path, *, fix: Path | None, leave: tuple[str, ...]
    ) -> "DataInspection":
        from whet.recipes.text.data_report.clean_copy import report_on_data

        return report_on_data(config, path, fix=fix, leave=leave)

    def example_input(self, metadata: dict[str, Any]) -> str:  # noqa: ARG002
        """Return an example input for `whet predict`."""
        return "some text"

    def predict(self, config: TextConfig, metadata: dict[str, Any]) -> "tuple[Classifier, TextPredictor]":
        """Return a model without trained weights and a predictor that uses it."""
        from whet.recipes.text.factory import load_model, load_tokenizer
        from whet.recipes.text.prediction import TextPredictor

        model = load_model(config, metadata)
        has_pairs = metadata.get("has_pairs")
        return model, TextPredictor(
            model,
            tokenizer=load_tokenizer(metadata),
            classes=[str(name) for name in metadata["classes"]],
            max_length=int(metadata["max_length"]),
            is_multi_label=bool(metadata.get("is_multi_label")),
            has_pairs=has_pairs if isinstance(has_pairs, bool) else None,
            columns=config.column_overrides,
            separator=config.label_separator,
        )

    def write_model_files(
        self, model: "Classifier", metadata: dict[str, Any], folder: Path, *, to: str
    ) -> dict[str, Any]:
        from whet.recipes.text.export import write_model_files

        return write_model_files(model, metadata, folder, to=to)


def _uneven_notes(config: TextConfig, rare: Sequence[str]) -> list[str]:
    """Return a note about defaults that were chosen, or options to try, because some classes are rare."""
    if not rare or "auto" not in (config.class_weights, config.goal):
        return []
    shown = ", ".join(rare[:3]) + (f" and {len(rare) - 3} more" if len(rare) > 3 else "")
    weights = "class_weights=balanced" if config.class_weights == "auto" and config.is_linear else ""
    goal = "goal=macro_f1" if config.goal == "auto" else ""
    chosen = " and ".join(filter(None, (weights, goal)))
    advised = "; try class_weights=balanced" if config.class_weights == "auto" and not config.is_linear else ""
    return [f"rare classes ({shown})" + (f": {chosen} by default" if chosen else "") + advised]


def _check_not_imported(folder: str) -> None:
    if (Path(folder) / "import.json").exists():
        raise UsageError(
            "imported weights have no tokenizer, so the text recipe cannot start from them",
            got=f"init_from={folder}",
            try_="init_from=RUN, a run of this recipe; or your own recipe",
        )


def _check_same_classes(ours: Sequence[str], theirs: object, *, where: str) -> None:
    if not isinstance(theirs, list) or list(ours) != theirs:
        raise UsageError(f"{where} has different classes", got=", ".join(ours)[:200], try_=f"data with {theirs}")


def recipe() -> TextRecipe:
    return TextRecipe()
