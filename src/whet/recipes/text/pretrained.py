"""Classifiers from transformers: loading, freezing, LoRA and saving."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError
from whet.data.batch import Padded
from whet.recipes.text.backbone import import_transformers, quiet_transformers
from whet.recipes.text.bert import Bert
from whet.recipes.text.tokenizer import SEGMENT_OFFSET, PretrainedTokenizer, write_files

Freeze = Literal["none", "embeddings", "encoder"] | int
"""A number: the embeddings and so many of the first layers."""


def freeze_layers(network: Any, what: Freeze) -> None:
    """Stops the gradient at some of the weights; the head always learns, and a pooler belongs to it."""
    if what == "none":
        return
    layers = _encoder_layers(network.base_model)
    if isinstance(what, int) and what > len(layers):
        raise UsageError("freeze counts more layers than the model has", got=f"freeze={what}", try_=f"{len(layers)}")
    num_frozen = {"embeddings": 0, "encoder": len(layers)}.get(str(what), what)
    assert isinstance(num_frozen, int)
    learning = {id(parameter) for layer in layers[num_frozen:] for parameter in layer.parameters()}
    pooler = getattr(network.base_model, "pooler", None)
    learning |= {id(parameter) for parameter in (pooler.parameters() if isinstance(pooler, nn.Module) else ())}
    for parameter in network.base_model.parameters():
        parameter.requires_grad_(id(parameter) in learning)


def _encoder_layers(encoder: nn.Module) -> nn.ModuleList:
    """The stack of blocks: the longest list of modules that an encoder has."""
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UsageError("the model's layers cannot be told apart", got=type(encoder).__name__, try_="freeze=none")
    return max(lists, key=len)


def add_lora(network: Any, *, rank: int, dropout: float) -> Any:
    """The network with updates of a rank beside its matrices; of the rest only the head learns."""
    try:
        import peft
    except ImportError as error:
        raise UsageError(
            "LoRA needs the extra lora", got=str(error), try_="pip install 'whet[lora]', or without lora="
        ) from None
    # Twice the rank: the updates count the same whatever the rank, and peft's own examples do so.
    choice = peft.LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, lora_dropout=dropout)
    try:
        return peft.get_peft_model(network, choice)
    except ValueError:
        # Models that peft does not know by name: every linear layer.
        choice.target_modules = "all-linear"
        return peft.get_peft_model(network, choice)


def merge_lora(network: Any) -> Any:
    """The network with its updates added to its own matrices; as it is where there are none."""
    return network.merge_and_unload() if hasattr(network, "merge_and_unload") else network


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
"""What models of transformers call it."""

_PRIVATE = ("_name_or_path", "attn_implementation", "auto_map", "dtype", "quantization_config", "torch_dtype")
"""Entries of a model's config that say where it came from or how it is run: not kept, and not believed."""

_ACCEPT_4D_MASK = ("albert", "bert", "camembert", "distilbert", "electra", "ernie", "roberta", "xlm-roberta")
"""Models that take a mask of attention as it is. Given a mask of tokens, transformers asks the device whether all of it
is true, and a step that waits cannot be captured."""

_POOL_LAST_TOKEN = ("xlnet",)
"""Models whose classifier reads the last cell of a row, whatever stands there: their padding lies in front."""


