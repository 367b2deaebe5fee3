"""A program: PyTorch's own database of operators and sample inputs, on the CPU and on the virtual Mac, side by side.

    operator_database.py all|fifth|NAME,NAME... [KERNEL to compute wrongly on purpose]...

`fifth` is every fifth operator of each kind and namespace, always the same ones.

Prints one JSON object: the verdict on each operator, which is "equal", "refused: TEXT" or "wrong: WHY".
"""

import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from whet.device import virtual_mac
from whet.device.virtual_mac.native import native

virtual_mac.install("m3-max-64gb")

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402 - after the Mac is there
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

REFUSALS = (
    (NotImplementedError, "The operator 'aten::"),
    (TypeError, "Cannot convert a MPS Tensor to float64 dtype"),
    (RuntimeError, "Adaptive pool MPS: input sizes must be divisible"),
)
"""Error texts of MPS."""


class RefusedError(Exception):
    """MPS raised one of its own errors."""


def on_mps(value: Any) -> Any:
    """The same on the device; of a view, with all of the memory that it is a view of."""
    if isinstance(value, torch.Tensor):
        is_dense = value.layout == torch.strided and not (value.is_conj() or value.is_neg())
        moved = _with_whole_memory(value.detach()) if is_dense else value.detach().to("mps")
        return moved.requires_grad_(value.requires_grad)
    return "mps" if value == "cpu" or isinstance(value, torch.device) else value


def _with_whole_memory(value: torch.Tensor) -> torch.Tensor:
    num_values = value.untyped_storage().nbytes() // value.element_size()
    whole = value.as_strided((num_values,), (1,), 0).to("mps")
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def results(op: Any, args: Any, kwargs: Any, cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the operator returns, then the gradients of its inputs; `cotangents` are made by who needs them first."""
    result = tensors(op(*args, **kwargs))
    inputs = [value for value in tensors((args, kwargs)) if value.requires_grad]
    outputs = [value for value in result if value.requires_grad]
    if not (inputs and outputs):
        return result
    if not cotangents:
        cotangents += [torch.rand_like(value.to_dense() if value.is_sparse else value) for value in outputs]
    given = [value.to(outputs[0].device) for value in cotangents]
    given = [value.to_sparse() if out.is_sparse else value for value, out in zip(given, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
    return result + [grad for grad in grads if grad is not None]


def seed_alike(seed: int) -> torch.Generator:
    """Seeds both generators so that the first draw of an operator is the same on both devices."""
    torch.mps.manual_seed(seed)
    return torch.default_generator.manual_seed(native().seed_of_next_draw())


def has_no_values(name: str) -> bool:
    """Return whether the results are uninitialized memory."""
    return name.startswith(("empty", "new_empty"))


def compare(op: Any, sample: Any) -> bool:
    """Return whether there was something to compare; raise for a difference."""
    args, cotangents = (sample.input, *sample.args), []
    seed_alike(0)
    try:
        expected = results(op, args, sample.kwargs, cotangents)
    except Exception:
        return False  # the sample is not for the CPU
    seed_alike(0)
    try:
        result = results(op, tree_map(on_mps, args), tree_map(on_mps, sample.kwargs), cotangents)
    except Exception as error:
        for kind, text in REFUSALS:
            if type(error) is kind and str(error).startswith(text):
                raise RefusedError(str(error)[:90]) from None
        raise
    assert len(result) == len(expected), f"{len(result)} results for {len(expected)}"
    for one, other in zip(result, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), f"{one.shape} {one.dtype} for {other}"
        if not has_no_values(op.name):
            torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), rtol=1e-4, atol=1e-4, equal_nan=True)
    return True


def judge(op: Any) -> str | None:
    """None where the database has nothing to compare on a CPU."""
    dtype = next((one for one in (torch.float32, torch.int64, torch.bool) if op.supports_dtype(one, "cpu")), None)
    has_grad = dtype is torch.float32 and op.supports_autograd
    if dtype is None:
        return None
    num_compared, refusal = 0, None
    for sample in op.sample_inputs("cpu", dtype, requires_grad=has_grad):
        try:
            num_compared += compare(op, sample)
        except RefusedError as error:
            refusal = f"refused: {error}"
        except Exception as error:
            return f"wrong: {type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"
    return refusal or ("equal" if num_compared else None)


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def every_fifth() -> set[str]:
    kinds = defaultdict(list)
    for op in op_db:
        kinds[type(op), op.name.rpartition(".")[0]].append(name_of(op))
    return {name for names in kinds.values() for name in names[::5]}


def verdicts(asked: set[str]) -> Iterator[tuple[str, str]]:
    chosen = asked | every_fifth() if "fifth" in asked else asked
    for op in op_db:
        verdict = judge(op) if "all" in asked or name_of(op) in chosen else None
        if verdict is not None:
            yield name_of(op), verdict


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed = seed_alike  # the database seeds in the middle of the operators that draw
    for wrong in sys.argv[2:]:
        virtual_mac.simulate(virtual_mac.Miscompute(wrong, relative_error=0.01))
    print(json.dumps(dict(verdicts(set(sys.argv[1].split(","))))))
