"""Write a standalone program that reproduces one wrong operator with torch alone."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from whet.base.errors import UsageError
from whet.run.durable import write_file
from whet.verify.parity.replay import TensorLayout, WrongOperatorCall, changed_arguments

READER = '''

def read(path):
    """The tensors of a .safetensors file."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    types = {{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
             "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
             "BOOL": torch.bool}}
    tensors = {{}}
    for name, about in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = about["data_offsets"]
            part = data[8 + length + start : 8 + length + end]
            dtype = types[about["dtype"]]
            tensors[name] = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
    return tensors
'''.replace("{{", "{").replace("}}", "}")

PLAIN = """    args, words = arguments(made, device)
    returned = {operator}(*args, **words)
    found = [tensor.detach().cpu() for tensor in tensors_of([returned, changed(args, words)])]
    # Whole numbers beside values tell where a value was found; equal values are found in any order.
    return [tensor for tensor in found if tensor.is_floating_point()] or found"""

FUSED = """    args, words = arguments(made, device)
    before = [tensor.detach().cpu().double().clone() for tensor in tensors_of(changed(args, words))]
    {operator}(*args, **words)
    after = [tensor.detach().cpu().double() for tensor in tensors_of(changed(args, words))]
    # The change counts: it is small beside the weights.
    return [new - old for new, old in zip(after, before)]"""

FROM_CPU = """    try:
        expected = run("cpu", wide=True)
        if not expected[0].is_floating_point():
            expected = run("cpu")
    except (RuntimeError, NotImplementedError):
        expected = run("cpu")"""

FROM_FORMULA = """    # The CPU has no such operator: what it should give was computed by a formula in float64.
    expected = [VIEWS[name](MEMORY[name]) for name in MEMORY if name.startswith("expected")]"""

PROGRAM = '''"""{name} on a device against the CPU, from the same inputs. {mark}; needs torch only.

Found with torch {version}. `python THIS.py [{device}]`: exit code 1 if they differ, 0 if they agree.
"""

{imports}import sys
{more}
import torch

BOUNDS = {bounds}
FLOORS = {floors}
{reader}

MEMORY = {memory}
# How each tensor lay in its memory.
VIEWS = {views}
# Tensors that were on the CPU all along.
ON_CPU = {on_cpu}


def run(device, wide=False):
    """What the operator gives on a device: returned tensors and changed arguments, on the CPU."""
    made = {{}}
    for name, flat in MEMORY.items():
        flat = flat.double() if wide and flat.is_floating_point() else flat.clone()
        made[name] = VIEWS[name](flat.to("cpu" if name in ON_CPU else device))
{calling}


def arguments(made, device):
    return [{args}], dict({words})


def changed(args, words):
    """The arguments that the operator writes to."""
    return [{changed}]


def tensors_of(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for value in tree for leaf in tensors_of(value)] if isinstance(tree, (list, tuple)) else []


