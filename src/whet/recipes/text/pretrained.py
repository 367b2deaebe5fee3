"""What is trained when a model is named? A classifier of transformers that reads whet's padded batches.

Shapes: B texts, L tokens of the longest, C classes. Packed batches are not read: BERT-like classifiers of transformers
pool the first token of each row, and their attention without padding needs the package flash-attn. Those that we can
compute ourselves go on as a `Bert`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError
from whet.data.ragged import Padded
from whet.recipes.text.bert import Bert
from whet.recipes.text.freezing import Freeze, freeze
from whet.recipes.text.hub import import_transformers, quietly
from whet.recipes.text.lora import add_lora, merged
from whet.recipes.text.pretrained_tokenizer import SEGMENT, PretrainedTokenizer, write_files

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

_TAKE_SQUARES = ("albert", "bert", "camembert", "distilbert", "electra", "ernie", "roberta", "xlm-roberta")
"""Models that take a mask of attention as it is. Given a mask of tokens, transformers asks the device whether all of it
is true, and a step that waits cannot be captured."""

_READ_THE_LAST = ("xlnet",)
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
        self._takes_square = config.model_type in _TAKE_SQUARES and _asked_for(config) == "sdpa" and not is_decoder
        self._reads_last = config.model_type in _READ_THE_LAST

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
        words = {"input_ids": torch.where(is_real, ids % SEGMENT, self._pad), "attention_mask": mask}
        if self.has_segments:
            words["token_type_ids"] = torch.where(is_real, ids // SEGMENT, 0)
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
    with quietly(), _explained(folder):
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
    _refuse_gaps(network, told, folder)
    return _prepared(network, frozen=frozen, lora=lora, dropout=dropout)


def empty_pretrained(
    written: Mapping[str, Any], *, dropout: float, frozen: Freeze = "none", lora: int | None = None
) -> Pretrained:
    """The same classifier from the config that a run has kept; its weights are the checkpoint's."""
    transformers = import_transformers()
    plain = {name: value for name, value in written.items() if name not in _PRIVATE}
    with quietly():
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
    with quietly(), _explained(folder):
        config = _read_config(
            folder, classes=classes, is_multi_label=is_multi_label, dropout=dropout, attention_dropout=attention_dropout
        )
    return {name: value for name, value in config.to_dict().items() if name not in _PRIVATE}


def padded(model: Bert | Pretrained) -> Pretrained:
    """The classifier as transformers computes it; it shares the weights."""
    if isinstance(model, Pretrained):
        return model
    with quietly():
        network = import_transformers().AutoModelForSequenceClassification.from_config(
            model.config, dtype=torch.float32, attn_implementation=_attention(model.config), trust_remote_code=False
        )
    network.load_state_dict(model.network.state_dict(), assign=True)
    return Pretrained(network.train(model.training))


def save_transformers(model: Bert | Pretrained, tokenizer: PretrainedTokenizer, folder: Path) -> None:
    """Writes a folder that AutoModelForSequenceClassification and AutoTokenizer load; LoRA goes into the weights."""
    network = merged(padded(model).network)
    with quietly():
        network.save_pretrained(str(folder))
    write_files(tokenizer.files, folder)


def _prepared(network: Any, *, frozen: Freeze, lora: int | None, dropout: float) -> Pretrained:
    freeze(network, frozen)
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
        config.pad_token_id = _padding(config)
    return config


def _padding(config: Any) -> int:
    """For a model that was never padded, such as GPT-2: a decoder's classifier looks for the last token before it."""
    ends = getattr(config, "eos_token_id", None)
    end = ends[0] if isinstance(ends, list) and ends else ends
    return end if isinstance(end, int) else 0


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
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


def _asked_for(config: Any) -> str | None:
    """The attention that a network was made with."""
    asked: str | None = getattr(config, "_attn_implementation", None)
    return asked


def _refuse_gaps(network: Any, told: Mapping[str, Any], folder: Path) -> None:
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
