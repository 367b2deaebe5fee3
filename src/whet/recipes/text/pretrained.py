"""Classifiers from transformers: loading, freezing, LoRA and saving.

Shapes: B texts, L tokens of the longest text, C classes. Packed batches are not supported: BERT-like classifiers of
transformers pool the first token of each row, and their unpadded attention requires the package flash-attn. The
architectures that `bert.py` implements are converted to `Bert`, which supports packed batches.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError, describe_error, first_line
from whet.base.extras import install_hint
from whet.data.batch import Padded
from whet.recipes.text.backbone import import_transformers, quiet_transformers
from whet.recipes.text.bert import Bert
from whet.recipes.text.tokenizer import SEGMENT_OFFSET, PretrainedTokenizer, write_files

Freeze = Literal["none", "embeddings", "encoder"] | int
"""The part of the encoder to freeze. A number N freezes the embeddings and the first N layers."""

_ATTENTION_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob")
_DROPOUTS = (
    *_ATTENTION_DROPOUTS,
    "classifier_dropout",
    "classifier_dropout_prob",
    "dropout",
    "embedding_dropout",
    "hidden_dropout_prob",
    "mlp_dropout",
    "seq_classif_dropout",
    "summary_last_dropout",
)
"""The names of dropout options in the configs of transformers."""

_MACHINE_KEYS = ("_name_or_path", "attn_implementation", "auto_map", "dtype", "quantization_config", "torch_dtype")
"""Config entries about the origin or execution of a model. They are neither saved with a run nor read from one."""

_ACCEPT_4D_MASK = ("albert", "bert", "camembert", "distilbert", "electra", "ernie", "roberta", "xlm-roberta")
"""Models that use an attention mask of shape (B, 1, 1, L) unchanged.

For a mask of shape (B, L), transformers checks whether all values are true. The check synchronizes with the device, and
a step that synchronizes cannot be captured as a CUDA graph.
"""

_POOL_LAST_TOKEN = ("xlnet",)
"""Models that pool the last position of a row, so that padding must be on the left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTuning:
    """The options for fine-tuning a pretrained model."""

    dropout: float
    attention_dropout: float | None = None
    """The dropout of attention weights; None to use `dropout`."""
    freeze: Freeze = "none"
    lora: int | None = None
    """The rank of the LoRA updates; None for no LoRA."""


class Pretrained(nn.Module):
    """A wrapper that gives a transformers classifier, `network`, the interface of the small encoder."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        config = network.config
        self._pad = int(config.pad_token_id or 0)
        self.has_segments = int(getattr(config, "type_vocab_size", 0) or 0) > 1
        # For a decoder, transformers combines the mask with a causal mask, which requires shape (B, L).
        is_decoder = bool(getattr(config, "is_decoder", False))
        uses_sdpa = getattr(config, "_attn_implementation", None) == "sdpa"
        self._takes_4d_mask = config.model_type in _ACCEPT_4D_MASK and uses_sdpa and not is_decoder
        self._pools_last = config.model_type in _POOL_LAST_TOKEN

    def forward(self, tokens: Padded) -> Tensor:
        """Return the class logits, (B, C), for a padded batch."""
        ids, lengths = tokens.values, tokens.lengths
        position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        # Shift each row to the right, so that its padding is on the left.
        if self._pools_last:
            # Positions below zero belong to the padding on the left.
            position = position + (lengths[:, None] - ids.shape[1])
            ids = ids.gather(1, position.clamp(min=0))
        is_real = (position >= 0) & (position < lengths[:, None])
        # Fill with the padding id of the model, because some models derive positions from the padding.
        mask = is_real[:, None, None] if self._takes_4d_mask else is_real.long()
        inputs = {"input_ids": torch.where(is_real, ids % SEGMENT_OFFSET, self._pad), "attention_mask": mask}
        if self.has_segments:
            inputs["token_type_ids"] = torch.where(is_real, ids // SEGMENT_OFFSET, 0)
        logits: Tensor = self.network(**inputs).logits
        return logits


# --- loading and saving -----------------------------------------------------------------------------------------------


def load_pretrained(folder: Path, *, classes: Sequence[str], is_multi_label: bool, tuning: FineTuning) -> Pretrained:
    """Load a pretrained model with a new classification head, initialized from torch's default generator."""
    transformers = import_transformers()
    with quiet_transformers(), _load_errors(folder):
        config = _read_config(folder, classes=classes, is_multi_label=is_multi_label, tuning=tuning)
        network, info = transformers.AutoModelForSequenceClassification.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            attn_implementation=_attention(config),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            # Do not load the head of a model that was already a classifier: it has other classes.
            ignore_mismatched_sizes=True,
        )
    _check_all_loaded(network, info, folder)
    return _prepare(network, tuning)


