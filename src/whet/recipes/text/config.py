"""What can be set for text classification, and what it means for a plan; no torch."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from whet.base.errors import UsageError
from whet.config.keys import CommonConfig
from whet.plan.workload import Workload
from whet.recipes.text.rows.columns import Wishes
from whet.recipes.text.weights import ClassWeights, read_class_weights

EMBEDDED_CLASSES = 6
EMBEDDED_ROWS_PER_CLASS = 1_100
TRAIN_SHARE = 0.8


class Arch(BaseModel):
    """The small encoder that is trained from scratch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: Annotated[int, Field(gt=0, le=65_536)] = Field(128, description="width of the encoder")
    layers: Annotated[int, Field(gt=0, le=1_000)] = Field(1, description="blocks of attention and feed-forward")
    heads: Annotated[int, Field(gt=0, le=65_536)] = Field(4, description="attention heads; must divide hidden_size")
    max_length: Annotated[int, Field(gt=0, le=10**6)] = Field(64, description="tokens of a text that are read")
    vocab_size: Annotated[int, Field(ge=300, le=10**7)] = Field(4096, description="entries of the byte-pair vocabulary")

    @model_validator(mode="after")
    def heads_divide_width(self) -> "Arch":
        if self.hidden_size % self.heads:
            fitting = [str(n) for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0][:8]
            raise UsageError(
                "arch.heads must divide arch.hidden_size",
                got=f"{self.hidden_size} / {self.heads}",
                try_="arch.heads=" + " or ".join(fitting),
            )
        return self


class TextConfig(CommonConfig):
    """Text classification: the common keys and the encoder's."""

    # Chosen on the embedded texts by dev accuracy over three seeds; many neighbours are as good within the noise.
    epochs: PositiveInt = Field(5, description="passes over the training data")
    lr: PositiveFloat = Field(1e-3, description="learning rate after the warm-up")
    lengths: Literal["fixed", "sorted", "few shapes", "packed", "auto"] = Field(
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
    arch: Arch = Arch()

    plan_keys: ClassVar[tuple[str, ...]] = (*CommonConfig.plan_keys, "lengths")

    @property
    def column_wishes(self) -> Wishes:
        """The columns that you name."""
        return Wishes(text=self.text_column, label=self.label_column, pair=self.pair_column, group=self.group_column)


def describe(config: TextConfig) -> Workload:
    """The workload that a config stands for. Data of yours is counted when it is read, so its size is unknown here."""
    _refuse_missing_data(config)
    is_embedded = config.data is None and not config.data_paths
    num_samples = int(EMBEDDED_CLASSES * EMBEDDED_ROWS_PER_CLASS * TRAIN_SHARE) if is_embedded else None
    return Workload(
        recipe="text",
        num_parameters=count_parameters(config.arch, num_classes=EMBEDDED_CLASSES),
        global_batch_size=config.global_batch_size,
        num_samples=num_samples,
        num_steps=_num_steps(config, num_samples),
        max_length=config.arch.max_length,
        lengths_vary=True,
        can_pack=True,
        sample_bytes=8 * (config.arch.max_length + 1),
        activation_bytes=activation_bytes(config.arch),
        has_dropout=config.dropout > 0,
        layers=("attention", "gelu", "layer norm", "linear"),
    )


def describe_data(
    workload: Workload, config: TextConfig, *, num_samples: int, mean_length: float, classes: Sequence[str]
) -> Workload:
    """The workload with what is known once the data has been read."""
    known = {
        "num_parameters": count_parameters(config.arch, num_classes=len(classes)),
        "num_samples": num_samples,
        "num_steps": _num_steps(config, num_samples),
        "mean_length": mean_length,
    }
    return workload.model_copy(update=known)


def count_parameters(arch: Arch, *, num_classes: int) -> int:
    """The encoder's parameters: embeddings, blocks, final norm and classifier."""
    width = arch.hidden_size
    block = 12 * width**2 + 13 * width
    embeddings = (arch.vocab_size + arch.max_length) * width
    return embeddings + arch.layers * block + 2 * width + (width + 1) * num_classes


def activation_bytes(arch: Arch) -> int:
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


def _refuse_missing_data(config: TextConfig) -> None:
    for path in (config.data, *config.data_paths):
        if path is not None and not _is_there(Path(path)):
            raise UsageError("the data is not there", got=f"data={path}", try_="a file or folder that exists")


def _is_there(path: Path) -> bool:
    try:
        return path.is_file() or path.is_dir()
    except OSError:
        return False
