"""Training programs with every kind of state that torch can have, for tests that stop and resume them.

`main([program, mode, folder])` trains for 24 steps. With the mode "int" or "kill" the process gets that signal after
step 11; with "roll back" the run returns once from step 14 to its last checkpoint.
"""

import os
import random
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver
from torch.nn import functional as f
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import whet

NUM_STEPS, STOP_STEP, ROLL_BACK_STEP = 24, 11, 14
_draw = torch.Generator().manual_seed(5)
X, Y = torch.randn(96, 10, generator=_draw), torch.randint(0, 4, (96,), generator=_draw)

Program = dict[str, Any]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(build: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[build.__name__] = build
    return build


def training(model: nn.Module, data: Any = (X, Y), *, optimizer: Any = None, **options: Any) -> Program:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return {"model": model, "data": data, "optimizer": optimizer, **options}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))


class At(whet.Callback):
    """Changes something after a step. Step 2 is before the first checkpoint, so that a resume must restore it."""

    def __init__(self, step: int, change: Callable[[], Any]) -> None:
        self.step, self.change = step, change

    def after_step(self, state: Any, outcome: Any) -> whet.Action:
        if state.step == self.step:
            self.change()
        return whet.Action.NONE


# --- data -------------------------------------------------------------------------------------------------------------