class Pretrained(nn.Module):
    """A classifier of transformers, `network`, behind the interface of the small encoder."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        config = network.config
        self._pad = int(config.pad_token_id or 0)
        self.has_segments = int(getattr(config, "type_vocab_size", 0) or 0) > 1
        # A decoder's mask is not of tokens alone: transformers adds that nothing looks ahead.
        is_decoder = bool(getattr(config, "is_decoder", False))
        self._takes_square = (
            config.model_type in _ACCEPT_4D_MASK and _attention_kind(config) == "sdpa" and not is_decoder
        )
        self._reads_last = config.model_type in _POOL_LAST_TOKEN

    def forward(self, tokens: Padded) -> Tensor:
        """The logits, (B, C)."""
        ids, lengths = tokens.values, tokens.lengths
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if self._reads_last:
            place = place + (lengths[:, None] - ids.shape[1])
            ids = ids.gather(1, place.clamp(min=0))
        is_real = (place >= 0) & (place < lengths[:, None])
        # Some models count positions by what is padding, so it has to be theirs.
        mask = is_real[:, None, None] if self._takes_square else is_real.long()
        words = {"input_ids": torch.where(is_real, ids % SEGMENT_OFFSET, self._pad), "attention_mask": mask}
        if self.has_segments:
            words["token_type_ids"] = torch.where(is_real, ids // SEGMENT_OFFSET, 0)
        logits: Tensor = self.network(**words).logits
        return logits


def load_pretrained(
    folder: Path,
    *,
    classes: Sequence[str],
    is_multi_label: bool,
    dropout: float,
    attention_dropout: float | None = None,
    frozen: Freeze = "none",
    lora: int | None = None,
) -> Pretrained:
    """The classifier with a model's weights and a new head, drawn from torch's generator."""
    transformers = import_transformers()
    with quiet_transformers(), _load_errors(folder):
        config = _read_config(
            folder, classes=classes, is_multi_label=is_multi_label, dropout=dropout, attention_dropout=attention_dropout
        )
        network, told = transformers.AutoModelForSequenceClassification.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            attn_implementation=_attention(config),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            # A model that was a classifier before has a head for its own classes.
            ignore_mismatched_sizes=True,
        )
    _check_all_loaded(network, told, folder)
    return _prepared(network, frozen=frozen, lora=lora, dropout=dropout)


def empty_pretrained(
    written: Mapping[str, Any], *, dropout: float, frozen: Freeze = "none", lora: int | None = None
) -> Pretrained:
    """The same classifier from the config that a run has kept; its weights are the checkpoint's."""
    transformers = import_transformers()
    plain = {name: value for name, value in written.items() if name not in _PRIVATE}
    with quiet_transformers():
        try:
            kind = transformers.AutoConfig.for_model(plain.pop("model_type"))
            config = type(kind).from_dict(plain)
            network = transformers.AutoModelForSequenceClassification.from_config(
                config, dtype=torch.float32, attn_implementation=_attention(config), trust_remote_code=False
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WhetError(
                "the run's model is not known here",
                got=str(error).strip().splitlines()[0][:160],
                try_="the version of transformers that trained it",
            ) from None
    return _prepared(network, frozen=frozen, lora=lora, dropout=dropout)


def pretrained_config(
    folder: Path,
    *,
    classes: Sequence[str],
    is_multi_label: bool,
    dropout: float,
    attention_dropout: float | None = None,
) -> dict[str, Any]:
    """The model's config as plain JSON: with it and a checkpoint the model can be made again."""
    with quiet_transformers(), _load_errors(folder):
        config = _read_config(
            folder, classes=classes, is_multi_label=is_multi_label, dropout=dropout, attention_dropout=attention_dropout
        )
    return {name: value for name, value in config.to_dict().items() if name not in _PRIVATE}


def as_pretrained(model: Bert | Pretrained) -> Pretrained:
    """The classifier as transformers computes it; it shares the weights."""
    if isinstance(model, Pretrained):
        return model
    with quiet_transformers():
        network = import_transformers().AutoModelForSequenceClassification.from_config(
            model.config, dtype=torch.float32, attn_implementation=_attention(model.config), trust_remote_code=False
        )
    network.load_state_dict(model.network.state_dict(), assign=True)
    return Pretrained(network.train(model.training))


def save_transformers(model: Bert | Pretrained, tokenizer: PretrainedTokenizer, folder: Path) -> None:
    """Writes a folder that AutoModelForSequenceClassification and AutoTokenizer load; LoRA goes into the weights."""
    network = merge_lora(as_pretrained(model).network)
    with quiet_transformers():
        network.save_pretrained(str(folder))
    write_files(tokenizer.files, folder)


def _prepared(network: Any, *, frozen: Freeze, lora: int | None, dropout: float) -> Pretrained:
    freeze_layers(network, frozen)
    return Pretrained(add_lora(network, rank=lora, dropout=dropout) if lora else network)


def _read_config(
    folder: Path, *, classes: Sequence[str], is_multi_label: bool, dropout: float, attention_dropout: float | None
) -> Any:
    config = import_transformers().AutoConfig.from_pretrained(
        str(folder),
        local_files_only=True,
        trust_remote_code=False,
        num_labels=len(classes),
        id2label=dict(enumerate(classes)),
        label2id={name: place for place, name in enumerate(classes)},
        problem_type="multi_label_classification" if is_multi_label else "single_label_classification",
    )
    for name in _DROPOUTS:
        if hasattr(config, name):
            is_other = attention_dropout is not None and name in _ATTENTION_DROPOUTS
            setattr(config, name, attention_dropout if is_other else dropout)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = _default_pad_token(config)
    return config


def _default_pad_token(config: Any) -> int:
    """For a model that was never padded, such as GPT-2: a decoder's classifier looks for the last token before it."""
    ends = getattr(config, "eos_token_id", None)
    end = ends[0] if isinstance(ends, list) and ends else ends
    return end if isinstance(end, int) else 0


@contextlib.contextmanager
def _load_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        raise UsageError(
            "the model cannot be loaded",
            got=f"{folder}: {type(error).__name__}: {reason}",
            try_="a folder that AutoModelForSequenceClassification loads from safetensors, without code of its own",
        ) from None


def _attention(config: Any) -> str:
    """torch's attention where the model has it; never a kernel that a config names."""
    kinds = import_transformers().AutoModelForSequenceClassification._model_mapping
    kind = kinds.get(type(config), None)
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def _attention_kind(config: Any) -> str | None:
    """The attention that a network was made with."""
    asked: str | None = getattr(config, "_attn_implementation", None)
    return asked


def _check_all_loaded(network: Any, told: Mapping[str, Any], folder: Path) -> None:
    """New weights belong into the head alone: an encoder of random numbers would train, badly, without a word."""
    prefix = f"{network.base_model_prefix}."
    lost = {str(name[0] if isinstance(name, tuple) else name) for name in told["mismatched_keys"]}
    gaps = sorted(name for name in {*told["missing_keys"], *lost} if name.startswith(prefix) and "pooler" not in name)
    if gaps:
        raise UsageError(
            "the folder lacks weights of its model",
            got=f"{folder}: {len(gaps)} missing or of another shape, such as {gaps[0]}",
            try_="a whole copy of the model",
        )
