"""Shared by the plain PyTorch loops: precision, optimizer, schedule and data loading."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from side_by_side.spec import Spec
from side_by_side.workload import PeerWorkload, Repeated


def autocast(spec: Spec) -> AbstractContextManager[Any]:
    return torch.autocast(spec.device, torch.bfloat16, enabled=spec.is_half)


def adamw(model: nn.Module, workload: PeerWorkload, *, fused: bool | None = None) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=workload.lr, weight_decay=0.0, fused=fused)


def linear(optimizer: Optimizer, spec: Spec) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / spec.total_steps))


def loader(workload: PeerWorkload, spec: Spec, *, is_fixed: bool = False) -> DataLoader[Any]:
    collate = workload.collate_fixed if is_fixed and workload.collate_fixed is not None else workload.collate
    return DataLoader(
        Repeated(workload, total_steps=spec.total_steps),
        batch_size=workload.batch,
        collate_fn=collate,
        num_workers=spec.workers,
        pin_memory=spec.device == "cuda",
        persistent_workers=spec.workers > 0,
    )


def to_device(batches: Any, device: str) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
