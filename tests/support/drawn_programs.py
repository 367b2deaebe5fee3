"""Training programs drawn at random from everything that can hold state, to be interrupted and resumed.

`draw_program(seed)` chooses features. `main([seed, kind, run, stop, signal, out])` runs the program as a process: it
ends itself with a signal after step `stop`, or writes the digest of its final state to `out`.
"""

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as f
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import whet
from whet.checkpoint.store import list_steps

SAMPLES, BATCH, WIDTH, CLASSES, EPOCHS = 40, 8, 8, 3, 4
STEPS = SAMPLES // BATCH * EPOCHS

# --- modules that hold state ------------------------------------------------------------------------------------------


class LateBuffer(nn.Module):
    """Like ActNorm: its buffer is None until the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().std().reshape(1) + 1
        self.scale = self.scale * 1.01
        return x / self.scale


class GrowingBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.seen) < 12:
            self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        else:
            self.seen = self.seen.roll(1) * 0.9
        return x + self.seen.mean()


class ExpandedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wide", torch.ones(1).expand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.wide = (self.wide[:1] * 1.001).expand(WIDTH)
        return x * self.wide


class ExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = {"calls": 0, "shift": (0.0, torch.zeros(1))}

    def get_extra_state(self) -> Any:
        return self.hidden

    def set_extra_state(self, state: Any) -> None:
        self.hidden = state

    def forward(self, x: Tensor) -> Tensor:
        calls, (number, tensor) = self.hidden["calls"] + 1, self.hidden["shift"]
        self.hidden = {"calls": calls, "shift": (number + 0.01, tensor + 0.01)}
        return x + number * tensor


class PlainAttributes(nn.Module):
    """A counter, a tensor and a generator that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.memory = torch.zeros(WIDTH)
        self.own = torch.Generator().manual_seed(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.memory = 0.9 * self.memory + x.detach().mean(0)
        noise = torch.rand(1, generator=self.own)
        return x + 0.01 * self.calls + 0.1 * self.memory + 0.1 * noise


class DropoutSchedule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.drop.p = min(0.5, self.drop.p * 1.05)
        return self.drop(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x: Tensor) -> Tensor:
        return self.fake(x)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.2),
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
    "layernorm": lambda: nn.LayerNorm(WIDTH),
    "late buffer": LateBuffer,
    "growing buffer": GrowingBuffer,
    "expanded buffer": ExpandedBuffer,
    "extra state": ExtraState,
    "plain attributes": PlainAttributes,
    "dropout schedule": DropoutSchedule,
    "tied": Tied,
    "quantized": Quantized,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}

_NOT_AVERAGED = ("late buffer", "growing buffer", "expanded buffer")
"""torch's AveragedModel cannot be updated with buffers of other shapes, or load expanded ones."""

# --- changes in the middle of a run -----------------------------------------------------------------------------------


def _unfreeze(model: nn.Module) -> None:
    model[0].weight.requires_grad_(True)


def _freeze_module(model: nn.Module) -> None:
    model[1].eval()


def _prune(model: nn.Module) -> None:
    prune.l1_unstructured(model[0], "weight", amount=0.3)


CHANGES: dict[str, Callable[[nn.Module], None]] = {"unfreeze": _unfreeze, "eval": _freeze_module, "prune": _prune}

# --- optimizers -------------------------------------------------------------------------------------------------------


class OwnStateDict(torch.optim.SGD):
    """Keeps a counter and slow weights outside `state`, and saves them in its own state_dict, like Lookahead."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls = 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.calls += 1
        if self.calls % 3 == 0:
            for slow, p in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "calls": self.calls, "slow": self.slow}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.calls = state["calls"]
        self.slow = [tensor.clone() for tensor in state["slow"]]


class OddState(torch.optim.Optimizer):
    """State of every structure: tuples, int keys, odd names, lists, infinities, sharing, and aliases of parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "count": torch.tensor(2**60 + 1), "betas": (0.9, torch.tensor(0.5))})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = None
        for group in self.param_groups:
            group["count"] += 2
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    shared = torch.zeros(()) if shared is None else shared
                    state.update(
                        {"a/b": (0, 1.5), 3: [torch.zeros_like(p)], "best": float("inf"), "x y": {"n": {1, 2}}}
                    )
                    state["shared"], state["alias"] = shared, p
                state["a/b"] = (state["a/b"][0] + 1, state["a/b"][1] * 0.99)
                momentum = state[3][0]
                momentum.mul_(group["betas"][0] * float(group["betas"][1])).add_(p.grad)
                state["shared"].add_(0.01)
                state["best"] = min(state["best"], float(p.grad.norm()))
                parity = int(group["count"]) % 4 / 40
                state["alias"].add_(momentum + 0.01 * state["shared"], alpha=-group["lr"] * (1 + parity))
        total = self.state["global"]
        total["steps"] = total.get("steps", 0) + 1


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "own state_dict": lambda p: OwnStateDict(p, lr=0.05, momentum=0.5),
    "odd state": lambda p: OddState(p, lr=0.05),
}

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "constant": lambda _: "constant",
    "cosine": lambda _: "cosine",
    "function": lambda _: lambda step: 1 / (1 + 0.1 * step),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 4, gamma=0.7),
    "cyclic": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
}