class Stream:
    """A stream that shuffles by its own epoch counter."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.position < len(X):
            self.position += 1
            yield self.sample(order[self.position - 1])
        self.epoch, self.position = self.epoch + 1, 0

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


@program
def stream_with_epochs() -> Program:
    # Stopped in the middle of an epoch, and killed after the last checkpoint of one.
    return training(mlp(), Stream(), global_batch_size=12)


class GlobalGeneratorStream(Stream):
    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + 0.1 * torch.randn(10), Y[index]


@program
def stream_of_global_generator() -> Program:
    return training(mlp(), GlobalGeneratorStream())


class GeneratorStream(Stream):
    """A stream whose state has tuples, tensors and generators."""

    def __init__(self) -> None:
        super().__init__()
        self.python, self.torch, self.numpy = (
            random.Random(3),
            torch.Generator().manual_seed(3),
            np.random.default_rng(4),
        )

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(10, generator=self.torch) * self.python.random()
        return X[index] + 0.1 * noise + float(self.numpy.random()), Y[index]

    def state_dict(self) -> dict[str, Any]:
        generators = {"python": self.python.getstate(), "torch": self.torch.get_state(), "numpy": self.numpy}
        return {"place": (self.epoch, self.position), **generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["place"]
        self.python.setstate(state["python"])
        self.torch.set_state(state["torch"])
        self.numpy.bit_generator.state = state["numpy"].bit_generator.state


@program
def stream_of_own_generators() -> Program:
    return training(mlp(), GeneratorStream())


class CountingDataset(Stream, IterableDataset[Any]):
    pass


class StatefulLoader(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state)


@program
def loader_with_epochs() -> Program:
    return training(mlp(), StatefulLoader(CountingDataset(), batch_size=12), global_batch_size=None)


class EndlessSampler:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(0, len(X), (), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"state": (self.generator.get_state(),)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"][0])


@program
def sampler_with_state() -> Program:
    loader = DataLoader(TensorDataset(X, Y), batch_size=8, sampler=EndlessSampler())
    return training(mlp(), loader, global_batch_size=None)


# --- optimizers -------------------------------------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """A wrapper with state that only its own state_dict knows."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, inside.defaults)
        self.inside, self.param_groups = inside, inside.param_groups
        self.num_steps = 0
        self.slow = lambda: weights
        weights = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inside.step()
        self.num_steps += 1
        if self.num_steps % 5 == 0:
            parameters = [p for group in self.param_groups for p in group["params"]]
            for slow, fast in zip(self.slow(), parameters, strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"inside": self.inside.state_dict(), "slow": self.slow(), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inside.load_state_dict(state["inside"])
        for slow, saved in zip(self.slow(), state["slow"], strict=True):
            slow.copy_(saved)
        self.num_steps = state["num_steps"]


@program
def lookahead() -> Program:
    model = mlp()
    inside = torch.optim.Adam(model.parameters(), lr=0.01)
    return training(model, optimizer=Lookahead(inside), schedule="linear")


class CountingSgd(torch.optim.SGD):
    """An optimizer with a count as an attribute."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            torch._foreach_div_([p.grad for p in group["params"]], self.num_steps)
        return super().step(closure)


@program
def optimizer_with_attribute() -> Program:
    model = mlp()
    return training(model, optimizer=CountingSgd(model.parameters(), lr=0.1, momentum=0.9))


class EveryStructure(torch.optim.Optimizer):
    """An optimizer with state of every structure. It checks that types, sharing and aliasing stay as they are."""

    def __init__(self, parameters: Any) -> None:
        big = torch.tensor(2**60 + 1)
        super().__init__(parameters, {"lr": 0.05, "big": big, "vector": torch.arange(3.0), "function": torch.sin})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["global"]["k"] = self.state["global"].get("k", 0) + 1
        shared = self.state["shared"].setdefault("tensor", torch.zeros(3))
        for group in self.param_groups:
            group["vector"] += 1
            group["big"] += 2
            assert int(group["big"]) == 2**60 + 1 + 2 * self.state["global"]["k"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"tuple": (0, 1.5), "a/b": torch.zeros_like(parameter), 1: {"x": torch.tensor(1)}}
                    state |= {"shared": shared, "alias": parameter, "view": parameter.data.view(-1)[:2]}
                    state |= {"list": [torch.zeros(2), torch.ones(2)], "inf": float("inf"), "nan": float("nan")}
                    state |= {"complex": torch.zeros(2, dtype=torch.complex128), "set": {1, 2}, "bytes": b"\0"}
                assert type(state["tuple"]) is tuple
                assert state["alias"] is parameter
                assert state["shared"] is shared
                state["tuple"] = (state["tuple"][0] + 1, state["tuple"][1])
                state["a/b"].mul_(0.9).add_(parameter.grad)
                state[1]["x"] += 1
                state["list"][0] += state["list"][1]
                state["shared"] += 0.01
                state["view"] += 0.001
                scale = (
                    group["lr"] * (1 + float(shared[0])) * (1 + 0.01 * state["tuple"][0] + 0.01 * int(state[1]["x"]))
                )
                parameter.sub_(state["a/b"] * scale)


@program
def optimizer_of_every_structure() -> Program:
    model = mlp()
    return training(model, optimizer=EveryStructure(model.parameters()))


@program
def adam_with_tensor_betas() -> Program:
    model = mlp()
    betas = torch.tensor(0.9), torch.tensor(0.99)
    rate = torch.tensor(0.01)
    return training(model, optimizer=torch.optim.Adam(model.parameters(), lr=rate, betas=betas, foreach=False))


@program
def averaged_model() -> Program:
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(model)

    class Update(whet.Callback):
        def after_step(self, state: Any, outcome: Any) -> whet.Action:
            average.update_parameters(model)
            return whet.Action.NONE

    return training(model, register={"average": average}, callbacks=[Update()])


# --- models -----------------------------------------------------------------------------------------------------------


class HiddenCount(nn.Module):
    """A module whose extra state is known to get_extra_state only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)
        self._hidden = type("Hidden", (), {"count": 0})()

    def forward(self, x: Tensor) -> Tensor:
        self._hidden.count += 1
        return self.linear(x) * (1 + 0.01 * self._hidden.count)

    def get_extra_state(self) -> Any:
        return {"count": (self._hidden.count,), "tensor": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        (self._hidden.count,) = state["count"]


@program
def extra_state() -> Program:
    return training(HiddenCount())


@program
def unfrozen_in_the_middle() -> Program:
    model = mlp()
    model[0].requires_grad_(False)
    return training(model, callbacks=[At(2, lambda: model[0].requires_grad_(True))])


@program
def flags_changed_in_the_middle() -> Program:
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))

    def change() -> None:
        model[1].eval()
        model[2].p = 0.4

    return training(model, ema=True, callbacks=[At(2, change)])


