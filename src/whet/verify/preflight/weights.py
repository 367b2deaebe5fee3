"""Are weights, buffers, inputs and the optimizer's state what the device can train with? Where was each made?"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whet.data.batch import Micro
from whet.verify.lines import Line, line_at_work
from whet.verify.preflight.dtypes import WIDE, is_unsupported, wide
from whet.verify.preflight.finding import Finding, Sighting, as_place
from whet.verify.preflight.limits import too_deep, too_large, too_many
from whet.verify.preflight.watcher import Call, Watcher

Form = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class Birthplaces(Watcher):
    """The line that first gave a piece of memory the form in which the model has it."""

    def __init__(self) -> None:
        self._lines: dict[Form, Line | None] = {}
        self._kept: list[Any] = []
        """Memory that was given back could be another tensor's later."""

    def operator(self, call: Call) -> Iterable[Sighting]:
        if call.phase == "making":
            for tensor in call.outputs:
                form = _form(tensor)
                if form not in self._lines:
                    self._lines[form] = line_at_work()
                    self._kept.append(tensor.untyped_storage())
        return ()

    def line_of(self, tensor: Tensor) -> Line | None:
        return self._lines.get(_form(tensor))

    def forget(self) -> None:
        self._lines, self._kept = {}, []


def _form(tensor: Tensor) -> Form:
    return tensor.untyped_storage()._cdata, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def look_at_model(model: nn.Module, born: Birthplaces, *, device: str, limit: int | None) -> Iterator[Finding]:
    """What is wrong before anything is computed."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for seen in _look_at(tensor, name, device=device, limit=limit):
            line = born.line_of(tensor)
            yield _finding(seen, line, during="the making of the model")
    yield from _mixed(model, born)


def look_at_inputs(micro: Micro) -> Iterator[Finding]:
    """Samples in a format that MPS does not have."""
    for name, value in micro.fields.items():
        tensor = value if isinstance(value, Tensor) else value.values
        if isinstance(tensor, Tensor) and tensor.dtype in WIDE:
            yield _finding(wide(f"the input {name}", tensor.dtype), None, during="the data")


def _look_at(tensor: Tensor, name: str, *, device: str, limit: int | None) -> Iterator[Sighting]:
    num_bytes = tensor.numel() * tensor.element_size()
    if limit is not None and num_bytes > limit:
        yield too_large(num_bytes, limit, device, cure=f"{name} in pieces, or smaller")
    if device != "mps":
        return
    if tensor.dtype in WIDE:
        yield wide(name, tensor.dtype)
    elif is_unsupported(tensor.dtype):
        yield Sighting("unsupported-dtype", "error", f"{name} is {tensor.dtype}, which MPS does not have", "float16")
    yield from too_deep(tensor, name)
    yield from too_many(tensor, name)
    if isinstance(tensor, nn.Parameter) and not tensor.is_contiguous():
        yield Sighting(
            "strided-weight",
            "warning",
            f"the weight {name} is not contiguous: conv2d gives wrong results with such weights (pytorch#192212)",
            ".contiguous() here; whet does it before the first step, plain PyTorch does not",
        )


def _mixed(model: nn.Module, born: Birthplaces) -> Iterator[Finding]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()]
    counts = Counter(parameter.dtype for _, parameter in trained)
    if len(counts) < 2:
        return
    told = ", ".join(f"{count} in {str(dtype).removeprefix('torch.')}" for dtype, count in counts.most_common())
    rare = counts.most_common()[-1][0]
    name, parameter = next((name, p) for name, p in trained if p.dtype == rare)
    seen = Sighting(
        "mixed-dtypes",
        "warning",
        f"weights of more than one number format: {told}, such as {name}; what the optimizer keeps is mixed too",
        "weights in float32; precision=bf16 computes in half precision without changing them",
    )
    yield _finding(seen, born.line_of(parameter), during="the making of the model")


def _finding(seen: Sighting, line: Line | None, *, during: str) -> Finding:
    return Finding(
        id=seen.id,
        severity=seen.severity,
        what=seen.what,
        try_=seen.try_,
        place=as_place(line) if line else None,
        during="" if line else during,
    )


class UpdateWatcher(Watcher):
    """Fused updates take weights, gradients and state of one number format."""

    def operator(self, call: Call) -> Iterable[Sighting]:
        if call.phase != "updating" or not call.base.startswith("_fused_"):
            return
        lists = [value for value in call.args[:4] if isinstance(value, list | tuple)]
        for same in zip(*(tensors for tensors in lists if tensors), strict=False):
            dtypes = {tensor.dtype for tensor in same if isinstance(tensor, Tensor) and tensor.dim() > 0}
            if len(dtypes) > 1:
                told = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
                yield Sighting(
                    "mixed-dtypes",
                    "error",
                    f"a fused update of a weight, its gradient and its state in {told}",
                    "a model whose weights keep their number format while it trains",
                )
                return
