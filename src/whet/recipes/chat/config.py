"""Options of the chat recipe and the workload they describe. No torch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from whet.base.errors import UsageError
from whet.config.options import CommonConfig
from whet.plan.kernel_support import ADD_NORM, SPAN_ATTENTION, supports_add_norm, supports_span_attention
from whet.plan.workload import OPTIMIZER_BYTES, Workload
from whet.recipes.chat.architecture import ChatArch

if TYPE_CHECKING:
    from whet.recipes.chat.manifest import ChatManifest

EMBEDDED_SIZES = 4096, 157, 145_000
"""Vocabulary size, longest conversation and total tokens of the embedded data.

The numbers are approximate: most texts are docstrings of Python, which differ between versions.
"""
# seq_len=auto is rounded up to a multiple of this number, because kernels are faster for round lengths.
_SEQ_LEN_MULTIPLE = 64
_MIN_SEQ_LEN = 128

CFG_CHAT: Mapping[str, Any] = {
    # 4 samples per batch, accumulated over 8 batches.
    "global_batch_size": 32,
    "epochs": 10,
    "lr": 3e-4,
    "weight_decay": 0.1,
    "ema": True,
    "arch": {"hidden_size": 384, "L_layers": 4, "num_heads": 12, "H_cycles": 1, "L_cycles": 1, "supervision": 1},
}
"""The configuration `cfg_chat` of the chat fork of TinyRecursiveModels.

Its precision is not copied: the plan chooses it. Neither is its warm-up of 1,000 steps, which is longer than a small
run.
"""


class ChatConfig(CommonConfig):
    """Options of the chat recipe: the common options, and options of the data and the model."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "global_batch_size": 8,
        "epochs": 20,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "schedule": "cosine",
    }
    descriptions: ClassVar[Mapping[str, str]] = {
        "global_batch_size": "rows per optimizer step, each packed with conversations; auto measures it and scales lr"
    }
    arch: ChatArch = ChatArch()

    group_aliases: ClassVar[dict[str, str]] = {"arch": "arch.kind", "attention_heads": "arch.num_heads"}
    named_configs: ClassVar[Mapping[str, Mapping[str, Any]]] = {"cfg_chat": CFG_CHAT}


def data_folders(config: ChatConfig) -> tuple[Path, ...]:
    """Return the folders of prepared conversations (`whet data chat`); empty for the embedded conversations."""
    for path in config.paths:
        if not path.is_dir():
            is_file = path.is_file()
            raise UsageError(
                "conversations have to be prepared first" if is_file else "the data does not exist",
                got=f"data={path}",
                try_=f"whet data chat {path} --out DIR, then data=DIR" if is_file else "an existing folder",
            )
    if len({path.resolve() for path in config.paths}) < len(config.paths):
        named = ", ".join(map(str, config.paths))
        raise UsageError("the same folder twice", got=named, try_="each once, in data_paths=[...]")
    return config.paths


def read_manifests(folders: tuple[Path, ...]) -> "tuple[ChatManifest, ...]":
    """Read the manifests of the folders, and check that all folders have the same tokenizer."""
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
    """Return vocab_size, longest and num_rows, the facts that a plan needs, without reading the conversations."""
    folders = data_folders(config)
    if not folders:
        vocab_size, longest, num_tokens = EMBEDDED_SIZES
    else:
        manifests = read_manifests(folders)
        vocab_size = manifests[0].vocab_size
        longest = max(facts.longest for manifest in manifests for facts in manifest.splits.values())
        num_tokens = sum(manifest.splits["train"].tokens for manifest in manifests)
    length = resolve_seq_len(config.arch, longest=longest).seq_len
    assert isinstance(length, int)
    return {"vocab_size": vocab_size, "longest": longest, "num_rows": max(1, math.ceil(num_tokens / length))}


def resolve_seq_len(arch: ChatArch, *, longest: int) -> ChatArch:
    """Replace seq_len=auto with the length of the longest conversation, rounded up."""
    if arch.seq_len != "auto":
        return arch
    length = _SEQ_LEN_MULTIPLE * math.ceil(longest / _SEQ_LEN_MULTIPLE)
    return arch.model_copy(update={"seq_len": max(_MIN_SEQ_LEN, length)})


def describe_chat(config: ChatConfig, *, vocab_size: int, longest: int, num_rows: int | None) -> Workload:
    """Return the workload of a config, for planning."""
    arch = resolve_seq_len(config.arch, longest=longest)
    assert isinstance(arch.seq_len, int)
    return Workload(
        recipe="chat",
        num_parameters=arch.num_parameters(vocab_size),
        global_batch_size=config.global_batch_size,
        optimizer_bytes=OPTIMIZER_BYTES[config.optimizer],
        built_optimizer=config.optimizer,
        num_samples=num_rows,
        num_steps=config.count_steps(num_rows),
        max_length=arch.seq_len,
        mean_length=float(arch.seq_len),
        sample_bytes=6 * arch.seq_len + 8,
        activation_bytes=activation_bytes(arch, arch.seq_len, vocab_size),
        flops_per_sample=float(arch.seq_len * arch.training_flops(vocab_size)),
        num_operators=20 * arch.applications + 40 * arch.applications_with_gradient + 100,
        has_dropout=config.dropout > 0,
        is_causal=True,
        layers=_layers(arch),
    )


def _layers(arch: ChatArch) -> tuple[str, ...]:
    kernels = {
        SPAN_ATTENTION: supports_span_attention(arch.hidden_size // arch.num_heads),
        ADD_NORM: supports_add_norm(arch.hidden_size),
    }
    return ("attention", "linear", *(name for name, is_supported in kernels.items() if is_supported))


def activation_bytes(arch: ChatArch, length: int, vocab_size: int) -> int:
    """Estimate the bytes of float32 activations that one row keeps for the backward pass.

    Per token, a block keeps 16 values for each unit of its width (residual sums, norms, rotated queries and keys) and 5
    for each unit of its inner width. The logits are kept three times.
    """
    block = 16 * arch.hidden_size + 5 * arch.inner_size
    passes = arch.supervision if arch.kind == "trm" else 1
    return 4 * length * (arch.applications_with_gradient * block + passes * 3 * vocab_size) + 16 * length**2
