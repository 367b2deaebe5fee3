"""What can be set for text classification, and what it means for a plan; no torch."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from whet.base.errors import UsageError
from whet.config.options import CommonConfig
from whet.plan.kernel_support import ADD_NORM, SPAN_ATTENTION, supports_add_norm, supports_span_attention
from whet.plan.workload import Workload
from whet.recipes.text.backbone import SMALL, Backbone, read_backbone
from whet.recipes.text.corpus import ClassWeights, read_class_weights
from whet.recipes.text.readers.samples import ColumnOverrides

EMBEDDED_CLASSES = 6
EMBEDDED_ROWS_PER_CLASS = 1_100
TRAIN_SHARE = 0.8

FINE_TUNING = {"epochs": 4, "lr": 2e-5, "warmup_share": 0.1, "word_dropout": 0.0}
"""What a pretrained model starts from: "2 or 4 epochs, 2e-5" was best overall (Beltagy et al. 2019, SciBERT, 3.4)."""
FROZEN_LR = 1e-3
"""Where only a head learns (the same paper's frozen variant)."""
LORA_LR = 2e-4
"""Few weights that start at zero take ten times the rate of full fine-tuning."""
FINE_TUNING_LENGTH = 256


class TextArch(BaseModel):
    """The small encoder that is trained from scratch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: Annotated[int, Field(gt=0, le=65_536)] = Field(128, description="width of the encoder")
    layers: Annotated[int, Field(gt=0, le=1_000)] = Field(1, description="blocks of attention and feed-forward")
    heads: Annotated[int, Field(gt=0, le=65_536)] = Field(4, description="attention heads; must divide hidden_size")
    max_length: Annotated[int, Field(gt=0, le=10**6)] = Field(
        64, description="tokens of a text that are read; 256 if pretrained"
    )
    vocab_size: Annotated[int, Field(ge=300, le=10**7)] = Field(4096, description="entries of the byte-pair vocabulary")

    @model_validator(mode="after")
    def heads_divide_width(self) -> "TextArch":
        if self.hidden_size % self.heads:
            fitting = [str(n) for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0][:8]
            raise UsageError(
                "arch.heads must divide arch.hidden_size",
                got=f"{self.hidden_size} / {self.heads}",
                try_="arch.heads=" + " or ".join(fitting),
            )
        return self


_DEFAULT_ARCH = TextArch()


class TextConfig(CommonConfig):
    """Text classification: the common keys and the encoder's."""

    model: str = Field(
        SMALL, description="small: an encoder from scratch; or a folder or hub name (NAME@REVISION) of transformers"
    )
    freeze: Literal["none", "embeddings", "encoder"] | NonNegativeInt = Field(
        "none", description="what of a pretrained model stays as it is; a number: embeddings and so many first layers"
    )
    lora: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        None, description="rank of low-rank updates, the model itself stays as it is (extra lora); null: train it whole"
    )
    # Chosen on the embedded texts by dev accuracy over three seeds; many neighbours are as good within the noise.
    epochs: PositiveInt = Field(
        10, description="passes over the training data; 4 for a pretrained model, SciBERT's best were 2 or 4"
    )
    lr: PositiveFloat = Field(
        1e-3,
        description="learning rate after the warm-up; pretrained 2e-5, SciBERT's best; lora 2e-4; freeze=encoder 1e-3",
    )
    warmup_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.06, description="share of the steps until the full learning rate; 0.1 for a pretrained model, as in BERT's"
    )
    goal: Literal["accuracy", "macro_f1", "micro_f1", "cross_entropy"] = Field(
        "accuracy", description="the metric on the dev part that decides the best weights; cross_entropy: the lower"
    )
    word_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.5, description="share of a text's tokens that model=small does not see while training; 0 with dropout=0"
    )
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="share of a pretrained model's attention dropped in training; null: as dropout"
    )
    lengths: Literal["fixed", "sorted", "few shapes", "packed", "packed few", "auto"] = Field(
        "auto", description="how texts of different lengths are put together"
    )
    text_column: str | None = Field(None, description="column with the text; guessed by its name if not given")
    label_column: str | None = Field(None, description="column with the label; guessed by its name if not given")
    pair_column: str | None = Field(None, description="column with the second text of sentence pairs")
    group_column: str | None = Field(None, description="rows with the same value here stay in one part")
    label_separator: str | None = Field(
        "auto", description="sign between several labels of a text; auto: where it is clear; null: never"
    )
    class_weights: Annotated[ClassWeights, BeforeValidator(read_class_weights)] = Field(
        "none", description="none, balanced (each class the same share of the loss), or '{name: weight, ...}'"
    )
    split_seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="decides which rows are held back when the data brings no dev or test part"
    )
    arch: TextArch = TextArch()

    @property
    def is_pretrained(self) -> bool:
        """Whether a model of transformers is fine-tuned."""
        return self.model != SMALL

    @property
    def is_embedded(self) -> bool:
        """Whether no data is given."""
        return self.data is None and not self.data_paths

    @model_validator(mode="before")
    @classmethod
    def start_from_fitting_defaults(cls, given: Any) -> Any:
        """Other defaults for a pretrained model, and for one without dropout; what you say stays."""
        if not isinstance(given, dict):
            return given
        if given.get("model", SMALL) == SMALL:
            # Who wants no draws wants none.
            return {"word_dropout": 0.0, **given} if given.get("dropout") == 0 else given
        rate = FROZEN_LR if given.get("freeze") == "encoder" else LORA_LR if given.get("lora") else FINE_TUNING["lr"]
        filled = {**FINE_TUNING, "lr": rate, **given}
        arch = filled.get("arch", {})
        return {**filled, "arch": {"max_length": FINE_TUNING_LENGTH, **arch}} if isinstance(arch, dict) else filled

    @model_validator(mode="after")
    def each_model_has_its_keys(self) -> "TextConfig":
        if not self.is_pretrained:
            given = {
                "freeze": self.freeze != "none",
                "lora": self.lora is not None,
                "attention_dropout": self.attention_dropout is not None,
            }
            for key, is_given in given.items():
                if is_given:
                    raise UsageError(
                        f"{key} is for a pretrained model", got=f"{key} and model=small", try_="model=FOLDER"
                    )
            return self
        for key in ("hidden_size", "layers", "heads", "vocab_size"):
            if getattr(self.arch, key) != getattr(_DEFAULT_ARCH, key):
                raise UsageError(
                    f"arch.{key} is for model=small", got=f"model={self.model}", try_="the model's own sizes, unsaid"
                )
        if self.word_dropout:
            raise UsageError(
                "word_dropout is for model=small", got=f"word_dropout={self.word_dropout}", try_="dropout=0.1"
            )
        if self.lora is not None and self.freeze != "none":
            raise UsageError(
                "LoRA leaves the model as it is already",
                got=f"lora={self.lora} freeze={self.freeze}",
                try_="one of them",
            )
        return self

    @property
    def column_overrides(self) -> ColumnOverrides:
        """The columns that you name."""
        return ColumnOverrides(
            text=self.text_column, label=self.label_column, pair=self.pair_column, group=self.group_column
        )