# --- data -------------------------------------------------------------------------------------------------------------


def _tensors() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 4, generator=draw), torch.randint(0, CLASSES, (SAMPLES,), generator=draw)


class Augmented(Dataset):
    """Draws from the global generators, which whet seeds for each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = _tensors()
        return x[index] + 0.1 * torch.rand(()) + 0.1 * random.random() + 0.1 * float(np.random.random()), y[index]


class Stream(IterableDataset):
    """Shuffles by its own epoch counter and generator, and has a state of tuples and tensors."""

    def __init__(self) -> None:
        self.epoch, self.position, self.random = 0, 0, random.Random(3)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = _tensors()
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.position < SAMPLES:
            index = order[self.position]
            self.position += 1
            yield x[index] + 0.1 * self.random.random(), y[index]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": torch.tensor(self.position), "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], int(state["position"])
        self.random.setstate(state["random"])


def _noisy_collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x = torch.stack([sample[0] for sample in samples])
    return x + 0.1 * torch.randn(()), torch.stack([sample[1] for sample in samples])


DATA: dict[str, Callable[[], Any]] = {
    "tensors": _tensors,
    "augmented": Augmented,
    "loader": lambda: DataLoader(TensorDataset(*_tensors()), batch_size=BATCH, shuffle=True),
    "collate": lambda: DataLoader(
        TensorDataset(*_tensors()), batch_size=BATCH, shuffle=True, collate_fn=_noisy_collate
    ),
    "weighted": lambda: DataLoader(
        TensorDataset(*_tensors()),
        batch_size=BATCH,
        sampler=WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES),
    ),
    "stream": Stream,
}

# --- hidden state -----------------------------------------------------------------------------------------------------


class CountingDataset(Augmented):
    """Keeps a counter that the run does not know."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        x, y = super().__getitem__(index)
        return x + 0.001 * self.reads, y


class OwnGeneratorDataset(Augmented):
    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(2)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + torch.rand((), generator=self.draw), y


