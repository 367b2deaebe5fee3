"""Build the tokenizer and the model from a config or from the metadata of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError
from whet.recipes.text.backbone import Backbone, backbone_of, model_folder, read_backbone
from whet.recipes.text.config import LINEAR_NGRAMS, TextConfig, can_read_packed, class_strengths
from whet.recipes.text.corpus import Corpus
from whet.recipes.text.data import AnyTokenizer, TextData
from whet.recipes.text.model import Encoder
from whet.recipes.text.ngrams import NgramClassifier, NgramVocabulary
from whet.recipes.text.tokenizer import PretrainedTokenizer, Tokenizer

if TYPE_CHECKING:
    from whet.recipes.text.bert import Bert
    from whet.recipes.text.pretrained import FineTuning, Pretrained

    Classifier = Encoder | NgramClassifier | Bert | Pretrained

MODEL_CONFIG = "model_config"
"""The metadata key for the config of a pretrained model."""
IS_LINEAR = "is_linear"
"""The metadata key that marks a run of the linear classifier."""


def make_tokenizer(config: TextConfig, corpus: Corpus, *, metadata: dict[str, Any] | None) -> AnyTokenizer:
    """Return the tokenizer of the `init_from` run or of a pretrained model, or train one on the texts.

    Args:
        metadata: The metadata of the `init_from` run; None without `init_from`.
    """
    if metadata is not None:
        # Only runs of pretrained models have MODEL_CONFIG, and only runs of linear models have IS_LINEAR.
        if ((MODEL_CONFIG in metadata), bool(metadata.get(IS_LINEAR))) != (config.is_pretrained, config.is_linear):
            raise UsageError(
                "init_from is a run of a different model",
                got=f"init_from={config.init_from} model={config.model}",
                try_="the model of that run",
            )
        return load_tokenizer(metadata)
    if config.is_pretrained:
        folder = model_folder(config.model)
        tokenizer = PretrainedTokenizer.load(folder)
        num_rows = read_backbone(str(folder)).vocab_size
        if tokenizer.max_id >= num_rows:
            raise UsageError(
                "the tokenizer has more words than the model's embedding has rows",
                got=f"{folder}: token ids up to {tokenizer.max_id:,}, vocab_size {num_rows:,}",
                try_="the tokenizer of this model; or model.resize_token_embeddings, then save_pretrained",
            )
        return tokenizer
    if config.is_linear:
        pairs = corpus.train.pairs or ("",) * len(corpus.train)
        return NgramVocabulary.train(f"{one}\n{two}" for one, two in zip(corpus.train.texts, pairs, strict=True))
    return Tokenizer.train((*corpus.train.texts, *corpus.train.pairs), vocab_size=config.arch.vocab_size)


def load_tokenizer(metadata: dict[str, Any]) -> AnyTokenizer:
    """Load the tokenizer from the metadata of a run."""
    saved = str(metadata.get("tokenizer"))
    if metadata.get(IS_LINEAR):
        return NgramVocabulary.from_json(saved)
    return PretrainedTokenizer.from_json(saved) if MODEL_CONFIG in metadata else Tokenizer.from_json(saved)


def effective_max_length(config: TextConfig, tokenizer: AnyTokenizer) -> int:
    """Return `arch.max_length`, limited by a pretrained model; a fixed number of n-grams for the linear classifier."""
    if isinstance(tokenizer, NgramVocabulary):
        return LINEAR_NGRAMS
    if not isinstance(tokenizer, PretrainedTokenizer):
        return config.arch.max_length
    # Both the model's positions and the tokenizer's declared maximum limit the length.
    limit = read_backbone(str(model_folder(config.model))).max_tokens
    return min(config.arch.max_length, limit, tokenizer.max_length)


def make_model(config: TextConfig, data: TextData) -> "Classifier":
    """Build the model with its initial weights. New weights are drawn from torch's generator."""
    if isinstance(data.tokenizer, NgramVocabulary):
        return NgramClassifier(data.tokenizer, strengths=class_strengths(data.class_counts))
    if not config.is_pretrained:
        return _small_encoder(config, num_classes=len(data.classes))
    from whet.recipes.text.pretrained import load_pretrained

    folder = Path(model_folder(config.model))
    model = load_pretrained(
        folder, classes=data.classes, is_multi_label=data.is_multi_label, tuning=_fine_tuning(config)
    )
    return _without_padding(model, config, read_backbone(str(folder)))


def model_metadata(config: TextConfig, data: TextData) -> dict[str, Any]:
    """Return the metadata needed to rebuild the model; empty for the small encoder, whose sizes are options."""
    if not config.is_pretrained:
        return {IS_LINEAR: True} if config.is_linear else {}
    from whet.recipes.text.pretrained import pretrained_config

    saved = pretrained_config(
        model_folder(config.model),
        classes=data.classes,
        is_multi_label=data.is_multi_label,
        tuning=_fine_tuning(config),
    )
    return {MODEL_CONFIG: saved}


def load_model(config: TextConfig, metadata: dict[str, Any]) -> "Classifier":
    """Build the model of a run without its weights. Needs neither the hub nor the original folder."""
    if metadata.get(IS_LINEAR):
        vocabulary = NgramVocabulary.from_json(str(metadata.get("tokenizer")))
        # The actual values are a buffer of the model and are loaded with the checkpoint.
        return NgramClassifier(vocabulary, strengths=[1.0] * len(metadata["classes"]))
    if MODEL_CONFIG not in metadata:
        return _small_encoder(config, num_classes=len(metadata["classes"]))
    from whet.recipes.text.pretrained import empty_pretrained

    model = empty_pretrained(metadata[MODEL_CONFIG], tuning=_fine_tuning(config))
    return _without_padding(model, config, backbone_of(metadata[MODEL_CONFIG]))


def _small_encoder(config: TextConfig, *, num_classes: int) -> Encoder:
    return Encoder(config.arch, num_classes=num_classes, dropout=config.dropout, word_dropout=config.word_dropout)


def _fine_tuning(config: TextConfig) -> "FineTuning":
    from whet.recipes.text.pretrained import FineTuning

    return FineTuning(
        dropout=config.dropout, attention_dropout=config.attention_dropout, freeze=config.freeze, lora=config.lora
    )


def _without_padding(model: "Pretrained", config: TextConfig, backbone: Backbone) -> "Bert | Pretrained":
    """Convert to `Bert`, which accepts packed batches, if it implements the architecture."""
    if not can_read_packed(config, backbone):
        return model
    from whet.recipes.text.bert import Bert

    return Bert.of(model.network)