def error(found, expected, floor):
    """The largest difference, relative to the largest value that was expected."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    found, expected = found.double(), expected.double()
    is_number = expected.isfinite()
    if not torch.equal(found[~is_number].nan_to_num(nan=0.5), expected[~is_number].nan_to_num(nan=0.5)):
        return float("inf")
    if not is_number.any():
        return 0.0
    worst = float((found - expected)[is_number].abs().max())
    scale = max(float(expected[is_number].abs().max()), floor, 1e-30)
    return worst / scale if worst == worst else float("inf")


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "{device}"
{expected}
    found = run(device)
    differs = False
    for index, (ours, right) in enumerate(zip(found, expected)):
        gap = error(ours, right, FLOORS[index])
        is_wrong = not gap <= BOUNDS[index]
        differs = differs or is_wrong
        print(f"result {{index}}, {{tuple(right.shape)}}: relative error {{gap:.3g}}, bound {{BOUNDS[index]:.3g}}"
              + (" <- differs" if is_wrong else ""))
        print(f"  cpu       {{right.flatten()[:6].tolist()}}")
        print(f"  {{device:9}} {{ours.flatten()[:6].tolist()}}")
    print("{name} " + ("differs" if differs else "agrees"))
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
'''


MARKER = "Written by whet compare"
_MAX_INLINE_NUMBERS = 200
"""So many numbers may stand in the program itself; more go to a file beside it."""


@dataclass
class _Tensors:
    """What is written out: the memory of every tensor, and how to see the tensor in it."""

    memory: dict[str, Tensor] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    on_cpu: list[str] = field(default_factory=list)

    def add(self, values: Tensor, layout: TensorLayout, name: str) -> None:
        flat, layout = _memory(values, layout)
        self.memory[name] = flat
        self.on_cpu += [name] if layout.is_on_cpu else []
        size, stride, offset = layout.size, layout.stride, layout.offset
        self.lines.append(f'    "{name}": lambda flat: flat.as_strided({size}, {stride}, {offset}),')


def check_overwrite(path: Path) -> None:
    """Only a program of ours is replaced."""
    if path.suffix != ".py" or not path.parent.is_dir() or path.is_dir():
        raise UsageError("the program cannot be written there", got=str(path), try_="FILE.py in a folder that exists")
    if path.exists() and MARKER not in path.read_text(errors="replace")[:500]:
        raise UsageError("this file is not one that whet compare wrote", got=str(path), try_="--out another.py")
    beside = path.with_suffix(".safetensors")
    if beside.exists() and not path.exists():
        raise UsageError("the program's numbers would replace a file", got=str(beside), try_="--out another.py")


def write_reproducer(call: WrongOperatorCall, path: Path, *, device: str) -> Path:
    """Writes the program, and its numbers beside it if they are many."""
    check_overwrite(path)
    tensors, layouts = _Tensors(), iter(call.layouts)

    def text(value: Any) -> str:
        return _text(value, tensors, layouts)

    args = ", ".join(text(value) for value in call.args)
    words = ", ".join(f"{name}={text(value)}" for name, value in call.kwargs.items())
    if call.is_formula:
        for index, tensor in enumerate(call.expected):
            plain = tensor.float().contiguous()
            tensors.add(
                plain, TensorLayout(size=tuple(plain.shape), stride=plain.stride(), offset=0), f"expected{index}"
            )
    count = sum(tensor.numel() for tensor in tensors.memory.values())
    beside = path.with_suffix(".safetensors")
    if count > _MAX_INLINE_NUMBERS:
        write_file(beside, data=save(tensors.memory))
        memory = f"read(Path(__file__).with_name({beside.name!r}))"
    else:
        rows = [f'    "{name}": {_inline(tensor)},' for name, tensor in tensors.memory.items()]
        memory = "\n".join(["{", *rows, "}"])
    space, _, name = call.func.name().partition("::")
    operator = f"torch.ops.{space}.{name.partition('.')[0]}.{name.partition('.')[2] or 'default'}"
    is_fused = call.func.name().startswith("aten::_fused_")
    is_long = count > _MAX_INLINE_NUMBERS
    script = PROGRAM.format(
        mark=MARKER,
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


def _changed_places(call: WrongOperatorCall) -> list[str]:
    """Where the arguments are that the operator writes to."""
    changed = changed_arguments(call.func, call.args, call.kwargs)
    places = [*(f"args[{index}]" for index in range(len(call.args))), *(f"words[{name!r}]" for name in call.kwargs)]
    values = [*call.args, *call.kwargs.values()]
    return [place for place, value in zip(places, values, strict=True) if any(value is one for one in changed)]


def _memory(values: Tensor, layout: TensorLayout) -> tuple[Tensor, TensorLayout]:
    """A stretch of memory in which the tensor lies as it did; contiguous where its elements overlapped."""
    kept = values.detach()
    # What was expanded lies in memory once.
    for dim, (size, stride) in enumerate(zip(layout.size, layout.stride, strict=True)):
        if stride == 0 and size > 1:
            kept = kept.narrow(dim, 0, 1)
    length = layout.offset + 1 + sum((s - 1) * step for s, step in zip(kept.shape, layout.stride, strict=True))
    if kept.numel() == 0:
        return kept.reshape(-1).clone(), TensorLayout(
            size=layout.size, stride=layout.stride, offset=0, is_on_cpu=layout.is_on_cpu
        )
    flat = torch.zeros(length, dtype=values.dtype)
    try:
        flat.as_strided(kept.shape, layout.stride, layout.offset).copy_(kept)
    except RuntimeError:
        plain = values.contiguous()
        return plain.reshape(-1).clone(), TensorLayout(
            size=layout.size, stride=plain.stride(), offset=0, is_on_cpu=layout.is_on_cpu
        )
    return flat, layout


def _inline(tensor: Tensor) -> str:
    numbers = [f'float("{n!r}")' if isinstance(n, float) and n - n != 0 else repr(n) for n in tensor.tolist()]
    return f"torch.tensor([{', '.join(numbers)}], dtype={tensor.dtype})"
