"""Options of the text recipe and the workload they describe. No torch."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    model_validator,
)

from whet.base.errors import UsageError
from whet.config.options import Auto, CommonConfig
from whet.plan.kernel_support import ADD_NORM, SPAN_ATTENTION, supports_add_norm, supports_span_attention
from whet.plan.workload import OPTIMIZER_BYTES, Workload
from whet.recipes.text.backbone import LINEAR, SMALL, Backbone, read_backbone
from whet.recipes.text.corpus import ClassWeights, read_class_weights
from whet.recipes.text.readers.samples import ColumnOverrides

EMBEDDED_CLASSES = 6
EMBEDDED_ROWS_PER_CLASS = 1_100
EMBEDDED_MEAN_LENGTH = 19.0
"""Mean number of tokens of an embedded text. Few have more than 64."""
TRAIN_SHARE = 0.8

FINE_TUNING = {"epochs": 4, "lr": 2e-5, "warmup_share": 0.1, "word_dropout": 0.0}
"""Defaults for a pretrained model: "2 or 4 epochs, 2e-5" was best overall (Beltagy et al. 2019, SciBERT, 3.4)."""
FROZEN_LR = 1e-3
"""The default learning rate if only the head is trained (the frozen variant of the same paper)."""
LORA_LR = 2e-4
"""LoRA starts from a zero update and has few weights, so its learning rate is ten times that of full fine-tuning."""
FINE_TUNING_LENGTH = 256
LINEAR_TRAINING = {
    "optimizer": "sgd",
    "lr": 2.0,
    "epochs": 20,
    "global_batch_size": 128,
    "eval_every": 10**9,
    "dropout": 0.0,
    "word_dropout": 0.0,
}
"""Defaults of the linear classifier.

optimizer: Adam would take full steps for n-grams that occur in only two texts, and memorize these texts.

global_batch_size: With a large batch, most steps contain texts of rare classes.

lr: For any number of texts and any C (ngrams.py), lr * epochs / batch determines how far SGD approaches the minimum.
With momentum 0.9 and a linear schedule, the weight decay shrinks the initial error by exp(-1.6). With lr=0.5, training
on thousands of texts stopped too early: -0.005 in cross-validation
(docs/bench/text-quality_linux-2core_2026-11-18.md).

eval_every: Evaluate at the end only. The problem is convex, so earlier weights are not better, and a validation split
with ten rows of a rare class would select some of them by chance.
"""
_ENOUGH_ROWS, _MIN_C = 500, 0.05
"""The number of rows from which a class gets C = 1, scikit-learn's default, and the smallest C of a rare class."""
LINEAR_NGRAMS = 8_192
"""The maximum number of n-grams per text for the linear classifier. Longer texts are truncated."""
_TYPICAL_NGRAMS = 50_000
"""The vocabulary size of several thousand sentences, assumed until the data is read."""
_ENCODER_KEYS = ("arch", "dropout", "word_dropout", "init_from")


