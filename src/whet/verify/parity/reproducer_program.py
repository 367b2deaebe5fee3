"""The text of a program that shows a wrong operator; what is between braces is filled in."""

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
