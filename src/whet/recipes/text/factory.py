"""Make the tokenizer and the model that a config or a saved run asks for."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError
from whet.recipes.text.backbone import Backbone, backbone_of, model_folder, read_backbone
from whet.recipes.text.config import TextConfig, is_read_packed
from whet.recipes.text.corpus import Corpus
from whet.recipes.text.data import AnyTokenizer, TextData, learn_tokenizer
from whet.recipes.text.model import Encoder
from whet.recipes.text.tokenizer import PretrainedTokenizer, Tokenizer

if TYPE_CHECKING:
    from whet.recipes.text.bert import Bert
    from whet.recipes.text.pretrained import Pretrained

    Classifier = Encoder | Bert | Pretrained

MODEL_CONFIG = "model_config"
"""Where a run keeps the config of a pretrained model."""


def make_tokenizer(config: TextConfig, corpus: Corpus, *, kept: dict[str, Any] | None) -> AnyTokenizer:
    """A pretrained model's own, a run's own where weights are taken over from it, or one learned from the texts."""
    if kept is not None:
        if (MODEL_CONFIG in kept) != config.is_pretrained:
            raise UsageError(
                "init_from is a run of another model",
                got=f"init_from={config.init_from} model={config.model}",
                try_="the model of that run",
            )
        return load_tokenizer(kept)
    if config.is_pretrained:
        return PretrainedTokenizer.load(model_folder(config.model))
    return learn_tokenizer(corpus, arch=config.arch)


def load_tokenizer(kept: dict[str, Any]) -> AnyTokenizer:
    """The tokenizer of a run."""
    kind = PretrainedTokenizer if MODEL_CONFIG in kept else Tokenizer
    return kind.from_json(str(kept.get("tokenizer")))


def effective_max_length(config: TextConfig, tokenizer: AnyTokenizer) -> int:
    """Tokens of a text that are read: as many as you ask for and the model has positions for."""
    if not isinstance(tokenizer, PretrainedTokenizer):
        return config.arch.max_length
    most = read_backbone(str(model_folder(config.model))).most_tokens
    return min(config.arch.max_length, most, tokenizer.max_length)


def make_model(config: TextConfig, data: TextData) -> "Classifier":
    """The model with its first weights, drawn from torch's generator where they are new."""
    if not config.is_pretrained:
        return Encoder(config.arch, num_classes=len(data.classes), **_dropout_kwargs(config))
    from whet.recipes.text.pretrained import load_pretrained

    folder = Path(model_folder(config.model))
    made = load_pretrained(
        folder,
        classes=data.classes,
        is_multi_label=data.is_multi_label,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        frozen=config.freeze,
        lora=config.lora,
    )
    return _as_bert(made, config, read_backbone(str(folder)))


def saved_model_config(config: TextConfig, data: TextData) -> dict[str, Any]:
    """What a run keeps of its model besides the weights: nothing of the small encoder, whose sizes are keys."""
    if not config.is_pretrained:
        return {}
    from whet.recipes.text.pretrained import pretrained_config

    written = pretrained_config(
        model_folder(config.model),
        classes=data.classes,
        is_multi_label=data.is_multi_label,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )
    return {MODEL_CONFIG: written}


def load_model(config: TextConfig, kept: dict[str, Any]) -> "Classifier":
    """The model of a run without its weights; neither the hub nor the folder it came from is asked."""
    if MODEL_CONFIG not in kept:
        return Encoder(config.arch, num_classes=len(kept["classes"]), **_dropout_kwargs(config))
    from whet.recipes.text.pretrained import empty_pretrained

    made = empty_pretrained(kept[MODEL_CONFIG], dropout=config.dropout, frozen=config.freeze, lora=config.lora)
    return _as_bert(made, config, backbone_of(kept[MODEL_CONFIG]))


def _as_bert(made: "Pretrained", config: TextConfig, backbone: Backbone) -> "Bert | Pretrained":
    """The same weights under the same names, computed by us where we know how: then no batch needs padding."""
    if not is_read_packed(config, backbone):
        return made
    from whet.recipes.text.bert import Bert

    return Bert.of(made.network)


def _dropout_kwargs(config: TextConfig) -> dict[str, float]:
    return {"dropout": config.dropout, "word_dropout": config.word_dropout}