def empty_pretrained(saved_config: Mapping[str, Any], *, tuning: FineTuning) -> Pretrained:
    """Build the classifier from the config saved with a run. Its weights must be loaded from a checkpoint."""
    transformers = import_transformers()
    entries = {name: value for name, value in saved_config.items() if name not in _MACHINE_KEYS}
    with quiet_transformers():
        try:
            config_type = type(transformers.AutoConfig.for_model(entries.pop("model_type")))
            config = config_type.from_dict(entries)
            network = _network_from_config(config)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WhetError(
                "this version of transformers does not know the run's model",
                got=first_line(error, limit=160),
                try_="the version of transformers that trained it",
            ) from None
    return _prepare(network, tuning)


def pretrained_config(
    folder: Path, *, classes: Sequence[str], is_multi_label: bool, tuning: FineTuning
) -> dict[str, Any]:
    """Return the config of the model as plain JSON, from which `empty_pretrained` rebuilds it."""
    with quiet_transformers(), _load_errors(folder):
        config = _read_config(folder, classes=classes, is_multi_label=is_multi_label, tuning=tuning)
    return {name: value for name, value in config.to_dict().items() if name not in _MACHINE_KEYS}


def as_pretrained(model: Bert | Pretrained) -> Pretrained:
    """Return the classifier as a Transformers model. The weights are shared."""
    if isinstance(model, Pretrained):
        return model
    with quiet_transformers():
        network = _network_from_config(model.config)
    network.load_state_dict(model.network.state_dict(), assign=True)
    return Pretrained(network.train(model.training))


def save_transformers(model: Bert | Pretrained, tokenizer: PretrainedTokenizer, folder: Path) -> None:
    """Write a folder that transformers can load. LoRA is merged into the weights."""
    network = merge_lora(as_pretrained(model).network)
    with quiet_transformers():
        network.save_pretrained(str(folder))
    write_files(tokenizer.files, folder)


def _network_from_config(config: Any) -> Any:
    return import_transformers().AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float32, attn_implementation=_attention(config), trust_remote_code=False
    )


def _read_config(folder: Path, *, classes: Sequence[str], is_multi_label: bool, tuning: FineTuning) -> Any:
    config = import_transformers().AutoConfig.from_pretrained(
        str(folder),
        local_files_only=True,
        trust_remote_code=False,
        num_labels=len(classes),
        id2label=dict(enumerate(classes)),
        label2id={name: index for index, name in enumerate(classes)},
        problem_type="multi_label_classification" if is_multi_label else "single_label_classification",
    )
    # Option names differ between architectures: set those that this config has.
    for name in _DROPOUTS:
        if hasattr(config, name):
            is_separate = tuning.attention_dropout is not None and name in _ATTENTION_DROPOUTS
            setattr(config, name, tuning.attention_dropout if is_separate else tuning.dropout)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = _default_pad_token(config)
    return config


