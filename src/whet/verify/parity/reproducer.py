"""Write a standalone program that reproduces a wrong operator. It requires only torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from whet.base.errors import UsageError
from whet.run.durable import write_file
from whet.verify.parity.replay import TensorLayout, WrongOperatorCall, written_arguments

READER = '''

def read(path):
    """Return the tensors of a .safetensors file."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    types = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
             "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
             "BOOL": torch.bool}
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            part = data[8 + length + start : 8 + length + end]
            dtype = types[entry["dtype"]]
            tensors[name] = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
    return tensors
'''

PLAIN = """    args, kwargs = arguments(made, device)
    returned = {operator}(*args, **kwargs)
    tensors = [tensor.detach().cpu() for tensor in tensors_of([returned, written(args, kwargs)])]
    # Integers beside values are indices; the order of equal values is not defined.
    return [tensor for tensor in tensors if tensor.is_floating_point()] or tensors"""

FUSED = """    args, kwargs = arguments(made, device)
    before = [tensor.detach().cpu().double().clone() for tensor in tensors_of(written(args, kwargs))]
    {operator}(*args, **kwargs)
    after = [tensor.detach().cpu().double() for tensor in tensors_of(written(args, kwargs))]
    # Compare the change, which is small relative to the weights.
    return [new - old for new, old in zip(after, before)]"""

FROM_CPU = """    try:
        expected = run("cpu", float64=True)
        if not expected[0].is_floating_point():
            expected = run("cpu")
    except (RuntimeError, NotImplementedError):
        expected = run("cpu")"""

FROM_FORMULA = """    # The CPU has no such operator: the expected result was computed by a formula in float64.
    expected = [VIEWS[name](MEMORY[name]) for name in MEMORY if name.startswith("expected")]"""

PROGRAM = '''"""Compare {name} on a device with the CPU, from the same inputs. {marker}; needs torch only.

Found with torch {version}. `python THIS.py [{device}]`: exit code 1 if the results differ, 0 if they agree.
"""

{imports}import sys
{more}
import torch

BOUNDS = {bounds}
FLOORS = {floors}
{reader}

MEMORY = {memory}
# The memory layout of each tensor.
VIEWS = {views}
# Tensors that were on the CPU in the original call.
ON_CPU = {on_cpu}


def run(device, float64=False):
    """Run the operator on a device; return its results and written arguments, on the CPU."""
    made = {{}}
    for name, flat in MEMORY.items():
        flat = flat.double() if float64 and flat.is_floating_point() else flat.clone()
        made[name] = VIEWS[name](flat.to("cpu" if name in ON_CPU else device))
{calling}


def arguments(made, device):
    return [{args}], dict({kwargs})


def written(args, kwargs):
    """Return the arguments that the operator writes to."""
    return [{written}]


def tensors_of(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for value in tree for leaf in tensors_of(value)] if isinstance(tree, (list, tuple)) else []


def error(actual, expected, floor):
    """Return the largest difference, relative to the largest expected value."""
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(actual[~finite].nan_to_num(nan=0.5), expected[~finite].nan_to_num(nan=0.5)):
        return float("inf")
    if not finite.any():
        return 0.0
    worst = float((actual - expected)[finite].abs().max())
    scale = max(float(expected[finite].abs().max()), floor, 1e-30)
    return worst / scale if worst == worst else float("inf")


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "{device}"
{expected}
    actual = run(device)
    differs = False
    for index, (value, reference) in enumerate(zip(actual, expected)):
        gap = error(value, reference, FLOORS[index])
        is_wrong = not gap <= BOUNDS[index]
        differs = differs or is_wrong
        print(f"result {{index}}, {{tuple(reference.shape)}}: relative error {{gap:.3g}}, bound {{BOUNDS[index]:.3g}}"
              + (" <- differs" if is_wrong else ""))
        print(f"  cpu       {{reference.flatten()[:6].tolist()}}")
        print(f"  {{device:9}} {{value.flatten()[:6].tolist()}}")
    print("{name} " + ("differs" if differs else "agrees"))
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
'''


MARKER = "Written by whet compare"
# Maximum number of values in the program itself. If there are more, they are written to a file next to it.
_MAX_INLINE_NUMBERS = 200


@dataclass
class _Tensors:
    """The flat memory of each tensor, and the code of a view that restores its layout."""

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
    """Raise UsageError if the path cannot be written, or is a file that whet compare did not write."""
    if path.suffix != ".py" or not path.parent.is_dir() or path.is_dir():
        raise UsageError(
            "the reproducer cannot be written there", got=str(path), try_="--out FILE.py in an existing folder"
        )
    if path.exists() and MARKER not in path.read_text(errors="replace")[:500]:
        raise UsageError("the file was not written by whet compare", got=str(path), try_="--out another.py")
    data_path = path.with_suffix(".safetensors")
    if data_path.exists() and not path.exists():
        raise UsageError("the reproducer's data would replace a file", got=str(data_path), try_="--out another.py")


def write_reproducer(call: WrongOperatorCall, path: Path, *, device: str) -> Path:
    """Write the program and return its path. Many values are written to a .safetensors file next to it."""
    check_overwrite(path)
    tensors, layouts = _Tensors(), iter(call.layouts)

    def text(value: Any) -> str:
        return _text(value, tensors, layouts)

    args = ", ".join(text(value) for value in call.args)
    kwargs = ", ".join(f"{name}={text(value)}" for name, value in call.kwargs.items())
    if call.is_formula:
        for index, tensor in enumerate(call.expected):
            plain = tensor.float().contiguous()
            tensors.add(
                plain, TensorLayout(size=tuple(plain.shape), stride=plain.stride(), offset=0), f"expected{index}"
            )
    count = sum(tensor.numel() for tensor in tensors.memory.values())
    data_path = path.with_suffix(".safetensors")
    if count > _MAX_INLINE_NUMBERS:
        write_file(data_path, data=save(tensors.memory))
        memory = f"read(Path(__file__).with_name({data_path.name!r}))"
    else:
        rows = [f'    "{name}": {_inline(tensor)},' for name, tensor in tensors.memory.items()]
        memory = "\n".join(["{", *rows, "}"])
    space, _, name = call.func.name().partition("::")
    operator = f"torch.ops.{space}.{name.partition('.')[0]}.{name.partition('.')[2] or 'default'}"
    is_fused = call.func.name().startswith("aten::_fused_")
    is_long = count > _MAX_INLINE_NUMBERS
    script = PROGRAM.format(
        marker=MARKER,
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
        kwargs=kwargs,
        written=", ".join(_written_expressions(call)),
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
    # The repr of dtypes, layouts, memory formats, integers, strings and None is valid code.
    return repr(value)


def _written_expressions(call: WrongOperatorCall) -> list[str]:
    """Return the code of the arguments that the operator writes to."""
    written = written_arguments(call.func, call.args, call.kwargs)
    expressions = [
        *(f"args[{index}]" for index in range(len(call.args))),
        *(f"kwargs[{name!r}]" for name in call.kwargs),
    ]
    values = [*call.args, *call.kwargs.values()]
    return [text for text, value in zip(expressions, values, strict=True) if any(value is one for one in written)]


def _memory(values: Tensor, layout: TensorLayout) -> tuple[Tensor, TensorLayout]:
    """Return flat memory that contains the tensor in its original layout, and that layout.

    If elements of the original layout overlap, use a contiguous one instead.
    """
    kept = values.detach()
    # An expanded dimension occupies memory only once.
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