def is_read_packed(config: TextConfig, backbone: Backbone | None) -> bool:
    """Whether the model reads packed batches: our own, and a BERT or RoBERTa that is trained whole (`bert.py`)."""
    return backbone is None or (backbone.is_read_packed and config.lora is None and config.freeze == "none")


def describe(config: TextConfig, folder: Path | None = None) -> Workload:
    """The workload that a config stands for. Data of yours is counted when it is read, so its size is unknown here.

    `folder` is where the files of a name on the hub lie, once they are here.
    """
    _check_data_exists(config)
    num_samples = int(EMBEDDED_CLASSES * EMBEDDED_ROWS_PER_CLASS * TRAIN_SHARE) if config.is_embedded else None
    backbone = read_backbone(config.model if folder is None else str(folder)) if config.is_pretrained else None
    can_pack = is_read_packed(config, backbone)
    if config.lengths in ("packed", "packed few") and not can_pack:
        raise UsageError(
            "only model=small and a BERT or RoBERTa that is trained whole read packed batches",
            got=f"model={config.model} lora={config.lora} freeze={config.freeze}",
            try_="lengths=sorted, or auto",
        )
    max_length = config.arch.max_length if backbone is None else min(config.arch.max_length, backbone.most_tokens)
    return Workload(
        recipe="text",
        **_num_parameters(config, num_classes=EMBEDDED_CLASSES),
        global_batch_size=config.global_batch_size,
        num_samples=num_samples,
        num_steps=_num_steps(config, num_samples),
        max_length=max_length,
        lengths_vary=True,
        can_pack=can_pack,
        sample_bytes=8 * (max_length + 1),
        activation_bytes=activation_bytes(config.arch) if backbone is None else backbone.activation_bytes(max_length),
        has_dropout=config.dropout > 0 or config.word_dropout > 0,
        layers=_layers(config, backbone),
    )


