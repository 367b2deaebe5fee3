"""Check whether a batch may be split, by computing the loss of a few samples at once and in two parts.

The loss of a step is the mean over its micro-batches, weighted by their numbers of samples. This equals the loss of the
whole batch if the loss is a mean over samples, but not if it is a mean over labeled tokens, a contrastive loss or a
sum. The losses and gradients of both ways are compared with the same random draws. The samples are chosen so that
labels and masks are divided unevenly between the parts. Values that often mark ignored labels are also tried, because
they may occur only in later batches.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.base.errors import WhetError, describe_error
from whet.data.batch import Field, GlobalBatch, MicroBatch, Padded
from whet.data.split import take_samples
from whet.device.abstract import AbstractDevice
from whet.device.errors import is_out_of_memory
from whet.device.rng import get_host_rng, host_rng_equal
from whet.step.graph_safety import loss_dependencies
from whet.step.loss import BatchLoss, MicroLoss, parse_loss
from whet.verify.draws import RecordedDraws, UnrepeatableDrawError
from whet.verify.isolation import preserve_model_and_rng

_TOLERANCE = 2e-3
"""Maximum relative difference of the loss and of each gradient. Rounding causes 1e-6, wrong weights several percent."""
_ROUNDING = 4
"""Differences are allowed up to this multiple of the measured effect of rounding."""
_MIN_SAMPLES, _MAX_SAMPLES = 6, 12
_MAX_VALUES = 8
"""Maximum number of distinct values of a feature that is treated as a class label or a mask."""
_TF32_EPS = 2.0**-10
_NO_TOKENS = ("attention_mask", "token_type_ids", "position_ids", "special_tokens_mask")

MicroBatches = Callable[[GlobalBatch, int], Iterator[MicroBatch]]


def loss_split_obstacle(
    model: nn.Module,
    loss: MicroLoss,
    batch: GlobalBatch,
    micro_batches: MicroBatches,
    device: AbstractDevice,
    *,
    pad_token: int | None = None,
    is_repeated: bool = False,
    on_progress: Callable[[], None] = lambda: None,
) -> str | None:
    """Return the reason why the batches of this loss may not be split, or None if they may.

    `micro_batches(batch, size)` splits a batch. The model and the random generators are restored. If `is_repeated`, the
    samples are compared only with the values that they have. `on_progress` is called after each computed loss.
    """
    if (mixing := mixing_layer(model)) is not None:
        return f"{mixing} computes statistics over the batch"
    if (criterion := _weighted_criterion(loss)) is not None:
        return f"{criterion} divides by the class weights of the batch"

    def compute_loss(micro: MicroBatch) -> object:
        result = loss(micro)
        on_progress()
        return result

    rows, first = _choose_rows(batch, micro_batches, pad_token)
    if first == 0:
        return None
    few = take_samples(batch, rows)
    numbers = np.arange(len(few))
    whole, *parts = [
        next(micro_batches(take_samples(few, part), len(part))).map_tensors(device.put)
        for part in (numbers, numbers[:first], numbers[first:])
    ]
    is_pair = False
    try:
        with preserve_model_and_rng(model, device), device.compute_context():
            is_pair = parse_loss(compute_loss(whole))[1] is not None
            obstacle = _compare(model, compute_loss, whole, parts, skips_nan=is_repeated)
            if obstacle is None and not is_repeated:
                obstacle = _compare_planted(model, compute_loss, whole, parts, device, pad_token)
    except UnrepeatableDrawError as error:
        # A pair (sum, weight) cannot be compared then, but the user has specified the weight.
        return None if is_pair else f"it was not shown that the loss is a mean over samples: {error}"
    except WhetError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"the loss fails with {first} of {len(batch)} samples: {describe_error(error)}"
    return obstacle


def mixing_layer(model: nn.Module) -> str | None:
    """Return the name of a layer whose output depends on all samples of the batch in training mode, or None."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return f"{type(module).__name__} ({name})" if name else type(module).__name__
    return None


