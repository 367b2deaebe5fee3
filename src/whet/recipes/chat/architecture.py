"""Sizes, parameter counts and costs of a chat model. No torch."""

from typing import Annotated, Any, Literal

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
"""Blocks of 0.5, 6.8, 28, 77 and 142 million parameters; the tables of tokens come on top."""

_Size = Annotated[int, Field(gt=0, le=65_536)]
_Cycles = Annotated[int, Field(gt=0, le=1_000)]


class ChatArch(BaseModel):
    """The model that reads conversations and writes answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["trm", "gpt"] = Field("trm", description="trm: one small network, applied again and again; gpt")
    preset: Literal["nano", "tiny", "small", "medium", "large"] = Field(
        "nano", description="sizes by name: hidden_size, L_layers and num_heads, where they are not given"
    )
    hidden_size: _Size = Field(128, description="width of the model")
    L_layers: Annotated[int, Field(gt=0, le=1_000)] = Field(2, description="blocks of the network that is repeated")
    num_heads: _Size = Field(4, description="attention heads; their size must be even")
    expansion: Annotated[float, Field(gt=0, le=64)] = Field(
        4.0, description="inner width of the feed-forward layers, before two thirds of it are taken"
    )
    seq_len: Annotated[int, Field(ge=8, le=10**6)] | Literal["auto"] = Field(
        "auto", description="tokens of a row: what it can look back on; auto: as many as the longest conversation has"
    )
    H_cycles: _Cycles = Field(2, description="outer cycles (T) of a pass, the last one with gradients")
    L_cycles: _Cycles = Field(2, description="updates of the latent in each outer cycle (n)")
    supervision: Annotated[int, Field(gt=0, le=64)] = Field(
        1, description="passes over the same batch (N), each going on from the last and with a loss of its own"
    )
    match: Literal["parameters", "compute"] = Field(
        "compute", description="what a gpt shares with the trm of these sizes: its parameters, or a token's cost"
    )
    tied: bool = Field(False, description="one table for tokens that come in and go out")
    mlp_t: bool = Field(False, description="mixing of places by a matrix; refused, since it is not causal")

    @model_validator(mode="before")
    @classmethod
    def sizes_of_preset(cls, given: Any) -> Any:
        """The sizes of a preset, where they are not given themselves."""
        if not isinstance(given, dict) or given.get("preset") not in PRESETS:
            return given
        return {**PRESETS[given["preset"]], **given}

    @model_validator(mode="after")
    def can_be_built(self) -> "ChatArch":
        if self.mlp_t:
            raise UsageError(
                "a matrix that mixes places is not causal: the answer would be in the input",
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
        """Blocks that a token passes through on its way: N T (n + 1) L for a trm, as many as it has for a gpt."""
        if self.kind == "gpt":
            return self.depth
        return self.supervision * self.H_cycles * (self.L_cycles + 1) * self.L_layers

    @property
    def applications_with_gradient(self) -> int:
        """Those that are kept for the backward pass: all of a gpt, the last outer cycle of each pass of a trm."""
        return self.depth if self.kind == "gpt" else self.supervision * (self.L_cycles + 1) * self.L_layers

    @property
    def depth(self) -> int:
        """Blocks that have weights of their own."""
        if self.kind == "gpt" and self.match == "compute":
            return self.supervision * self.H_cycles * (self.L_cycles + 1) * self.L_layers
        return self.L_layers

    @property
    def inner_size(self) -> int:
        """Width inside a feed-forward layer (`whet.recipes.layers.inner_width`)."""
        return 256 * -(-round(self.expansion * self.hidden_size * 2 / 3) // 256)

    @property
    def block_parameters(self) -> int:
        """Weights of one block: attention has four squares, the feed-forward layer three oblongs."""
        return 4 * self.hidden_size**2 + 3 * self.hidden_size * self.inner_size

    def table_parameters(self, vocab_size: int) -> int:
        """Weights of the tables of tokens."""
        return (1 if self.tied else 2) * vocab_size * self.hidden_size

    def num_parameters(self, vocab_size: int) -> int:
        """All weights that are trained."""
        return self.depth * self.block_parameters + self.table_parameters(vocab_size)

    def token_flops(self, vocab_size: int) -> int:
        """Operations of one token's way forward in a full row, without those of the tables' look-up."""
        head = 2 * vocab_size * self.hidden_size
        return self.applications * self._block_flops + head

    def training_flops(self, vocab_size: int) -> int:
        """Operations of one token in a training step: twice the forward's more wherever there is a gradient."""
        passes = self.supervision if self.kind == "trm" else 1
        head = 2 * vocab_size * self.hidden_size * passes
        return (self.applications + 2 * self.applications_with_gradient) * self._block_flops + 3 * head

    @property
    def _block_flops(self) -> int:
        """Of one token; it looks back on half a row on average."""
        length = 0 if self.seq_len == "auto" else self.seq_len
        return 2 * self.block_parameters + 2 * length * self.hidden_size

    def words(self, vocab_size: int) -> str:
        """The model in one line: its real size, and what a token costs."""
        tables = self.table_parameters(vocab_size)
        blocks = self.num_parameters(vocab_size) - tables
        return (
            f"{self.kind} {self.hidden_size} wide: {format_count(blocks + tables)} parameters "
            f"({format_count(blocks)} in {self.depth} blocks, {format_count(tables)} in tables of {vocab_size:,} tokens), "
            f"{self.applications} blocks passed through, {format_count(self.token_flops(vocab_size))} operations a token "
            f"({format_count(self.training_flops(vocab_size))} in training)"
        )
