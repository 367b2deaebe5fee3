"""What a ported run did in each step, so that the original loop can be given the same samples and random numbers."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRecord:
    """The samples of one step."""

    ids: list[int]
    epoch: int
    after: tuple[int, int]
    """The position after the batch: epoch and samples."""


@dataclass(kw_only=True, slots=True)
class PortRecord:
    """The steps of a run. A resumed run has those after `first_step`."""

    seed: int = 0
    dataset_size: int | None = None
    first_step: int = 0
    batches: list[BatchRecord] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rng: list[Tensor] = field(default_factory=list)
    """The state of torch's generator before each step."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The final weights, buffers and optimizer state."""

    def save(self, path: Path) -> None:
        """Write the record as JSON and safetensors."""
        path.mkdir(parents=True, exist_ok=True)
        facts = {"seed": self.seed, "dataset_size": self.dataset_size, "first_step": self.first_step}
        facts |= {"batches": [asdict(batch) for batch in self.batches], "losses": self.losses}
        save_file({"rng": torch.stack(self.rng)} if self.rng else {}, path / "rng.safetensors")
        save_file(self.tensors, path / "final.safetensors")
        (path / "steps.json").write_text(json.dumps(facts), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "PortRecord":
        """Read what `save` wrote."""
        facts = json.loads((path / "steps.json").read_text(encoding="utf-8"))
        facts["batches"] = [BatchRecord(**batch) for batch in facts["batches"]]
        rng = load_file(path / "rng.safetensors").get("rng")
        return cls(
            **facts,
            rng=[] if rng is None else [state.clone() for state in rng],
            tensors=load_file(path / "final.safetensors"),
        )


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of all tensors of a nested state, with names."""
    if isinstance(value, Tensor):
        yield name, value.detach().cpu().clone().contiguous()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from named_tensors(item, f"{name}/{number}")
