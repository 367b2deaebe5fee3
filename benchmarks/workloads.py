"""Three workloads for measuring plans: text, a chat-shaped model and a convolutional net, on random data.

The text workload is whet's own recipe on the docstrings of installed packages; the others use random data, whose values
do not matter for speed. Each is small on a CPU and larger on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.autotune.process_bench import ProcessStepBench
from whet.base import env
from whet.config.resolve import resolve_config
from whet.data.batch import MicroBatch, Ragged
from whet.device.open import current_machine
from whet.plan.plan import make_plan
from whet.plan.workload import Workload
from whet.recipes.recipe import load_recipe
from whet.recipes.runner import prepare_recipe
from whet.step.optimizers import OptimizerChoice
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config
from whet.training.workload import describe_workload


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that a step bench needs; `workload` only where a recipe provides one."""

    model: nn.Module
    data: Any
    loss: Callable[[MicroBatch], Any]
    training: dict[str, Any]
    optimizer: OptimizerChoice = OptimizerChoice()  # noqa: RUF009 - frozen
    workload: Workload | None = None

    def bench(self, *, device: str, name: str, **overrides: Any) -> LocalStepBench:
        training = parse_training_config(self.training)
        machine, system_state = current_machine()
        workload = self.workload or describe_workload(self.model, self.data, training, recipe=name)
        chosen = {**overrides, **({} if device == "auto" else {"device": device})}
        plan = make_plan(machine, workload, overrides=chosen, system_state=system_state)
        return LocalStepBench(
            self.model, self.optimizer, self.data, training, loss=self.loss, plan=plan, may_compile=True
        )


def text(*, is_large: bool) -> Task:
    """whet's small encoder on a CPU; the shape of BERT base on a GPU."""
    recipe = load_recipe("text")
    words = ["arch.layers=12", "arch.hidden_size=768", "arch.heads=12"] if is_large else []
    # A long run, so that every optimization would pay off; only the time of a step is compared.
    made = prepare_recipe(recipe, resolve_config(recipe.Config, [*words, "dropout=0", "epochs=1000"]).config)
    return Task(
        model=made.model,
        data=made.data.train,
        loss=made.loss,
        optimizer=made.optimizer,
        training=made.training,
        workload=made.workload,
    )


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class Chat(nn.Module):
    """A causal language model of the usual shape."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def chat(*, is_large: bool) -> Task:
    """Conversations of 16 to `longest` tokens; the loss counts tokens."""
    torch.manual_seed(0)
    longest, vocabulary = (512, 16_384) if is_large else (96, 512)
    shape = {"width": 768, "layers": 12, "heads": 12} if is_large else {"width": 96, "layers": 3, "heads": 4}
    model = Chat(vocabulary=vocabulary, longest=longest, **shape)
    lengths = (torch.rand(1600).square() * (longest - 16)).long() + 16
    samples = Ragged.of([torch.randint(0, vocabulary, (int(length),)) for length in lengths])

    def loss(micro: MicroBatch) -> tuple[Tensor, Tensor]:
        values, counts = micro.tokens.values, micro.tokens.lengths
        logits = model(values[:, :-1])
        is_real = torch.arange(values.shape[1] - 1, device=values.device) < (counts - 1)[:, None]
        losses = functional.cross_entropy(logits.flatten(0, 1), values[:, 1:].flatten(), reduction="none")
        return (losses * is_real.flatten()).sum(), is_real.sum()

    return Task(model=model, data={"tokens": samples}, loss=loss, training={"global_batch_size": 32, "epochs": 100})


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.norm2(self.second(functional.relu(self.norm1(self.first(x))))))


def conv(*, is_large: bool) -> Task:
    """A full-resolution residual net on 13 x 13 boards."""
    torch.manual_seed(0)
    width, depth = (128, 18) if is_large else (32, 3)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *(Residual(width) for _ in range(depth)),
        nn.Flatten(),
        nn.Linear(width * 169, 169),
    )
    data = (torch.randn(4096, 3, 13, 13), torch.randint(0, 169, (4096,)))

    def loss(micro: MicroBatch) -> Tensor:
        return functional.cross_entropy(model(micro.x), micro.y)

    return Task(model=model, data=data, loss=loss, training={"global_batch_size": 64, "epochs": 100})


TASKS: dict[str, Callable[..., Task]] = {"text": text, "chat": chat, "conv": conv}


def open_bench(arguments: dict[str, Any]) -> LocalStepBench:
    """Open the bench of a task in a child process."""
    task = TASKS[arguments["task"]](is_large=arguments["device"] != "cpu")
    return task.bench(device=arguments["device"], name=arguments["task"])


def process_bench(name: str, *, device: str) -> ProcessStepBench:
    """Run the same task in a child process, like whet measures a recipe."""
    paths = f"{Path(__file__).parent}:{env.read('PYTHONPATH') or ''}"
    return ProcessStepBench(
        "workloads:open_bench", {"task": name, "device": device}, environment=env.child_environment(PYTHONPATH=paths)
    )
