"""Contrastive learning: each sample is compared with every other sample of its batch, so the batch must not be split.

python examples/contrastive.py runs/contrastive
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import whet


class TwoViews(Dataset):
    """Two noisy views of the same point. The noise is drawn anew in each epoch, from the seed of the sample."""

    def __init__(self, size):
        self.points = torch.randn(size, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return {"first": point + 0.3 * torch.randn(16), "second": point + 0.3 * torch.randn(16)}


def info_nce(encoder, batch):
    """Return the InfoNCE loss: the second view of a sample must be closer to its first view than those of others."""
    first = nn.functional.normalize(encoder(batch["first"]), dim=1)
    second = nn.functional.normalize(encoder(batch["second"]), dim=1)
    similarity = first @ second.T / 0.1
    same = torch.arange(len(similarity), device=similarity.device)
    # A dict may hold more scalars than the loss. They are logged with each step.
    return {
        "loss": nn.functional.cross_entropy(similarity, same),
        "matched": (similarity.argmax(1) == same).float().mean(),
    }


def main(run):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    result = whet.train(
        encoder,
        DataLoader(TwoViews(512), batch_size=64, shuffle=True, drop_last=True),
        loss=lambda batch: info_nce(encoder, batch),
        optimizer=torch.optim.AdamW(encoder.parameters(), lr=3e-3),
        # With half of a batch there are half as many others to tell apart: another loss. If memory is short, whet
        # recomputes activations instead of splitting the batch.
        split_batch=False,
        epochs=10,
        run=run,
    )
    report = whet.summarize(result.path)
    print(f"{result.reason}: loss {report.first_loss:.2f} -> {report.loss:.2f}")


# Data workers import this program where they are spawned, as on macOS: without this line each would train again.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/contrastive")