class TextArch(BaseModel):
    """The sizes of the small encoder, which is trained from scratch."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    hidden_size: Annotated[int, Field(gt=0, le=65_536)] = Field(128, description="width of the encoder")
    layers: Annotated[int, Field(gt=0, le=1_000)] = Field(1, description="blocks of attention and feed-forward")
    heads: Annotated[int, Field(gt=0, le=65_536)] = Field(4, description="attention heads; must divide hidden_size")
    max_length: Annotated[int, Field(gt=0, le=10**6)] = Field(
        64, description="texts are truncated to this many tokens; 256 if pretrained"
    )
    vocab_size: Annotated[int, Field(ge=300, le=10**7)] = Field(4096, description="entries of the BPE vocabulary")

    @model_validator(mode="after")
    def heads_divide_width(self) -> "TextArch":
        if self.hidden_size % self.heads:
            divisors = [str(n) for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0][:8]
            raise UsageError(
                "arch.heads must divide arch.hidden_size",
                got=f"{self.hidden_size} / {self.heads}",
                try_="arch.heads=" + " or ".join(divisors),
            )
        return self


_DEFAULT_ARCH = TextArch()


class TextConfig(CommonConfig):
    """Text classification: the common options and those of the encoder."""

    # Chosen on the embedded texts by validation accuracy over three seeds. Many neighbors are equal within the noise.
    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 10, "lr": 1e-3}
    descriptions: ClassVar[Mapping[str, str]] = {
        "epochs": "passes over the training data; linear 20; 4 for a pretrained model, SciBERT's best were 2 or 4",
        "lr": "learning rate; linear 2; pretrained 2e-5, SciBERT's best; lora 2e-4; freeze=encoder 1e-3",
        "global_batch_size": "samples per optimizer step; linear 128; auto measures a size and scales lr",
        "optimizer": "optimizer that updates the weights; linear sgd",
        "eval_every": "steps between evaluations; auto: once per epoch; linear: at the end only",
    }

    model: str = Field(
        "auto",
        description="linear: TF-IDF n-grams; small: an encoder from scratch; or a folder or hub name (NAME@REVISION) "
        "of transformers; auto: linear for given data, small for the embedded texts or with arch, dropout, init_from",
    )
    freeze: Literal["none", "embeddings", "encoder"] | NonNegativeInt = Field(
        "none", description="frozen part of a pretrained model; N: the embeddings and the first N layers"
    )
    lora: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        None, description="rank of LoRA updates to a frozen model (extra lora); null: full fine-tuning"
    )
    weight_decay: NonNegativeFloat | Auto = Field(  # type: ignore[assignment]
        "auto",
        description="weight decay; biases and norms are excluded, except with adam_atan2; auto: 0.01; linear: 1 "
        "/ training texts, and more for a class with few of them",
    )
    warmup_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.06, description="share of the steps until the full learning rate; 0.1 for a pretrained model, as for BERT"
    )
    goal: Literal["auto", "accuracy", "macro_f1", "micro_f1", "cross_entropy"] = Field(
        "auto",
        description="validation metric that selects the best weights; auto: accuracy, macro_f1 if uneven classes",
    )
    word_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.5, description="share of tokens that model=small drops in training; 0 with dropout=0"
    )
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="dropout of a pretrained model's attention weights; null: same as dropout"
    )
    lengths: Literal["fixed", "sorted", "bucketed", "packed", "packed_bucketed", "auto"] = Field(
        "auto", description="how texts of different lengths are batched"
    )
    text_column: str | None = Field(None, description="column with the text; null: guessed from the column names")
    label_column: str | None = Field(None, description="column with the label; null: guessed from the column names")
    pair_column: str | None = Field(None, description="column with the second text of sentence pairs")
    group_column: str | None = Field(None, description="rows with the same value stay in the same split")
    label_separator: str | None = Field(
        "auto", description="separator between several labels of a text; auto: detected; null: none"
    )
    class_weights: Annotated[ClassWeights, BeforeValidator(read_class_weights)] = Field(
        "auto",
        description="none, balanced (each class has the same share of the loss), or '{name: weight, ...}'; auto: "
        "balanced for model=linear, else none",
    )
    split_seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="selects the held-out rows when the data has no validation or test split"
    )
    arch: TextArch = TextArch()

    group_aliases: ClassVar[dict[str, str]] = {"attention_heads": "arch.heads"}

    @property
    def is_pretrained(self) -> bool:
        """Whether a Transformers model is fine-tuned."""
        return self.model not in (LINEAR, SMALL)

    @property
    def is_linear(self) -> bool:
        """Whether the linear classifier of n-grams is trained."""
        return self.model == LINEAR

    @property
    def is_embedded(self) -> bool:
        """Whether the embedded dataset is used because no data is given."""
        return not self.paths

    @property
    def column_overrides(self) -> ColumnOverrides:
        """The columns named by the user."""
        return ColumnOverrides(
            text=self.text_column, label=self.label_column, pair=self.pair_column, group=self.group_column
        )

    @model_validator(mode="before")
    @classmethod
    def fill_dependent_defaults(cls, given: Any) -> Any:
        """Choose the model and apply its defaults. Explicit values take precedence."""
        if not isinstance(given, dict):
            return given
        if given.get("model", "auto") == "auto":
            is_given = bool(given.get("data") or given.get("data_paths"))
            is_encoder = any(given.get(key) for key in _ENCODER_KEYS)
            given = {**given, "model": LINEAR if is_given and not is_encoder else SMALL}
        if given["model"] == LINEAR:
            return {**LINEAR_TRAINING, **given}
        if given["model"] == SMALL:
            # dropout=0 requests a deterministic forward pass, so disable word dropout too.
            return {"word_dropout": 0.0, **given} if given.get("dropout") == 0 else given
        rate = FROZEN_LR if given.get("freeze") == "encoder" else LORA_LR if given.get("lora") else FINE_TUNING["lr"]
        filled = {**FINE_TUNING, "lr": rate, **given}
        arch = filled.get("arch", {})
        return {**filled, "arch": {"max_length": FINE_TUNING_LENGTH, **arch}} if isinstance(arch, dict) else filled

    @model_validator(mode="after")
    def check_model_options(self) -> "TextConfig":
        """Reject options that the chosen model does not have."""
        if self.is_pretrained or self.is_linear:
            self._check_no_encoder_options()
        if self.is_pretrained:
            return self
        pretrained_only = {
            "freeze": self.freeze != "none",
            "lora": self.lora is not None,
            "attention_dropout": self.attention_dropout is not None,
        }
        for key, is_given in pretrained_only.items():
            if is_given:
                raise UsageError(
                    f"{key} needs a pretrained model", got=f"{key} and model={self.model}", try_="model=FOLDER"
                )
        return self

    def _check_no_encoder_options(self) -> None:
        own = ("hidden_size", "layers", "heads", "vocab_size")
        for key in (*own, "max_length") if self.is_linear else own:
            if getattr(self.arch, key) != getattr(_DEFAULT_ARCH, key):
                raise UsageError(
                    f"arch.{key} applies to model=small only",
                    got=f"model={self.model}",
                    try_=f"remove arch.{key}: the model's own size is used",
                )
        if self.word_dropout or (self.is_linear and self.dropout):
            raise UsageError(
                f"{'word_dropout' if self.word_dropout else 'dropout'} does not apply to this model",
                got=f"model={self.model} dropout={self.dropout} word_dropout={self.word_dropout}",
                try_="weight_decay=1e-3" if self.is_linear else "dropout=0.1",
            )
        if self.lora is not None and self.freeze != "none":
            raise UsageError(
                "LoRA freezes the model already",
                got=f"lora={self.lora} freeze={self.freeze}",
                try_="one of them",
            )


def class_strengths(counts: Sequence[int]) -> list[float]:
    """Return C for each class of the linear classifier: the inverse regularization strength, as in scikit-learn.

    A class with few rows needs a smaller C, or its weights memorize these rows. A smaller C for all classes would make
    the other classes worse. Each value is the geometric mean of the C for the class and the C for the rarest class. The
    formula was chosen by cross-validation on training rows (docs/bench/text-quality_linux-2core_2026-11-18.md).

    >>> [round(strength, 2) for strength in class_strengths([1000, 125, 30])]
    [0.24, 0.12, 0.06]
    """
    own = [min(1.0, max(_MIN_C, count / _ENOUGH_ROWS)) for count in counts]
    return [math.sqrt(min(own) * strength) for strength in own]


def weight_decay(config: TextConfig, *, num_texts: int) -> float:
    """Return the weight decay. For the linear classifier, it corresponds to C = 1; the model scales it per class."""
    if config.weight_decay != "auto":
        return config.weight_decay
    if config.is_linear:
        return 1 / num_texts
    default: float = CommonConfig.model_fields["weight_decay"].default
    return default


# --- workload ---------------------------------------------------------------------------------------------------------


def can_read_packed(config: TextConfig, backbone: Backbone | None) -> bool:
    """Return whether the model reads packed batches: the small encoder, or a fully trained BERT or RoBERTa."""
    return backbone is None or (backbone.is_read_packed and config.lora is None and config.freeze == "none")


def describe(config: TextConfig, folder: Path | None = None) -> Workload:
    """Describe the workload of a config. The size of user data is unknown until the data is read.

    Args:
        folder: The local files of a hub model; None before they are downloaded.
    """
    _check_data_exists(config)
    num_samples = int(EMBEDDED_CLASSES * EMBEDDED_ROWS_PER_CLASS * TRAIN_SHARE) if config.is_embedded else None
    # The sizes of a hub model are those of BERT base until its files are downloaded (`backbone.py`).
    backbone = read_backbone(config.model if folder is None else str(folder)) if config.is_pretrained else None
    can_pack = can_read_packed(config, backbone)
    if config.lengths in ("packed", "packed_bucketed") and not can_pack:
        raise UsageError(
            "packed batches need model=small or a fully trained BERT or RoBERTa",
            got=f"model={config.model} lora={config.lora} freeze={config.freeze}",
            try_="lengths=sorted, or auto",
        )
    if config.is_linear:
        return _describe_linear(config)
    max_length = config.arch.max_length if backbone is None else min(config.arch.max_length, backbone.max_tokens)
    return Workload(
        recipe="text",
        **_num_parameters(config, num_classes=EMBEDDED_CLASSES),
        global_batch_size=config.global_batch_size,
        optimizer_bytes=OPTIMIZER_BYTES[config.optimizer],
        built_optimizer=config.optimizer,
        num_samples=num_samples,
        num_steps=config.count_steps(num_samples),
        max_length=max_length,
        mean_length=min(EMBEDDED_MEAN_LENGTH, max_length) if config.is_embedded else None,
        lengths_vary=True,
        can_pack=can_pack,
        # Each sample has int64 token ids and a label.
        sample_bytes=8 * (max_length + 1),
        activation_bytes=activation_bytes(config.arch) if backbone is None else backbone.activation_bytes(max_length),
        **_cost(config.arch.layers, config.arch.hidden_size, max_length)
        if backbone is None
        else _cost(backbone.layers, backbone.width, max_length),
        has_dropout=config.dropout > 0 or config.word_dropout > 0,
        layers=_layers(config, backbone),
    )


def _cost(layers: int, width: int, length: int) -> dict[str, float | int]:
    """Return FLOPs and operator calls of an encoder with 12 width^2 weights per block and attention over all tokens."""
    return {
        "flops_per_sample": 6.0 * layers * length * (12 * width**2 + 2 * length * width),
        # A block runs about 20 operators forward and 40 backward.
        "num_operators": 60 * layers + 60,
    }


def _describe_linear(config: TextConfig) -> Workload:
    """Describe the linear classifier. The number of n-grams is unknown until the data is read."""
    return Workload(
        recipe="text",
        **_num_parameters(config, num_classes=EMBEDDED_CLASSES),
        global_batch_size=config.global_batch_size,
        optimizer_bytes=OPTIMIZER_BYTES[config.optimizer],
        built_optimizer=config.optimizer,
        num_steps=config.count_steps(None),
        max_length=LINEAR_NGRAMS,
        lengths_vary=True,
        can_pack=True,
        sample_bytes=8 * (LINEAR_NGRAMS + 1),
        # Each n-gram keeps its id, its weights and its rows of the table.
        activation_bytes=LINEAR_NGRAMS * (32 + 8 * EMBEDDED_CLASSES),
        layers=("linear",),
    )


def describe_data(
    workload: Workload,
    config: TextConfig,
    *,
    num_samples: int,
    mean_length: float,
    classes: Sequence[str],
    vocab_size: int,
) -> Workload:
    """Return the workload with the sizes that are known once the data has been read."""
    known = {
        **_num_parameters(config, num_classes=len(classes), vocab_size=vocab_size),
        "num_samples": num_samples,
        "num_steps": config.count_steps(num_samples),
        "mean_length": mean_length,
    }
    return workload.model_copy(update=known)


def count_parameters(arch: TextArch, *, num_classes: int) -> int:
    """Return the number of parameters of the small encoder: embeddings, blocks, final norm and classifier."""
    width = arch.hidden_size
    block = 12 * width**2 + 13 * width
    embeddings = (arch.vocab_size + arch.max_length) * width
    return embeddings + arch.layers * block + 2 * width + (width + 1) * num_classes


def activation_bytes(arch: TextArch) -> int:
    """Return the float32 bytes that one text of full length keeps for the backward pass.

    Korthikanti et al. 2022 ("Reducing Activation Recomputation"), section 4.1, count 34 sbh + 5 as^2 b bytes per block
    in half precision with one-byte dropout masks. All terms except the masks double in float32: 66 and 9.
    """
    length, width = arch.max_length, arch.hidden_size
    block = 66 * length * width + 9 * arch.heads * length**2
    return arch.layers * block + 8 * length * width


def _layers(config: TextConfig, backbone: Backbone | None) -> tuple[str, ...]:
    """Return the kinds of layers, from which the plan determines which of whet's kernels are supported."""
    has_sums = backbone is not None and can_read_packed(config, backbone) and supports_add_norm(backbone.width)
    optional = {SPAN_ATTENTION: _has_spans(config, backbone), ADD_NORM: has_sums}
    return ("attention", "gelu", "layer norm", "linear", *(name for name, is_used in optional.items() if is_used))