def _weighted_criterion(loss: MicroLoss) -> str | None:
    """Return the name of a torch criterion whose mean is weighted by class, or None.

    Binary cross entropy is allowed, because its mean is not divided by its elementwise weights.
    """
    function = loss.function if isinstance(loss, BatchLoss) else loss
    if isinstance(function, functools.partial) and function.func in (functional.cross_entropy, functional.nll_loss):
        is_mean = function.keywords.get("reduction", "mean") == "mean"
        return function.func.__name__ if is_mean and _is_uneven(function.keywords.get("weight")) else None
    for used in loss_dependencies(function):
        if isinstance(used, nn.CrossEntropyLoss | nn.NLLLoss) and used.reduction == "mean" and _is_uneven(used.weight):
            return type(used).__name__
    return None


def _is_uneven(weight: Tensor | None) -> bool:
    return weight is not None and bool((weight != weight.flatten()[0]).any())


# --- choosing samples ------------------------------------------------------------------------------------------------


def _choose_rows(batch: GlobalBatch, micro_batches: MicroBatches, pad_token: int | None) -> tuple[np.ndarray, int]:
    """Choose a few samples, ordered so that all values are divided unevenly between two parts.

    Return the indices of the samples, and the size of the first part.
    """
    features: dict[str, list[Tensor]] = {}
    for micro in micro_batches(batch, 256):
        for name, feature in _features(micro.fields, pad_token):
            features.setdefault(name, []).append(feature.cpu().double())
    columns = [torch.cat(feature).numpy() for feature in features.values()]
    marks = [mark for column in columns if len(column) == len(batch) for mark in _marks(column)]
    chosen: list[int] = []
    # Choose samples with rare values first, because a random choice could miss them.
    for mark in sorted(marks, key=np.count_nonzero):
        if len(chosen) < _MAX_SAMPLES and not mark[chosen].any():
            chosen.append(int(np.flatnonzero(mark)[0]))
    # Spread the other samples over the batch, because neighbors often have the same class.
    for row in np.linspace(0, len(batch) - 1, min(_MIN_SAMPLES, len(batch))).astype(int):
        if len(chosen) < _MIN_SAMPLES and row not in chosen:
            chosen.append(int(row))
    rows = np.array(sorted(chosen))
    first = min(len(rows) - 1, (2 * len(rows) + 1) // 3)
    generator = np.random.default_rng(0)
    orders = [rows, *(generator.permutation(rows) for _ in range(64 if marks else 0))]
    return max(orders, key=lambda order: _unevenness(order, first, marks)), first


def _features(fields: Mapping[str, Field], pad_token: int | None) -> Iterator[tuple[str, Tensor]]:
    """Yield features by which a loss may weight samples, (samples,): labels, sums of masks, lengths, token counts."""
    for name, field in fields.items():
        if isinstance(field, Padded):
            yield f"{name} length", field.lengths
        if not isinstance(field, Tensor) or field.dim() == 0 or field.is_complex():
            continue
        if field.dim() == 1:
            yield name, field
        elif field.dtype == torch.bool or (field.dim() == 2 and bool(((field == 0) | (field == 1)).all())):
            yield name, field.flatten(1).sum(1)
        elif not field.is_floating_point() and field.dtype != torch.uint8:
            values = field.flatten(1)
            yield f"{name} negative", (values < 0).sum(1)
            for token in {0, pad_token or 0}:
                yield f"{name} {token}", values.eq(token).sum(1)


def _marks(column: np.ndarray) -> list[np.ndarray]:
    """Return a mask over the samples for each distinct value of a column, or for its extremes if there are many."""
    values = np.unique(column)
    if len(values) > _MAX_VALUES:
        values = np.unique([*values[values < 0][:2], values[0], values[-1]])
    return [column == value for value in values if (column == value).any()] if len(values) > 1 else []


def _unevenness(order: np.ndarray, first: int, marks: list[np.ndarray]) -> float:
    """Return the difference between the fractions of a value in the two parts, for the value where it is smallest."""
    ordered = [mark[order] for mark in marks]
    return min((abs(m[:first].mean() - m[first:].mean()) for m in ordered if m.any() and not m.all()), default=0.0)


# --- comparison ------------------------------------------------------------------------------------------------------


class _Computed(NamedTuple):
    weight: Tensor | float | None
    """The weight if the loss is a pair (sum, weight), or None if it is a mean."""
    values: list[Tensor]
    """The loss, and the gradients of all trainable parameters."""


def _compare(
    model: nn.Module, loss: MicroLoss, whole: MicroBatch, parts: list[MicroBatch], *, skips_nan: bool = False
) -> str | None:
    """Compare the loss and gradients of the whole batch with those of its parts. Return the obstacle, or None."""
    draws, host = RecordedDraws(len(whole)), get_host_rng()
    with draws.record():
        expected = _compute(model, loss, whole)
    is_pair = expected.weight is not None
    if not bool(expected.values[0].isfinite()):
        # Ignore NaN if requested: a planted value may be invalid, and NonFiniteGuard handles a loss that becomes NaN.
        reason = f"it was not shown that the loss is a mean over samples: it is {float(expected.values[0])}"
        return None if skips_nan else reason
    if not host_rng_equal(host, get_host_rng()):
        return None if is_pair else "the loss draws random numbers of Python or NumPy for the whole batch"
    sums: list[Tensor] = []
    weight, start = 0.0, 0
    for part in parts:
        with draws.repeat(slice(start, start + len(part))):
            computed = _compute(model, loss, part)
        share = 1.0 if is_pair else len(part) / len(whole)
        values = [value * share for value in computed.values]
        sums = values if not sums else [earlier + value for earlier, value in zip(sums, values, strict=True)]
        weight += float(computed.weight or 0.0)
        start += len(part)
    if expected.weight is not None and not abs(float(expected.weight) - weight) <= _TOLERANCE * abs(weight):
        return f"the weights of two parts add up to {weight:.4g}, and the weight of the whole is {expected.weight:.4g}"
    norms, differences = _norms(expected.values), _norms([a - b for a, b in zip(expected.values, sums, strict=True)])
    if skips_nan and not all(math.isfinite(norm) for norm in norms):
        return None
    if _is_sharded(model):
        # All ranks must call a sharded model equally often, so do not measure the effect of rounding.
        norms = [norms[0], *[max(norms[1:], default=0.0)] * (len(norms) - 1)]
    allowed = [_TOLERANCE * norm for norm in norms]
    if all(difference <= most for difference, most in zip(differences, allowed, strict=True)):
        return None
    noise = [0.0] * len(norms)
    if not _is_sharded(model):
        with _perturbed_weights(model), draws.repeat(slice(0, len(whole))):
            rounded = _compute(model, loss, whole)
        noise = _norms([a - b for a, b in zip(expected.values, rounded.values, strict=True)])
    wrong = [
        difference / max(norm, 1e-30)
        for difference, norm, most, least in zip(differences, norms, allowed, noise, strict=True)
        if not difference <= most + _ROUNDING * least
    ]
    if not wrong:
        return None
    what = (
        "the sum of a batch is not that of its parts"
        if is_pair
        else "the loss of a batch is not the mean over its samples"
    )
    return f"{what}: {len(whole)} samples at once and in two parts differ by {max(wrong):.2g}"


def _compute(model: nn.Module, loss: MicroLoss, micro: MicroBatch) -> _Computed:
    total, weight = parse_loss(loss(micro))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    return _Computed(weight, [total.detach(), *gradients])


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


def _norms(values: list[Tensor]) -> list[float]:
    return [float(value.norm()) for value in values]


@contextmanager
def _perturbed_weights(model: nn.Module) -> Iterator[None]:
    """Perturb every weight by a few units in the last place, to measure how rounding affects the gradients.

    Some gradients are pure rounding errors, for example those of a bias before a norm, or of a model that fits the data
    perfectly.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    saved = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in parameters:
                uses_tf32 = parameter.is_cuda and torch.get_float32_matmul_precision() != "highest"
                eps = max(torch.finfo(parameter.dtype).eps, _TF32_EPS if uses_tf32 else 0.0)
                signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
                parameter.mul_(1 + 4 * eps * signs)
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, saved, strict=True):
                parameter.copy_(values)


# --- values that do not occur in the batch ---------------------------------------------------------------------------


def _compare_planted(
    model: nn.Module,
    loss: MicroLoss,
    whole: MicroBatch,
    parts: list[MicroBatch],
    device: AbstractDevice,
    pad_token: int | None,
) -> str | None:
    """Compare again with values in the first sample that a loss may ignore, such as ignored labels or a cleared mask.

    Values that make the loss fail are skipped. Return the first obstacle, or None.
    """
    labels = _label_fields(whole)
    unknown = [name for name in labels if not _is_named_label(name) and not _holds(whole, name, -100)]
    if unknown and not device.is_cpu:
        # An ignored label in an input would make an embedding read out of bounds, which aborts a CUDA process.
        return f"it was not shown that the loss is a mean over samples: {', '.join(unknown)} may hold ignored labels"
    candidates = [*_ignored_labels(whole, labels, is_cpu=device.is_cpu)]
    if not _is_sharded(model):
        # The number of these candidates depends on the samples, which differ between ranks.
        candidates += _other_values(whole, labels, pad_token, is_cpu=device.is_cpu)
    for planted in candidates:
        try:
            first, *others = [_plant(micro, planted) for micro in (whole, parts[0])]
            obstacle = _compare(model, loss, first, [*others, *parts[1:]], skips_nan=True)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            continue
        if obstacle is not None:
            return obstacle
    return None


def _ignored_labels(whole: MicroBatch, labels: list[str], *, is_cpu: bool) -> Iterator[dict[str, float]]:
    """Yield dicts of values to plant, which map label fields to a value that losses commonly ignore."""
    # -100 is ignored by torch's cross entropy and transformers, and -1 by nanoGPT and others.
    for ignored in (-100, -1):
        # A negative label that is not ignored aborts a CUDA process.
        safe = [n for n in labels if is_cpu or _holds(whole, n, ignored) or (ignored == -100 and _is_named_label(n))]
        if safe:
            yield dict.fromkeys(safe, ignored)


def _other_values(
    whole: MicroBatch, labels: list[str], pad_token: int | None, *, is_cpu: bool
) -> Iterator[dict[str, float]]:
    """Yield dicts of values to plant: tokens that may be padding, and the opposite of masks that are constant here."""
    tokens = labels or _token_fields(whole)
    candidates = [dict.fromkeys(tokens, 0.0), {name: float(_tensor(whole, name).min()) for name in tokens}]
    if pad_token is not None:
        candidates.append({name: pad_token for name in tokens if is_cpu or _holds(whole, name, pad_token)})
    yield from (
        candidate for number, candidate in enumerate(candidates) if candidate and candidate not in candidates[:number]
    )
    for name, field in whole.fields.items():
        if not isinstance(field, Tensor) or field.is_complex() or field.numel() == 0:
            continue
        # Do not set integers to 1, because 1 may not be a valid class.
        if bool((field == 1).all()):
            yield {name: 0}
        elif (field.dtype == torch.bool or field.is_floating_point()) and bool((field == 0).all()):
            yield {name: 1}


def _token_fields(micro: MicroBatch) -> list[str]:
    """Return the integer fields with several values per sample."""
    return [
        name
        for name, field in micro.fields.items()
        if isinstance(field, Tensor) and field.dim() >= 2 and field.shape[1] > 1
        if field.dtype in (torch.int64, torch.int32) and name.rpartition(".")[2] not in _NO_TOKENS
    ]


def _label_fields(micro: MicroBatch) -> list[str]:
    """Return the integer fields that may contain token labels.

    If no field name indicates labels, return all integer fields except the first, which is probably the input.
    """
    names = [name for name in _token_fields(micro) if name.rpartition(".")[2] != "input_ids"]
    named = [name for name in names if _is_named_label(name)]
    return named or names[1:] or ([] if len(micro.fields) == 1 or not names else names[-1:])


def _is_named_label(name: str) -> bool:
    return name.rpartition(".")[2] in ("labels", "label_ids")


def _holds(micro: MicroBatch, name: str, value: float) -> bool:
    return bool((_tensor(micro, name) == value).any())


def _tensor(micro: MicroBatch, name: str) -> Tensor:
    field = micro.fields[name]
    assert isinstance(field, Tensor)
    return field


def _plant(micro: MicroBatch, values: Mapping[str, float]) -> MicroBatch:
    """Set the second half of the first sample to a value, or its only value if the field has one number per sample."""
    fields = dict(micro.fields)
    for name, value in values.items():
        field = _tensor(micro, name)
        planted = field.clone()
        planted[0 if field.dim() == 1 else (0, slice(field.shape[1] // 2, None))] = value
        fields[name] = planted
    return replace(micro, fields=fields)
