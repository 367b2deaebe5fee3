"""A program of its own that shows one wrong operator: torch and the standard library, nothing of whet."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from whet.base.errors import UsageError
from whet.run.durable import write_file
from whet.verify.parity.replay import Layout, WrongCall, changed_arguments
from whet.verify.parity.reproducer_program import FROM_CPU, FROM_FORMULA, FUSED, PLAIN, PROGRAM, READER

MARK = "Written by whet compare"
_FEW = 200
"""So many numbers may stand in the program itself; more go to a file beside it."""


@dataclass
class _Tensors:
    """What is written out: the memory of every tensor, and how to see the tensor in it."""

    memory: dict[str, Tensor] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    on_cpu: list[str] = field(default_factory=list)

    def add(self, values: Tensor, layout: Layout, name: str) -> None:
        flat, layout = _memory(values, layout)
        self.memory[name] = flat
        self.on_cpu += [name] if layout.is_on_cpu else []
        size, stride, offset = layout.size, layout.stride, layout.offset
        self.lines.append(f'    "{name}": lambda flat: flat.as_strided({size}, {stride}, {offset}),')


def refuse_foreign(path: Path) -> None:
    """Only a program of ours is replaced."""
    if path.suffix != ".py" or not path.parent.is_dir() or path.is_dir():
        raise UsageError("the program cannot be written there", got=str(path), try_="FILE.py in a folder that exists")
    if path.exists() and MARK not in path.read_text(errors="replace")[:500]:
        raise UsageError("this file is not one that whet compare wrote", got=str(path), try_="--out another.py")
    beside = path.with_suffix(".safetensors")
    if beside.exists() and not path.exists():
        raise UsageError("the program's numbers would replace a file", got=str(beside), try_="--out another.py")


def write_reproducer(call: WrongCall, path: Path, *, device: str) -> Path:
    """Writes the program, and its numbers beside it if they are many."""
    refuse_foreign(path)
    tensors, layouts = _Tensors(), iter(call.layouts)

    def text(value: Any) -> str:
        return _text(value, tensors, layouts)

    args = ", ".join(text(value) for value in call.args)
    words = ", ".join(f"{name}={text(value)}" for name, value in call.kwargs.items())
    if call.is_formula:
        for index, tensor in enumerate(call.expected):
            plain = tensor.float().contiguous()
            tensors.add(plain, Layout(size=tuple(plain.shape), stride=plain.stride(), offset=0), f"expected{index}")
    count = sum(tensor.numel() for tensor in tensors.memory.values())
    beside = path.with_suffix(".safetensors")
    if count > _FEW:
        write_file(beside, data=save(tensors.memory))
        memory = f"read(Path(__file__).with_name({beside.name!r}))"
    else:
        rows = [f'    "{name}": {_inline(tensor)},' for name, tensor in tensors.memory.items()]
        memory = "\n".join(["{", *rows, "}"])
    space, _, name = call.func.name().partition("::")
    operator = f"torch.ops.{space}.{name.partition('.')[0]}.{name.partition('.')[2] or 'default'}"
    is_fused = call.func.name().startswith("aten::_fused_")
    is_long = count > _FEW
    script = PROGRAM.format(
        mark=MARK,
        name=call.func.name(),
        device=device,
        version=torch.__version__,
        bounds=text(call.bounds),
        floors=text(call.floors),
        reader=READER if is_long else "",
        imports="import json\nimport struct\n" if is_long else "",
        more="from pathlib import Path\n" if is_long else "",
        memory=memory,
        views="\n".join(["{", *tensors.lines, "}"]),
        on_cpu=tensors.on_cpu,
        calling=(FUSED if is_fused else PLAIN).format(operator=operator),
        args=args,
        words=words,
        changed=", ".join(_changed_places(call)),
        expected=FROM_FORMULA if call.is_formula else FROM_CPU,
    )
    write_file(path, data=script.encode())
    return path


def _text(value: Any, tensors: _Tensors, layouts: Any) -> str:
    if isinstance(value, Tensor):
        name = f"t{len(tensors.memory)}"
        tensors.add(value, next(layouts), name)
        return f'made["{name}"]'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(one, tensors, layouts) for one in value) + "]"
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, float):
        return f'float("{value!r}")'
    # torch's own dtypes, layouts and memory formats, whole numbers, words and None read as they are written.
    return repr(value)


def _changed_places(call: WrongCall) -> list[str]:
    """Where the arguments are that the operator writes to."""
    changed = changed_arguments(call.func, call.args, call.kwargs)
    places = [*(f"args[{index}]" for index in range(len(call.args))), *(f"words[{name!r}]" for name in call.kwargs)]
    values = [*call.args, *call.kwargs.values()]
    return [place for place, value in zip(places, values, strict=True) if any(value is one for one in changed)]


def _memory(values: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """A stretch of memory in which the tensor lies as it did; contiguous where its elements overlapped."""
    kept = values.detach()
    # What was expanded lies in memory once.
    for dim, (size, stride) in enumerate(zip(layout.size, layout.stride, strict=True)):
        if stride == 0 and size > 1:
            kept = kept.narrow(dim, 0, 1)
    length = layout.offset + 1 + sum((s - 1) * step for s, step in zip(kept.shape, layout.stride, strict=True))
    if kept.numel() == 0:
        return kept.reshape(-1).clone(), Layout(
            size=layout.size, stride=layout.stride, offset=0, is_on_cpu=layout.is_on_cpu
        )
    flat = torch.zeros(length, dtype=values.dtype)
    try:
        flat.as_strided(kept.shape, layout.stride, layout.offset).copy_(kept)
    except RuntimeError:
        plain = values.contiguous()
        return plain.reshape(-1).clone(), Layout(
            size=layout.size, stride=plain.stride(), offset=0, is_on_cpu=layout.is_on_cpu
        )
    return flat, layout


def _inline(tensor: Tensor) -> str:
    numbers = [f'float("{n!r}")' if isinstance(n, float) and n - n != 0 else repr(n) for n in tensor.tolist()]
    return f"torch.tensor([{', '.join(numbers)}], dtype={tensor.dtype})"
