"""What can be set for a chat model, and what it means for a plan; no torch."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from whet.base.errors import UsageError
from whet.config.options import CommonConfig
from whet.plan.kernel_support import ADD_NORM, SPAN_ATTENTION, supports_add_norm, supports_span_attention
from whet.plan.workload import Workload
from whet.recipes.chat.architecture import ChatArch

if TYPE_CHECKING:
    from whet.recipes.chat.manifest import ChatManifest

EMBEDDED_SIZES = 4096, 180, 232_000
"""Vocabulary, tokens of the longest conversation and places of all rows: nearly, since Python's own help differs by
version and ours grows."""
_SEQ_LEN_MULTIPLE = 64
_MIN_SEQ_LEN = 128


class ChatConfig(CommonConfig):
    """Chat: the common keys and the model's."""

    global_batch_size: Annotated[int, Field(gt=0, le=10**6)] = Field(
        8, description="rows of one optimizer step, each filled with conversations; auto measures which, and scales lr"
    )
    epochs: PositiveInt = Field(20, description="passes over the training data")
    lr: PositiveFloat = Field(1e-3, description="learning rate after the warm-up")
    weight_decay: NonNegativeFloat = Field(0.1, description="decay of weights; biases and norms are left out")
    schedule: Literal["constant", "linear", "cosine", "plateau"] = Field(
        "cosine", description="how the learning rate falls after the warm-up"
    )
    arch: ChatArch = ChatArch()

    group_aliases: ClassVar[dict[str, str]] = {"arch": "arch.kind"}


def data_folders(config: ChatConfig) -> tuple[Path, ...]:
    """Folders that `whet data chat` made; none for the embedded conversations."""
    named = (*([config.data] if config.data is not None else []), *config.data_paths)
    for path in named:
        if not Path(path).is_dir():
            is_file = Path(path).is_file()
            raise UsageError(
                "conversations have to be prepared first" if is_file else "the data is not there",
                got=f"data={path}",
                try_=f"whet data chat {path} --output-dir DIR, then data=DIR" if is_file else "a folder that exists",
            )
    if len({Path(path).resolve() for path in named}) < len(named):
        raise UsageError("the same folder twice", got=", ".join(map(str, named)), try_="each once, in data_paths=[...]")
    return tuple(Path(path) for path in named)


def read_manifests(folders: tuple[Path, ...]) -> "tuple[ChatManifest, ...]":
    """What the folders say of themselves; they must speak the same tokens."""
    from whet.recipes.chat.manifest import TOKENIZER, read_manifest

    manifests = tuple(read_manifest(folder) for folder in folders)
    if len({manifest.files[TOKENIZER].sha256 for manifest in manifests}) > 1:
        raise UsageError(
            "the folders have different tokenizers",
            got=", ".join(str(folder) for folder in folders),
            try_="whet data chat with one --tokenizer FILE for all of them",
        )
    return manifests


def data_facts(config: ChatConfig) -> dict[str, int]:
    """What a plan needs to know of the data before it is read: vocab_size, longest, num_rows."""
    folders = data_folders(config)
    if not folders:
        vocab_size, longest, num_tokens = EMBEDDED_SIZES
    else:
        manifests = read_manifests(folders)
        vocab_size = manifests[0].vocab_size
        longest = max(facts.longest for manifest in manifests for facts in manifest.parts.values())
        num_tokens = sum(manifest.parts["train"].tokens for manifest in manifests)
    length = resolve_seq_len(config.arch, longest=longest).seq_len
    assert isinstance(length, int)
    return {"vocab_size": vocab_size, "longest": longest, "num_rows": max(1, math.ceil(num_tokens / length))}


def resolve_seq_len(arch: ChatArch, *, longest: int) -> ChatArch:
    """The arch with a number for arch.seq_len: where it is left open, room for the longest conversation."""
    if arch.seq_len != "auto":
        return arch
    return arch.model_copy(
        update={"seq_len": max(_MIN_SEQ_LEN, _SEQ_LEN_MULTIPLE * math.ceil(longest / _SEQ_LEN_MULTIPLE))}
    )


def describe_chat(config: ChatConfig, *, vocab_size: int, longest: int, num_rows: int | None) -> Workload:
    """The workload of a config, as far as the data is known."""
    arch = resolve_seq_len(config.arch, longest=longest)
    assert isinstance(arch.seq_len, int)
    steps = config.max_steps
    if num_rows is not None:
        whole = config.epochs * math.ceil(num_rows / config.global_batch_size)
        steps = min(whole, config.max_steps or whole)
    return Workload(
        recipe="chat",
        num_parameters=arch.num_parameters(vocab_size),
        global_batch_size=config.global_batch_size,
        num_samples=num_rows,
        num_steps=steps,
        max_length=arch.seq_len,
        mean_length=float(arch.seq_len),
        sample_bytes=6 * arch.seq_len + 8,
        activation_bytes=activation_bytes(arch, arch.seq_len, vocab_size),
        has_dropout=config.dropout > 0,
        is_causal=True,
        layers=_layers(arch),
    )


def _layers(arch: ChatArch) -> tuple[str, ...]:
    more = {
        SPAN_ATTENTION: supports_span_attention(arch.hidden_size // arch.num_heads),
        ADD_NORM: supports_add_norm(arch.hidden_size),
    }
    return ("attention", "linear", *(name for name, is_there in more.items() if is_there))


def activation_bytes(arch: ChatArch, length: int, vocab_size: int) -> int:
    """What one row keeps for the backward pass in float32: sums, norms and turned queries are 16 widths of a block,
    the feed-forward layer 5 inner ones; the scores of all tokens are kept three times over."""
    block = 16 * arch.hidden_size + 5 * arch.inner_size
    passes = arch.supervision if arch.kind == "trm" else 1
    return 4 * length * (arch.applications_with_gradient * block + passes * 3 * vocab_size) + 16 * length**2