def _layers(config: TextConfig, backbone: Backbone | None) -> tuple[str, ...]:
    has_sums = backbone is not None and is_read_packed(config, backbone) and supports_add_norm(backbone.width)
    more = {SPAN_ATTENTION: _has_spans(config, backbone), ADD_NORM: has_sums}
    return ("attention", "gelu", "layer norm", "linear", *(name for name, is_there in more.items() if is_there))


def _has_spans(config: TextConfig, backbone: Backbone | None) -> bool:
    """Whether whet's own kernels can attend packed texts: they drop nothing."""
    if backbone is None:
        return supports_span_attention(config.arch.hidden_size // config.arch.heads)
    dropped = config.dropout if config.attention_dropout is None else config.attention_dropout
    return (
        dropped == 0 and is_read_packed(config, backbone) and supports_span_attention(backbone.width // backbone.heads)
    )


def describe_data(
    workload: Workload, config: TextConfig, *, num_samples: int, mean_length: float, classes: Sequence[str]
) -> Workload:
    """The workload with what is known once the data has been read."""
    known = {
        **_num_parameters(config, num_classes=len(classes)),
        "num_samples": num_samples,
        "num_steps": _num_steps(config, num_samples),
        "mean_length": mean_length,
    }
    return workload.model_copy(update=known)


def count_parameters(arch: TextArch, *, num_classes: int) -> int:
    """The encoder's parameters: embeddings, blocks, final norm and classifier."""
    width = arch.hidden_size
    block = 12 * width**2 + 13 * width
    embeddings = (arch.vocab_size + arch.max_length) * width
    return embeddings + arch.layers * block + 2 * width + (width + 1) * num_classes


def _num_parameters(config: TextConfig, *, num_classes: int) -> dict[str, int]:
    """How many learn and how many stay; counted again once the model is made."""
    if not config.is_pretrained:
        return {"num_parameters": count_parameters(config.arch, num_classes=num_classes), "num_frozen": 0}
    backbone = read_backbone(config.model)
    trained = backbone.num_trained(num_classes=num_classes, freeze=config.freeze, lora=config.lora)
    # LoRA's numbers come on top of the model's, which all stay: peft trains a copy of the head.
    own = trained if config.lora is None else 0
    return {"num_parameters": trained, "num_frozen": backbone.num_parameters(num_classes=num_classes) - own}


def activation_bytes(arch: TextArch) -> int:
    """What one text of full length keeps for the backward pass in float32.

    Korthikanti et al. 2022 ("Reducing Activation Recomputation"), section 4.1, count 34 sbh + 5 as^2 b bytes per block
    in half precision with one-byte dropout masks; doubled but for the masks: 66 and 9.
    """
    length, width = arch.max_length, arch.hidden_size
    block = 66 * length * width + 9 * arch.heads * length**2
    return arch.layers * block + 8 * length * width


def _num_steps(config: TextConfig, num_samples: int | None) -> int | None:
    if num_samples is None:
        return config.max_steps
    steps = config.epochs * math.ceil(num_samples / config.global_batch_size)
    return min(steps, config.max_steps) if config.max_steps else steps


def _check_data_exists(config: TextConfig) -> None:
    for path in (config.data, *config.data_paths):
        if path is not None and not _is_there(Path(path)):
            raise UsageError("the data is not there", got=f"data={path}", try_="a file or folder that exists")


def _is_there(path: Path) -> bool:
    try:
        return path.is_file() or path.is_dir()
    except OSError:
        return False