class Attributes(nn.Module):
    """A module with state in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)
        self.hidden, self.count, self.array = torch.zeros(4), 0, np.zeros(2)
        self.torch, self.numpy, self.python = (
            torch.Generator().manual_seed(1),
            np.random.default_rng(1),
            random.Random(1),
        )
        self.recent: deque[int] = deque(maxlen=3)
        self.table: dict[Any, Any] = defaultdict(list)
        self.late: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.recent.append(self.count)
        self.table[self.count % 3].append((self.count, torch.tensor(self.count)))
        self.array += 1
        self.late = torch.full((self.count,), 0.01) if self.count > 3 else None
        noise = torch.rand(4, generator=self.torch) * float(self.numpy.random()) + self.python.random()
        sums = sum(self.recent) + float(self.array[0]) + len(self.table[0])
        y = self.linear(x) + self.hidden + 0.1 * noise + 0.001 * sums
        self.hidden = 0.9 * self.hidden + 0.1 * y.detach().mean(0)
        return y if self.late is None else y + self.late.sum()


@program
def plain_attributes() -> Program:
    return training(Attributes())


class SharedContainers(nn.Module):
    """Containers that two attributes begin to share while it trains, and containers that cease to be one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.first: list[int] | None = None
        self.second: list[int] | None = None
        self.together = self.apart = [0]
        self.nested: dict[str, list[int]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None or self.second is None:
            self.first = self.second = [0]
            self.apart = [5]
            self.nested = {"a": self.first, "b": self.apart}
        self.first[0] += 1
        self.nested["b"][0] += 1
        self.together[0] += 2
        assert self.second is self.first
        assert self.nested["a"] is self.first
        assert self.nested["b"] is self.apart
        assert self.apart is not self.together
        return self.net(x) * (1 + 0.001 * (self.second[0] + self.apart[0] + self.together[0]))


@program
def shared_containers() -> Program:
    return training(SharedContainers())


class SharingSgd(torch.optim.SGD):
    """An optimizer whose parameters share a list in their state."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        counts = self.state[parameters[0]].setdefault("counts", [0])
        for parameter in parameters:
            assert self.state[parameter].setdefault("counts", counts) is counts
            counts[0] += 1
            parameter.grad.mul_(1 + 0.001 * counts[0])
        return super().step(closure)


@program
def optimizer_with_shared_list() -> Program:
    model = mlp()
    return training(model, optimizer=SharingSgd(model.parameters(), lr=0.05, momentum=0.9))


class LateBuffers(nn.Module):
    """A buffer that is None until the first forward pass, one that does not exist, and one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)
        self.count = 0
        self.register_buffer("scale", None)
        self.register_buffer("cache", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.std().detach().clone()
            self.register_buffer("shift", x.mean(0).detach().clone())
        self.count += 1
        if self.count % 5 == 1:
            self.cache = torch.cos(torch.arange(self.count + 3.0))
        self.shift = self.shift + 0.01
        return self.linear(x * self.scale + self.shift) + self.cache.sum()


@program
def late_buffers() -> Program:
    return training(LateBuffers(), ema=True)


class OddBuffers(nn.Module):
    """An expanded buffer, a sparse one and one of 8-bit floats."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.register_buffer("eight", torch.ones(4).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        self.expanded = (self.expanded[:1] * 1.01).expand(4)
        return torch.sparse.mm(self.graph, self.linear(x).t()).t() * self.expanded * self.eight.float()


@program
def odd_buffers() -> Program:
    return training(OddBuffers(), ema=True)


@program
def pruned_in_the_middle() -> Program:
    model = mlp()

    def change() -> None:
        prune.l1_unstructured(model[0], "weight", 0.3)

    return training(model, ema=True, callbacks=[At(2, change), At(13, change)])


def reparametrized(change: Callable[[nn.Module], Any], **options: Any) -> Program:
    """Reparametrize a layer after step 2, and put its new parameters into the optimizer."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def begin() -> None:
        change(model[0])
        optimizer.param_groups[0]["params"] = list(model.parameters())

    return training(model, optimizer=optimizer, callbacks=[At(2, begin)], **options)


class Scaled(nn.Module):
    """A parametrization with state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.ones(1)), 0
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean * 0.9 + weight.detach().mean()
        return weight * self.scale + 0.001 * self.calls * self.mean[0]

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


@program
def weight_norm_in_the_middle() -> Program:
    return reparametrized(parametrizations.weight_norm, ema=True)


@program
def old_weight_norm_in_the_middle() -> Program:
    return reparametrized(nn.utils.weight_norm, clip=1.0)


@program
def old_spectral_norm_in_the_middle() -> Program:
    return reparametrized(nn.utils.spectral_norm)


@program
def own_parametrizations_in_the_middle() -> Program:
    def change(layer: nn.Module) -> None:
        parametrize.register_parametrization(layer, "weight", Scaled())
        parametrizations.spectral_norm(layer, "weight")

    return reparametrized(change)


@program
def weight_norm_removed_in_the_middle() -> Program:
    program = reparametrized(lambda layer: parametrize.remove_parametrizations(layer, "weight"))
    parametrizations.weight_norm(program["model"][0])
    program["optimizer"].param_groups[0]["params"] = list(program["model"].parameters())
    return program


@program
def layers_replaced_and_added_in_the_middle() -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def change() -> None:
        model[1] = nn.Softplus(beta=2.0)
        model.append(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        optimizer.param_groups[0]["params"] = list(model.parameters())

    return training(model, optimizer=optimizer, callbacks=[At(2, change)])


@program
def head_replaced_and_kept_by_the_optimizer() -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def change() -> None:
        model[2] = nn.Linear(16, 4)

    return training(model, optimizer=optimizer, callbacks=[At(7, change)])


@program
def weight_norm_added_and_removed_in_the_middle() -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def add() -> None:
        parametrizations.weight_norm(model[0])

    def remove() -> None:
        parametrize.remove_parametrizations(model[0], "weight")

    return training(model, optimizer=optimizer, callbacks=[At(2, add), At(7, remove)])


@program
def inference_tensors_as_buffers() -> Program:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 4)
            self.register_buffer("center", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) - self.center

    model = Centered()

    class Center(whet.Callback):
        def after_step(self, state: Any, outcome: Any) -> whet.Action:
            with torch.inference_mode():
                model.center = 0.9 * model.center + 0.1 * model.linear(X).mean(0)
            return whet.Action.NONE

    return training(model, callbacks=[Center()])


@program
def numpy_draws_from_another_bit_generator() -> Program:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.from_numpy(np.random.normal(size=tuple(x.shape))).float()

    np.random.set_bit_generator(np.random.PCG64(3))
    return training(nn.Sequential(Noise(), nn.Linear(10, 4)))


@program
def nested_tensor_as_an_attribute() -> Program:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 4)
            self.scales = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.scales = self.scales * 1.01
            return self.linear(x) * self.scales.values().sum()

    return training(Nested())


@program
def tied_and_untied_in_the_middle() -> Program:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 4))
    model[2].weight = model[1].weight

    def change() -> None:
        model[1].weight = model[0].weight

    return training(model, callbacks=[At(2, change)])


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.embedding((x[:, :5] * 3).long().clamp(0, 19)).mean(1))


@program
def sparse_momentum() -> Program:
    model = SparseEmbedding()
    return training(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@program
def sparse_adam() -> Program:
    model = SparseEmbedding()
    model.linear.requires_grad_(False)
    return training(model, optimizer=torch.optim.SparseAdam(model.embedding.parameters(), lr=0.1), clip=0.1)


class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(10, 4, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(10, 4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.narrow).abs() + (x.to(torch.complex128) @ self.wide).abs().float()


@program
def complex_weights() -> Program:
    model = ComplexWeights()
    return training(model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), ema=True)


class Quantized(nn.Module):
    """A model with an observer that resizes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)
        self.quantize = FakeQuantize(
            MovingAveragePerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
        )

    def forward(self, x: Tensor) -> Tensor:
        return f.linear(x, self.quantize(self.linear.weight), self.linear.bias)