def _has_spans(config: TextConfig, backbone: Backbone | None) -> bool:
    """Return whether whet's kernels can attend packed texts. They do not support dropout."""
    if backbone is None:
        return supports_span_attention(config.arch.hidden_size // config.arch.heads)
    dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
    return (
        dropout == 0 and can_read_packed(config, backbone) and supports_span_attention(backbone.width // backbone.heads)
    )


def _num_parameters(config: TextConfig, *, num_classes: int, vocab_size: int = _TYPICAL_NGRAMS) -> dict[str, int]:
    """Return the trained and frozen parameters. They are counted again once the model exists."""
    if config.is_linear:
        return {"num_parameters": (vocab_size + 1) * num_classes, "num_frozen": 0}
    if not config.is_pretrained:
        return {"num_parameters": count_parameters(config.arch, num_classes=num_classes), "num_frozen": 0}
    backbone = read_backbone(config.model)
    trained = backbone.num_trained(num_classes=num_classes, freeze=config.freeze, lora=config.lora)
    # LoRA adds parameters to the model and freezes the rest. peft trains a copy of the head.
    part_of_model = trained if config.lora is None else 0
    return {"num_parameters": trained, "num_frozen": backbone.num_parameters(num_classes=num_classes) - part_of_model}


def _check_data_exists(config: TextConfig) -> None:
    for path in config.paths:
        # os.path.exists is False for a name that is too long; Path.exists raises.
        if not os.path.exists(path):  # noqa: PTH110
            raise UsageError("the data does not exist", got=f"data={path}", try_="a file or folder that exists")
