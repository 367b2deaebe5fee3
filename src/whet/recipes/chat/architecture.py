"""Sizes, parameter counts and FLOPs of a chat model. No torch, so that planning works without it."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whet.base.errors import UsageError
from whet.base.units import format_count

PRESETS: dict[str, dict[str, int]] = {
    "nano": {"hidden_size": 128, "L_layers": 2, "num_heads": 4},
    "tiny": {"hidden_size": 512, "L_layers": 2, "num_heads": 8},
    "small": {"hidden_size": 768, "L_layers": 4, "num_heads": 12},
    "medium": {"hidden_size": 1024, "L_layers": 6, "num_heads": 16},
    "large": {"hidden_size": 1280, "L_layers": 7, "num_heads": 20},
}
"""Sizes by name. The blocks have 0.5, 6.8, 28, 77 and 142 million parameters, excluding the embedding tables."""

_Size = Annotated[int, Field(gt=0, le=65_536)]
_Cycles = Annotated[int, Field(gt=0, le=1_000)]


class ChatArch(BaseModel):
    """The architecture of a causal language model."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["trm", "gpt"] = Field("trm", description="trm: one small network applied recursively; or a plain gpt")
    preset: Literal["nano", "tiny", "small", "medium", "large"] = Field(
        "nano", description="size by name: sets hidden_size, L_layers and num_heads unless they are given"
    )
    hidden_size: _Size = Field(128, description="width of the model")
    L_layers: Annotated[int, Field(gt=0, le=1_000)] = Field(2, description="blocks of the recursive network")
    num_heads: _Size = Field(4, description="attention heads; the size of a head must be even")
    expansion: Annotated[float, Field(gt=0, le=64)] = Field(
        4.0, description="inner width of feed-forward layers, relative to hidden_size and before the factor 2/3"
    )
    seq_len: Annotated[int, Field(ge=8, le=10**6)] | Literal["auto"] = Field(
        "auto", description="tokens in a row, the context length; auto: the length of the longest conversation"
    )
    H_cycles: _Cycles = Field(2, description="outer cycles (T) of a pass; only the last one has gradients")
    L_cycles: _Cycles = Field(2, description="updates of the latent state in each outer cycle (n)")
    supervision: Annotated[int, Field(gt=0, le=64)] = Field(
        1, description="passes over the same batch (N); each continues from the states of the last and has its own loss"
    )
    match: Literal["parameters", "compute"] = Field(
        "compute", description="what a gpt has in common with a trm of these sizes: parameters, or compute per token"
    )
    tied: bool = Field(False, description="share the input embedding with the output layer")
    mlp_t: bool = Field(False, description="mix positions with a matrix; always an error, since it is not causal")

    @model_validator(mode="before")
    @classmethod
    def fill_from_preset(cls, given: Any) -> Any:
        """Apply the sizes of the preset. Explicit sizes take precedence."""
        if not isinstance(given, dict) or given.get("preset") not in PRESETS:
            return given
        return {**PRESETS[given["preset"]], **given}

    @model_validator(mode="after")
    def validate_sizes(self) -> "ChatArch":
        """Check that a causal model of these sizes can be built."""
        if self.mlp_t:
            raise UsageError(
                "mixing positions with a matrix is not causal: the model would see the tokens that it predicts",
                got="arch.mlp_t=true",
                try_="attention (arch.mlp_t=false); whet train puzzle has mlp_t",
            )
        if self.hidden_size % (2 * self.num_heads):
            fitting = [str(n) for n in range(1, self.hidden_size + 1) if self.hidden_size % (2 * n) == 0][:8]
            raise UsageError(
                "arch.num_heads must divide arch.hidden_size into heads of even size",
                got=f"{self.hidden_size} / {self.num_heads}",
                try_="arch.num_heads=" + " or ".join(fitting) if fitting else "an even arch.hidden_size",
            )
        return self

    @property
    def applications(self) -> int:
        """The number of block applications per token: N T (n + 1) L for a trm, the depth for a gpt."""
        if self.kind == "gpt":
            return self.depth
        return self.supervision * self.H_cycles * (self.L_cycles + 1) * self.L_layers

    @property
    def applications_with_gradient(self) -> int:
        """The number of block applications with gradients. For a trm, only those in the last outer cycle of a pass."""
        return self.depth if self.kind == "gpt" else self.supervision * (self.L_cycles + 1) * self.L_layers

    @property
    def depth(self) -> int:
        """The number of blocks with separate weights."""
        if self.kind == "gpt" and self.match == "compute":
            return self.supervision * self.H_cycles * (self.L_cycles + 1) * self.L_layers
        return self.L_layers

    @property
    def inner_size(self) -> int:
        """The inner width of a feed-forward layer, the same as `whet.recipes.layers.inner_width`, which needs torch."""
        return 256 * -(-round(self.expansion * self.hidden_size * 2 / 3) // 256)

    @property
    def block_parameters(self) -> int:
        """The number of parameters of a block: four square matrices for attention, three for the feed-forward layer."""
        return 4 * self.hidden_size**2 + 3 * self.hidden_size * self.inner_size

    def table_parameters(self, vocab_size: int) -> int:
        """Return the number of parameters of the input embedding and the output layer."""
        return (1 if self.tied else 2) * vocab_size * self.hidden_size

    def num_parameters(self, vocab_size: int) -> int:
        """Return the number of trainable parameters."""
        return self.depth * self.block_parameters + self.table_parameters(vocab_size)

    def token_flops(self, vocab_size: int) -> int:
        """Return the FLOPs of the forward pass per token in a full row, excluding the embedding lookup."""
        head = 2 * vocab_size * self.hidden_size
        return self.applications * self._block_flops + head

    def training_flops(self, vocab_size: int) -> int:
        """Return the FLOPs of a training step per token. A backward pass costs as much as two forward passes."""
        passes = self.supervision if self.kind == "trm" else 1
        head = 2 * vocab_size * self.hidden_size * passes
        return (self.applications + 2 * self.applications_with_gradient) * self._block_flops + 3 * head

    @property
    def _block_flops(self) -> int:
        # A token attends to half a row on average.
        length = 0 if self.seq_len == "auto" else self.seq_len
        return 2 * self.block_parameters + 2 * length * self.hidden_size

    def summary(self, vocab_size: int) -> str:
        """Return a one-line summary of parameters and FLOPs per token."""
        tables = self.table_parameters(vocab_size)
        blocks = self.num_parameters(vocab_size) - tables
        return (
            f"{self.kind}, width {self.hidden_size}: {format_count(blocks + tables)} parameters "
            f"({format_count(blocks)} in {self.depth} blocks, "
            f"{format_count(tables)} in tables of {vocab_size:,} tokens), "
            f"{self.applications} block applications and {format_count(self.token_flops(vocab_size))} operations per "
            f"token ({format_count(self.training_flops(vocab_size))} in training)"
        )
