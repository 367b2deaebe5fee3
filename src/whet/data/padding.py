"""Padding of tokenized samples of different lengths, like the collators of transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.data.batch import DictBatch
from whet.data.columns import stack_nested

IGNORED_LABEL = -100
"""Label of positions that do not contribute to the loss, as in torch's cross entropy."""
_PAD_VALUES = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "labels": IGNORED_LABEL}


def pad_tokens(samples: Sequence[Any], *, pad_token_id: int | None) -> DictBatch | None:
    """Pad samples with `input_ids` to the longest one, like DataCollatorWithPadding.

    Return None for samples without `input_ids`.

    >>> pad_tokens([{"input_ids": [5, 6], "label": 1}, {"input_ids": [7], "label": 0}], pad_token_id=9)["input_ids"]
    tensor([[5, 6],
            [7, 9]])
    """
    if not isinstance(samples[0], Mapping) or "input_ids" not in samples[0]:
        return None
    batch = DictBatch()
    lengths = [len(sample["input_ids"]) for sample in samples]
    for name in samples[0]:
        # Models expect `labels`; datasets often have `label` or `label_ids`.
        field = "labels" if name in ("label", "label_ids") else str(name)
        values = [sample[name] for sample in samples]
        batch[field] = _column(field, values, lengths, pad_token_id=pad_token_id)
    if "attention_mask" not in batch:
        batch["attention_mask"] = _pad([torch.ones(length, dtype=torch.long) for length in lengths], 0)
    return batch


def _column(name: str, values: list[Any], lengths: list[int], *, pad_token_id: int | None) -> Any:
    is_per_token = all(hasattr(value, "__len__") and not isinstance(value, str) for value in values)
    if not is_per_token or len(set(lengths)) == 1 or [len(value) for value in values] != lengths:
        return stack_nested(values)
    if name == "input_ids" and pad_token_id is None:
        raise UsageError(
            "samples of different lengths need a padding token",
            got=f"input_ids of {min(lengths)} to {max(lengths)} tokens, and a model without config.pad_token_id",
            try_="collate_fn=DataCollatorWithPadding(tokenizer)",
        )
    pad_value = pad_token_id if name == "input_ids" else _PAD_VALUES.get(name, 0)
    return _pad([torch.as_tensor(value) for value in values], pad_value or 0)


def _pad(tensors: Sequence[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=value)
