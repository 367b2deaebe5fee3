"""Run a user's model on arrays: inputs from .npy or .safetensors, outputs to .npy."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.api.load import load, load_model
from whet.base.errors import UsageError, WhetError, first_line
from whet.run import durable
from whet.run.folder import Run

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INPUT_SUFFIXES = (".npy", ".safetensors")
_TRY = "--model FILE.py:make_model inputs.npy --out predictions.npy"


def predict_arrays(
    run: Run, word: str, file: Path, out: Path, *, which: str = "best", batch: int = 64, device: str = "auto"
) -> tuple[int, ...]:
    """Write the outputs of the model for every row of a file, in order, and return their shape.

    A .npy file is the model's only input. The tensors of a .safetensors file are passed by name.
    """
    import numpy as np
    import torch

    from whet.device.open import open_device

    inputs = read_inputs(file)
    out = _checked_output(out, run)
    model = load_model(word)
    load(run, model, int(which) if which.isdecimal() else which).eval()  # type: ignore[arg-type]
    selected = open_device("cuda", on_failure="cpu") if device == "auto" else open_device(device)
    model.to(selected.device.torch_device)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    rows = len(next(iter(inputs.values())))
    parts = []
    with torch.inference_mode():
        for start in range(0, rows, batch):
            named = {
                name: _placed(t[start : start + batch], selected.device.torch_device, dtype)
                for name, t in inputs.items()
            }
            returned = model(**named) if "" not in named else model(named[""])
            parts.append(_output(returned).float().cpu().numpy())
    result = np.concatenate(parts)
    buffer = io.BytesIO()
    np.save(buffer, result, allow_pickle=False)
    durable.write_file(out, data=buffer.getvalue())
    return tuple(result.shape)


def read_inputs(file: Path) -> "dict[str, Tensor]":
    """Return the tensors of a file by name. The array of a .npy file has an empty name. Nothing is unpickled."""
    import numpy as np
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if file.suffix not in INPUT_SUFFIXES:
        raise UsageError("inputs must be a .npy or .safetensors file", got=str(file), try_=_TRY)
    if not file.is_file():
        raise UsageError("no such file", got=str(file), try_=_TRY)
    try:
        tensors = (
            {"": torch.from_numpy(np.load(file, allow_pickle=False))} if file.suffix == ".npy" else load_file(file)
        )
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise WhetError(f"{file} cannot be read", got=first_line(error), try_=_TRY) from None
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors.values()}
    if len(lengths) != 1 or 0 in lengths:
        got = ", ".join(f"{name or 'array'} {tuple(tensor.shape)}" for name, tensor in tensors.items()) or "no tensor"
        raise UsageError("the inputs need one row for each sample", got=got, try_="arrays of equal length")
    return tensors


def _checked_output(out: Path, run: Run) -> Path:
    out = out.expanduser().absolute()
    if out.suffix != ".npy":
        raise UsageError("--out must end in .npy", got=str(out), try_="--out predictions.npy")
    if out.exists():
        raise UsageError("the output file exists already", got=str(out), try_="another --out FILE.npy")
    if out.resolve().is_relative_to(run.path.resolve()):
        raise UsageError("predictions cannot be written into the run", got=str(out), try_="--out FILE.npy outside it")
    durable.check_writable(out)
    return out


def _placed(tensor: "Tensor", device: "torch.device", dtype: "torch.dtype") -> "Tensor":
    # Convert to the model's dtype: NumPy arrays are float64 by default.
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)


def _output(returned: Any) -> "Tensor":
    """Return the tensor in the output of a model: the output itself, the logits, or the first element."""
    from torch import Tensor

    if isinstance(returned, Mapping):
        returned = returned.get("logits", next(iter(returned.values()), None))
    elif not isinstance(returned, Tensor | tuple | list):
        returned = getattr(returned, "logits", None)
    first = returned[0] if isinstance(returned, tuple | list) and returned else returned
    if not isinstance(first, Tensor) or first.dim() == 0:
        raise UsageError(
            "the model returns no tensor with a row for each sample",
            got=type(first).__name__,
            try_="a model whose forward returns a tensor; or your own code after whet.load(run, model)",
        )
    return first
