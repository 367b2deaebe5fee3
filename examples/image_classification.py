"""Classify images: a DataLoader, random augmentation in the dataset, a validation loader, accuracy and OneCycleLR.

python examples/image_classification.py runs/images      # Ctrl-C saves; the same command resumes
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import whet

EPOCHS = 4


class Stripes(Dataset):
    """Noisy images of 16 x 16 pixels. The classes are horizontal stripes, vertical stripes and squares."""

    def __init__(self, size, *, seed, augment):
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (size,), generator=draw)
        rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
        squares = (rows // 4 + columns // 4) % 2
        shapes = torch.stack([rows // 2 % 2, columns // 2 % 2, squares]).float()
        self.images = shapes[self.labels][:, None] + torch.randn(size, 1, 16, 16, generator=draw)
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            # Each sample has its own seed, from the run's seed and the epoch: a resumed run draws the same shifts.
            shift = torch.randint(-3, 4, (2,)).tolist()
            image = image.roll(shift, dims=(1, 2))
        return image, self.labels[index]


def accuracy(model, batches):
    """Return the metrics of an evaluation. The model is in eval mode, and no gradients are computed."""
    is_correct = [(model(images).argmax(1) == labels).float() for images, labels in batches]
    return {"accuracy": torch.cat(is_correct).mean()}


def main(run):
    train_loader = DataLoader(Stripes(960, seed=0, augment=True), batch_size=32, shuffle=True, drop_last=True)
    val_loader = DataLoader(Stripes(240, seed=1, augment=False), batch_size=64)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * len(train_loader))

    result = whet.train(
        model,
        train_loader,
        loss=nn.functional.cross_entropy,  # called as cross_entropy(model(images), labels)
        optimizer=optimizer,
        schedule=schedule,  # whet steps it, after each optimizer step
        val=val_loader,
        evaluate=accuracy,
        goal="accuracy",
        epochs=EPOCHS,
        run=run,
    )
    print(f"{result.reason}: accuracy {result.metrics['accuracy']:.2f}, best at step {result.best.step}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/images")
