"""Data of the same form as what the scripts would download: random images, generated text, a small tokenizer."""

import random
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

_LINE = "the model reads a line and then it writes another one with fewer words but more sense than before"


def image_dataset(shape: tuple[int, ...], num_classes: int, *, sizes: tuple[int, int]) -> type[Dataset[Any]]:
    """Return a class like torchvision.datasets.MNIST: random images whose brightness follows their class."""

    class RandomImages(Dataset[Any]):
        def __init__(
            self,
            root: str | None = None,  # noqa: ARG002
            train: bool = True,
            transform: Callable[[Any], Any] | None = None,
            target_transform: Callable[[Any], Any] | None = None,
            download: bool = False,  # noqa: ARG002
        ) -> None:
            generator = torch.Generator().manual_seed(int(train))
            size = sizes[0] if train else sizes[1]
            self.targets = torch.randint(num_classes, (size,), generator=generator)
            brightness = self.targets.reshape(-1, *[1] * len(shape)) * (128 // num_classes)
            noise = torch.randint(128, (size, *shape), generator=generator)
            self.data = (brightness + noise).to(torch.uint8)
            self.transform, self.target_transform = transform, target_transform

        def __len__(self) -> int:
            return len(self.targets)

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            image: Any = Image.fromarray(self.data[index].numpy())
            image = image if self.transform is None else self.transform(image)
            target: Any = int(self.targets[index])
            return image, target if self.target_transform is None else self.target_transform(target)

    return RandomImages


def use_mnist(sizes: tuple[int, int]) -> None:
    """Replace MNIST."""
    import torchvision

    torchvision.datasets.MNIST = image_dataset((28, 28), 10, sizes=sizes)


def text(num_words: int) -> str:
    """Return lines of random words."""
    words = random.Random(0).choices(_LINE.split(), k=num_words)
    return "\n".join(" ".join(words[start : start + 12]) for start in range(0, num_words, 12)) + "\n"


def write(path: str, content: str) -> None:
    """Write a file with its folders, once: a resumed run must find it unchanged."""
    file = Path(path)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")


def write_images(folder: str, *, count: int, size: int) -> None:
    """Write random images as files."""
    generator = np.random.default_rng(0)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        path = Path(folder, f"{number:04}.png")
        if not path.exists():
            Image.fromarray(generator.integers(256, size=(size, size, 3), dtype=np.uint8)).save(path)


def stub_module(name: str, **attributes: Any) -> types.ModuleType:
    """Put a module in the place of one that is not needed for training, such as wandb."""
    module = types.ModuleType(name)
    vars(module).update(attributes, __spec__=ModuleSpec(name, None))
    sys.modules[name] = module
    return module
