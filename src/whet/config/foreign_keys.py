"""Errors for keys of other tools that whet does not have, with the whet key to use instead."""

from collections.abc import Mapping
from typing import Any

from whet.base.errors import UsageError, closest_match, nearest_names
from whet.config.options import ALIASES, CommonConfig

_ACCUMULATION = ("accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches", "accumulation")
_PLANNED = {
    "pin_memory": "copies",
    "prefetch_factor": "prefetch",
    "persistent_workers": "workers",
    "non_blocking": "copies",
    "grad_scaler": "loss_scaling",
    "gradscaler": "loss_scaling",
}
"""Names from DataLoaders and training loops, and the plan setting that decides each of them."""
_INSTEAD = {
    "disable_compile": "compile=off",
    "torch_compile": "compile=on",
    "eval_interval": "eval_every=STEPS; without it, once per epoch",
    "checkpoint_path": "--run DIR, or run=DIR in Python",
    "output_dir": "--run DIR, or run=DIR in Python",
    "run": "--run DIR",
    "checkpoint_frequency": "checkpoint_epochs=N, checkpoint_steps=N or checkpoint_minutes=N",
    "dataset_type": "the recipe: whet train chat, text, puzzle or hex",
    "pytorch_enable_mps_fallback": "mps_fallback=on, which lists the operators that run on the CPU",
    "omp_num_threads": "threads=N",
    "mkl_num_threads": "threads=N",
    "amp": "precision=bf16 or precision=fp16",
    "fp16": "precision=fp16",
    "bf16": "precision=bf16",
}
"""Other names, in lower case, and what to write instead."""


def unknown_key(
    key: str, values: Mapping[str, Any], known: Mapping[str, Any], *, error: str, model: type[Any] | None = None
) -> UsageError:
    """Return the error for a key that does not exist, with a suggestion of what to type instead.

    `values` are all keys from the same source, because the suggestion for accumulation steps depends on the batch size.
    """
    word, value = key.rpartition(".")[2].lower(), values.get(key)
    got = key if value is None else f"{key}={value}"[:200]
    if word in _ACCUMULATION and model is not None:
        return _accumulation_error(key, values, model)
    if word in _PLANNED:
        setting = _PLANNED[word]
        return UsageError(
            f"{word} is decided by the plan", got=got, try_=f"no {key}; whet plan ... --why {setting} gives the reason"
        )
    if word in _INSTEAD:
        hint = _INSTEAD[word] if value is None else _INSTEAD[word].replace("=N", f"={value}")
        return UsageError(error, got=got, try_=hint)
    # Prefer a key in a group: "layers" most likely means "arch.layers", even if another key is spelled similarly.
    meant = next((name for name in known if name.endswith(f".{key}")), None)
    # Also match upper case, such as BATCH_SIZE in a script.
    meant = meant or next((name for name in (word, ALIASES.get(word, "")) if name in known), None)
    # Search aliases too, because "learningrate" is a misspelling of "learning_rate".
    meant = meant or closest_match(key, [*known, *(alias for alias, name in ALIASES.items() if name in known)])
    hint = f"did you mean {meant!r}?" if meant else f"the nearest keys are {', '.join(nearest_names(key, known))}"
    others = [name for name in values if name not in known and name != key]
    got += f"; also unknown: {', '.join(others)}"[:200] if others else ""
    return UsageError(error, got=got, try_=hint)


def _accumulation_error(key: str, values: Mapping[str, Any], model: type[Any]) -> UsageError:
    """Return the error for accumulation steps. It suggests batch sizes with the same effect."""
    steps = values[key] if key in values and isinstance(values[key], int) else 0
    given = values.get("micro_batch", values.get("global_batch_size"))
    batch = given if isinstance(given, int) else _default_batch(model, values)
    if steps < 1 or not isinstance(batch, int):
        hint = "global_batch_size=N micro_batch=M: N/M micro-batches are accumulated"
    else:
        hint = f"global_batch_size={batch * steps} micro_batch={batch}; or leave micro_batch out: the plan chooses it"
    source = "" if isinstance(given, int) else ", the default"
    return UsageError(
        "global_batch_size is the whole batch of an optimizer step, and whet accumulates gradients automatically",
        got=f"{key}={values.get(key)} with batches of {batch}{source}",
        try_=hint,
    )


def _default_batch(model: type[Any], values: Mapping[str, Any]) -> Any:
    """Return the default batch size, or None for options without one. Some recipes choose it by data, model or size."""
    if not issubclass(model, CommonConfig):
        return None
    plain = {key: value for key, value in values.items() if key in ("data", "data_paths", "model", "size")}
    try:
        return model.model_validate(plain).global_batch_size
    except (UsageError, ValueError):
        return model.model_fields["global_batch_size"].default