class Center(nn.Module):
    """A criterion with a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        self.center += 0.1 * (outputs.detach().mean(0) - self.center)
        return f.cross_entropy(outputs - self.center, target)


HIDDEN = (
    "closure of the loss",
    "generator of the loss",
    "buffer of the loss",
    "attribute of the loss",
    "global of the loss",
    "second optimizer",
    "hook of a module",
    "hook of a tensor",
    "dataset counter",
    "dataset generator",
    "collate counter",
    "schedule function",
)
_GLOBAL = {"calls": 0}

# --- programs ---------------------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """The features of one program."""

    seed: int
    is_loop: bool
    modules: tuple[str, ...]
    changes: tuple[str, ...]
    optimizer: str
    schedule: str
    data: str
    has_two_optimizers: bool
    is_manual: bool
    draws_between: bool
    registers: bool
    has_callback: bool
    uses_ema: bool
    clip: float | None
    hidden: str | None


def draw_program(seed: int, *, hidden: bool = False) -> Program:
    """Draw the features of a program."""
    draw = random.Random(seed)
    is_loop = draw.random() < 0.5 and not hidden
    has_two = is_loop and draw.random() < 0.25
    is_manual = is_loop and not has_two and draw.random() < 0.2
    optimizer = draw.choice([*OPTIMIZERS])
    registers = draw.random() < 0.4
    changes = draw.sample([*CHANGES], k=draw.choice([0, 0, 1, 2]))
    if "prune" in changes and (registers or "unfreeze" in changes):
        # A pruned weight is no parameter any more, and an averaged model has the parameters of the start.
        changes.remove("prune")
    scheduler = "constant" if has_two else draw.choice([*SCHEDULES])
    chosen = HIDDEN[seed % len(HIDDEN)] if hidden else None
    modules = draw.sample([*MODULES], k=draw.randint(1, 4))
    if registers:
        modules = [name for name in modules if name not in _NOT_AVERAGED] or ["dropout"]
    return Program(
        seed=seed,
        is_loop=is_loop,
        modules=tuple(modules),
        changes=() if hidden else tuple(changes),
        optimizer=optimizer,
        schedule="constant" if chosen == "schedule function" else scheduler,
        data="tensors" if hidden else draw.choice([*DATA]),
        has_two_optimizers=has_two,
        is_manual=is_manual,
        draws_between=is_loop and draw.random() < 0.5,
        registers=registers,
        has_callback=draw.random() < 0.4,
        uses_ema=not (has_two or is_manual) and draw.random() < 0.2,
        clip=None if is_manual or draw.random() < 0.5 else 1.0,
        hidden=chosen,
    )


class Interrupt(whet.Callback):
    """Ends the process after a step, and makes the changes in the middle of a run."""

    def __init__(self, model: nn.Module, program: Program, run: Path, stop: int, number: int) -> None:
        self.model, self.changes, self.run, self.stop, self.number = model, program.changes, run, stop, number

    def after_step(self, state: whet.State, outcome: Any) -> None:
        for position, name in enumerate(self.changes):
            if state.step == 3 + 4 * position:
                CHANGES[name](self.model)
        if state.step == self.stop:
            # A thread writes the checkpoint of step 3. Without it, there would be nothing to resume.
            deadline = time.monotonic() + 60
            while max(list_steps(self.run / "checkpoints"), default=0) == 0 and time.monotonic() < deadline:
                time.sleep(0.005)
            os.kill(os.getpid(), self.number)


class Scaling(whet.Callback):
    """A callback whose state matters to the training."""

    def __init__(self) -> None:
        self.scale = 1.0

    def after_step(self, state: Any, outcome: Any) -> None:
        self.scale *= 0.99

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


class Training:
    """The objects of a program."""

    def __init__(self, program: Program, run: Path, stop: int, number: int) -> None:
        self.program = program
        torch.manual_seed(program.seed)
        layers = [nn.Linear(4, WIDTH), *(MODULES[name]() for name in program.modules), nn.Linear(WIDTH, CLASSES)]
        self.model = nn.Sequential(*layers)
        if "unfreeze" in program.changes:
            layers[0].weight.requires_grad_(False)
        self.data = DATA[program.data]()
        self.optimizer: Any = OPTIMIZERS[program.optimizer](self.model.parameters())
        if program.has_two_optimizers:
            first, second = [*self.model[0].parameters()], [*layers[-1].parameters()]
            self.optimizer = {"a": OPTIMIZERS[program.optimizer](first), "b": torch.optim.Adam(second, lr=0.01)}
        self.scaling = Scaling()
        self.registered: dict[str, Any] = {}
        if program.registers:
            self.registered = {"average": AveragedModel(self.model), "history": [0.0]}
        schedule = "constant" if program.has_two_optimizers else SCHEDULES[program.schedule](self.optimizer)
        callbacks: list[whet.Callback] = [Interrupt(self.model, program, run, stop, number)]
        callbacks += [self.scaling] if program.has_callback else []
        self.options: dict[str, Any] = {
            "epochs": EPOCHS,
            "max_steps": STEPS,
            "run": run,
            "schedule": schedule,
            "ema": program.uses_ema,
            "clip": program.clip,
            "callbacks": callbacks,
            "split_batch": False,
            "overrides": {"threads": 1, "device": "cpu", "checkpoint_steps": 3, "workers": 0},
        }
        if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
            self.options["schedule_interval"] = "step"
        if not isinstance(self.data, DataLoader):
            self.options["global_batch_size"] = BATCH
        self.criterion: Callable[..., Tensor] = f.cross_entropy
        self.hide(program.hidden)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch[0], batch[1]
        value = self.scaling.scale * self.criterion(self.model(x), y)
        if self.registered:
            history = self.registered["history"]
            history[0] = 0.9 * history[0] + 0.1
            value = value * (1 + 0.1 * history[0])
            toward = [*self.registered["average"].module.parameters()][-1]
            value = value + 0.1 * ([*self.model.parameters()][-1] - toward.detach()).square().sum()
        return value

    def hide(self, kind: str | None) -> None:
        """Give the program state that the run does not know."""
        calls = [0]
        draw = torch.Generator().manual_seed(8)
        if kind == "closure of the loss":
            self.criterion = lambda outputs, y: _count(calls) * f.cross_entropy(outputs, y)
        elif kind == "generator of the loss":
            self.criterion = lambda outputs, y: torch.rand((), generator=draw) * f.cross_entropy(outputs, y)
        elif kind == "buffer of the loss":
            self.criterion = Center()
        elif kind == "attribute of the loss":
            self.criterion = _CountingLoss()
        elif kind == "global of the loss":
            self.criterion = _loss_with_global
        elif kind == "second optimizer":
            other = torch.optim.SGD(self.model[-1].parameters(), lr=0.01, momentum=0.9)
            self.options["callbacks"].append(_SecondOptimizer(self.model[-1], other))
        elif kind == "hook of a module":
            self.model[0].register_forward_hook(lambda module, inputs, outputs: outputs * _count(calls))
        elif kind == "hook of a tensor":
            self.model[0].weight.register_hook(lambda gradient: gradient * _count(calls))
        elif kind == "dataset counter":
            self.data = CountingDataset()
        elif kind == "dataset generator":
            self.data = OwnGeneratorDataset()
        elif kind == "collate counter":

            def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
                x, y = _noisy_collate(samples)
                return x * _count(calls), y

            self.options["collate_fn"] = collate
        elif kind == "schedule function":
            self.options["schedule"] = lambda step: _count(calls)

    def run(self) -> None:
        if not self.program.is_loop:
            whet.train(
                self.model,
                self.data,
                loss=self.loss,
                optimizer=self.optimizer,
                register=self.registered,
                measure=False,
                **self.options,
            )
            return
        with whet.Session(self.model, self.optimizer, self.data, **self.options) as session:
            for name, value in self.registered.items():
                session.register(name, value)
            for batch in session:
                if self.program.is_manual:
                    with session.manual(batch) as data:
                        self.optimizer.zero_grad()
                        loss = self.loss(data)
                        loss.backward()
                        self.optimizer.step()
                        session.log_loss(loss)
                elif self.program.has_two_optimizers:
                    session.step(self.loss, batch, optimizer="a")
                    session.step(self.loss, batch, optimizer="b", every=2)
                else:
                    session.step(self.loss, batch)
                if self.program.draws_between and session.progress.step % 3 == 0:
                    torch.rand(3), random.random(), np.random.random()
                if "average" in self.registered:
                    self.registered["average"].update_parameters(self.model)

    def digest(self) -> dict[str, str]:
        """Return a hash for each part of the state."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        parts: dict[str, Any] = {f"model {name}": tensor for name, tensor in tensors.items()}
        optimizers = self.optimizer if isinstance(self.optimizer, dict) else {"": self.optimizer}
        for name, optimizer in optimizers.items():
            parts |= {f"optimizer {name}": optimizer.state_dict()}
        parts |= {"scale": self.scaling.scale, "registered": self.registered.get("history")}
        if "average" in self.registered:
            parts["average"] = self.registered["average"].state_dict()
        parts["flags"] = [(name, p.requires_grad) for name, p in self.model.named_parameters()]
        parts["modes"] = [(name, module.training) for name, module in self.model.named_modules()]
        return {name: hashlib.sha256(_plain(value).encode()).hexdigest()[:12] for name, value in parts.items()}


