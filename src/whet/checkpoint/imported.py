"""What lies in a folder that `whet import` made, and does it fit this model?"""

from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError, nearest
from whet.base.record import Record
from whet.checkpoint import plain_json
from whet.checkpoint.layout import read_tensors
from whet.checkpoint.manifest import File, Size
from whet.checkpoint.snapshot import describe_names
from whet.checkpoint.vouched import read_vouched

FORMAT_VERSION = 1
WEIGHTS, ABOUT = "weights.safetensors", "import.json"


class Taken(Record):
    dtype: str
    shape: tuple[Size, ...]


class Import(Record):
    """What import.json says."""

    format_version: int
    source: str
    """The file's name."""
    source_bytes: Size
    source_sha256: str
    key: str
    """Where in the file the weights lay; empty for its top."""
    wrapper: str
    """What every name began with, and does not any more: module. (DDP), _orig_mod. (torch.compile)."""
    size: Size
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of the weights file."""
    taken: dict[str, Taken]
    left_out: dict[str, str]
    """By name: why, or what it was."""


def is_import(path: Path) -> bool:
    """Whether the folder was made by `whet import`."""
    return (path / ABOUT).is_file()


def read_import(path: Path) -> dict[str, Tensor]:
    """The tensors in such a folder, every byte checked."""
    try:
        about = Import.from_json(plain_json.load_any_order(read_vouched(path / ABOUT)), where=path / ABOUT)
    except ValueError as error:
        raise WhetError(
            "the imported weights are damaged", got=f"{path / ABOUT}: {error}", try_="import again"
        ) from None
    if about.format_version != FORMAT_VERSION:
        got = f"{path}: format {about.format_version}; this whet reads {FORMAT_VERSION}"
        raise WhetError("the imported weights have another format", got=got, try_="import again")
    data = read_vouched(path / WEIGHTS, vouched=File(size=about.size, sha256=about.sha256))
    try:
        return read_tensors(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, RuntimeError) as error:
        raise WhetError("the imported weights are damaged", got=f"{path}: {error}", try_="import again") from None


@torch.no_grad()
def put_into(model: nn.Module, tensors: dict[str, Tensor], *, where: Path) -> None:
    """Copies tensors into a model by name; floating-point numbers become the model's own kind.

    A name that means the same tensor as another in this model may be left out or given, as state_dict does.
    """
    wanted = dict(model.state_dict())
    _, tied = describe_names(model)
    for names in tied:
        given = [name for name in names if name in tensors]
        for name in names:
            if name in wanted and name not in given[:1]:
                del wanted[name]
                tensors = {n: t for n, t in tensors.items() if n != name}
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        near = {name: nearest(name, extra) for name in missing[:3]}
        hints = [f"{theirs!r} is perhaps this model's {ours!r}" for ours, theirs in near.items() if theirs]
        raise UsageError(
            "the imported weights do not fit this model",
            got=f"{len(missing)} missing ({', '.join(missing[:3])}), {len(extra)} unknown ({', '.join(extra[:3])})",
            try_="; ".join(hints) or f"a model with the names listed in {where / ABOUT}",
        )
    for name, target in wanted.items():
        value = tensors[name]
        is_alike = value.dtype == target.dtype or (value.is_floating_point() and target.is_floating_point())
        if target.shape != value.shape or not is_alike:
            got = f"{tuple(value.shape)} {value.dtype}; the model has {tuple(target.shape)} {target.dtype}"
            raise UsageError(f"the imported weights do not fit {name!r}", got=got, try_="the model they were made with")
        target.copy_(value)