def _default_pad_token(config: Any) -> int:
    """Return the end token, or 0, as padding for a model without it, such as GPT-2.

    These models use the padding token to find the last token of a text, which they pool.
    """
    ends = getattr(config, "eos_token_id", None)
    end = ends[0] if isinstance(ends, list) and ends else ends
    return end if isinstance(end, int) else 0


def _attention(config: Any) -> str:
    """Return "sdpa" if the model supports it, else "eager". The implementation named in the config is ignored."""
    model_types = import_transformers().AutoModelForSequenceClassification._model_mapping
    model_type = model_types.get(type(config), None)
    return "sdpa" if getattr(model_type, "_supports_sdpa", False) else "eager"


@contextlib.contextmanager
def _load_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise UsageError(
            "cannot load the model",
            got=f"{folder}: {describe_error(error)}",
            try_="a folder that AutoModelForSequenceClassification loads from safetensors, without custom code",
        ) from None


def _check_all_loaded(network: Any, info: Mapping[str, Any], folder: Path) -> None:
    """Check that only the head was newly initialized: with a random encoder, training would silently be worse."""
    prefix = f"{network.base_model_prefix}."
    mismatched = {str(name[0] if isinstance(name, tuple) else name) for name in info["mismatched_keys"]}
    missing = sorted(
        name for name in {*info["missing_keys"], *mismatched} if name.startswith(prefix) and "pooler" not in name
    )
    if missing:
        raise UsageError(
            "the folder lacks weights of its model",
            got=f"{folder}: {len(missing)} missing or of another shape, such as {missing[0]}",
            try_="a complete copy of the model",
        )


# --- freezing and LoRA ------------------------------------------------------------------------------------------------


def _prepare(network: Any, tuning: FineTuning) -> Pretrained:
    freeze_layers(network, tuning.freeze)
    return Pretrained(add_lora(network, rank=tuning.lora, dropout=tuning.dropout) if tuning.lora else network)


def freeze_layers(network: Any, what: Freeze) -> None:
    """Freeze the first part of the encoder. The head, including a pooler, is always trained."""
    if what == "none":
        return
    layers = _encoder_layers(network.base_model)
    if isinstance(what, int) and what > len(layers):
        raise UsageError("the model has fewer layers than freeze", got=f"freeze={what}", try_=f"{len(layers)}")
    num_frozen = {"embeddings": 0, "encoder": len(layers)}.get(str(what), what)
    assert isinstance(num_frozen, int)
    trained = {id(parameter) for layer in layers[num_frozen:] for parameter in layer.parameters()}
    pooler = getattr(network.base_model, "pooler", None)
    # Compare by id() instead of by name, because tied parameters have several names.
    trained |= {id(parameter) for parameter in (pooler.parameters() if isinstance(pooler, nn.Module) else ())}
    for parameter in network.base_model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def _encoder_layers(encoder: nn.Module) -> nn.ModuleList:
    """Return the stack of blocks, which is the longest ModuleList of the encoder."""
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UsageError("cannot identify the model's layers", got=type(encoder).__name__, try_="freeze=none")
    return max(lists, key=len)


def add_lora(network: Any, *, rank: int, dropout: float) -> Any:
    """Add LoRA updates with peft. All original weights except those of the head are frozen."""
    try:
        import peft
    except ImportError as error:
        raise UsageError(
            "LoRA needs the extra lora", got=str(error), try_=f"{install_hint('lora')}, or without lora="
        ) from None
    # alpha = 2 * rank makes the scale of the updates independent of the rank, as in the examples of peft.
    config = peft.LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, lora_dropout=dropout)
    try:
        return peft.get_peft_model(network, config)
    except ValueError:
        # peft has no default target modules for this architecture.
        config.target_modules = "all-linear"
        return peft.get_peft_model(network, config)


def merge_lora(network: Any) -> Any:
    """Merge LoRA updates into the matrices of the model. A network without LoRA is returned unchanged."""
    return network.merge_and_unload() if hasattr(network, "merge_and_unload") else network