def _plain(value: Any) -> str:
    """Return text that is equal exactly for values with equal bits."""
    if isinstance(value, Tensor):
        return (
            f"{value.dtype}{tuple(value.shape)}{value.detach().contiguous().view(torch.uint8).tolist()}"
            if (value.dim() and value.numel())
            else f"{value.dtype}{tuple(value.shape)}{value.tolist()!r}"
        )
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return type(value).__name__ + "(" + ",".join(map(_plain, value)) + ")"
    return repr(value)


def _count(calls: list[int]) -> float:
    calls[0] += 1
    return 1 + 0.01 * calls[0]


def _loss_with_global(outputs: Tensor, y: Tensor) -> Tensor:
    _GLOBAL["calls"] += 1
    return (1 + 0.01 * _GLOBAL["calls"]) * f.cross_entropy(outputs, y)


class _CountingLoss:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return (1 + 0.01 * self.calls) * f.cross_entropy(outputs, y)


class _SecondOptimizer(whet.Callback):
    def __init__(self, layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.layer, self.optimizer = layer, optimizer

    def after_step(self, state: Any, outcome: Any) -> None:
        self.layer.weight.grad = torch.ones_like(self.layer.weight)
        self.optimizer.step()


def main(arguments: list[str]) -> int:
    seed, kind, run, stop, number, out = arguments
    program = draw_program(int(seed), hidden=kind == "hidden")
    training = Training(program, Path(run), int(stop), int(number))
    training.run()
    Path(out).write_text(json.dumps(training.digest()))
    return 0


if __name__ == "__main__":
    print(draw_program(int(sys.argv[1]), hidden=len(sys.argv) > 2))