@program
def fake_quantize_per_channel() -> Program:
    return training(Quantized())


# --- running ----------------------------------------------------------------------------------------------------------


class Interrupt(whet.Callback):
    def __init__(self, mode: str) -> None:
        self.mode = mode

    def after_step(self, state: Any, outcome: Any) -> whet.Action:
        if state.step == STOP_STEP and self.mode in ("int", "kill"):
            os.kill(os.getpid(), signal.SIGINT if self.mode == "int" else signal.SIGKILL)
        if state.step == ROLL_BACK_STEP and self.mode == "roll back":
            self.mode = ""
            return whet.Action.ROLLBACK("a test")
        return whet.Action.NONE


def main(arguments: list[str]) -> int:
    name, mode, folder = arguments
    torch.manual_seed(0)
    parts = PROGRAMS[name]()
    model, data = parts.pop("model"), parts.pop("data")
    callbacks = [*parts.pop("callbacks", ()), Interrupt(mode)]
    options = {"global_batch_size": 8, "epochs": 9, "max_steps": NUM_STEPS, **parts}
    whet.train(
        model,
        data,
        loss=lambda batch: f.cross_entropy(model(batch[0]), batch[1]),
        run=folder,
        callbacks=callbacks,
        overrides={"threads": 1, "checkpoint_steps": 4},
        on_event=None,
        **{key: value for key, value in options.items() if value is not None},
    )
    return 0
