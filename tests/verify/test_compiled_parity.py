"""Comparison of compiled and eager models: agreement, planted errors, and what the run does with the result."""

import contextlib
import gc
import io
import operator
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whet
from fake_device import FakeDevice
from whet.autotune.step_bench import ProbeFailedError
from whet.checkpoint import store
from whet.checkpoint.manifest import CheckpointInfo
from whet.data.batch import MicroBatch
from whet.device.open import current_machine
from whet.plan.plan import make_plan
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.step.compilation import num_graphs
from whet.step.optimizers import OptimizerChoice
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config
from whet.training.workload import describe_workload
from whet.verify.start import compiled
from whet.verify.start.compiled import CompiledParity, compare_compiled_with_eager, runs_compiled

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"),
]

SAMPLES, LENGTH, WORDS, WIDTH = 32, 8, 40, 32
NUM_STEPS = 4


@pytest.fixture(autouse=True)
def _as_the_compiler_found_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's compiler sets an environment variable and does not remove it. No check is remembered from another run."""
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))


class Reader(nn.Module):
    """Texts one behind the other: where a word stands in its own text is looked up between the texts' starts."""

    def __init__(self, *, dropout: float = 0.0, has_memory: bool = False, act: nn.Module | None = None) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if has_memory else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.act = act or nn.Tanh()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        starts = torch.arange(0, tokens.numel() + 1, tokens.shape[1])
        seats = torch.arange(tokens.numel())
        places = seats - starts[torch.bucketize(seats, starts[1:], right=True)]
        known = self.word(tokens.flatten()) + self.place(places.clamp(min=0))
        inner = self.act(self.inner(self.dropout(self.norm(known))))
        return self.head(self.dropout(inner.view(*tokens.shape, WIDTH).amax(1)))


class Planted(nn.Module):
    """Computes something else when compiled."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x) if torch.compiler.is_compiling() else x


def data() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (2 * SAMPLES, LENGTH), generator=draw)
    return {"x": tokens, "y": tokens[:, 2] % 4}


def made(**options: Any) -> Reader:
    torch.manual_seed(0)
    return Reader(**options)


def loss_of(model: nn.Module) -> Callable[[MicroBatch], Tensor]:
    return lambda micro: functional.cross_entropy(model(micro.x), micro.y)


def train(model: nn.Module, run: Path, *, loss: Any = None, epochs: int = 2, **overrides: Any) -> Path:
    torch.manual_seed(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    overrides = {"threads": 1, "compile": "on", "micro_batch": SAMPLES, **overrides}
    options = {"global_batch_size": SAMPLES, "epochs": epochs, "device": "cpu", "on_event": None, "run": run}
    whet.train(model, data(), optimizer=sgd, loss=loss or loss_of(model), overrides=overrides, **options)
    return run


def reported(run: Path) -> list[str]:
    return [event.get("message") for event in read_events(open_run(run)) if event.kind == "plan"]


def newest_about(run: Path) -> CheckpointInfo:
    result = store.load_newest(open_run(run).checkpoints)
    assert result is not None
    return result.snapshot.info


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


def as_it_is(graph: torch.fx.GraphModule, _: object) -> Any:
    """Compiles instantly."""
    return graph.forward


def read_from_the_first_number(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Reads boundaries that are a view from the start of their storage, as torch 2.11 did on CUDA."""
    from torch._inductor.compile_fx import compile_fx

    views = [n for n in graph.graph.nodes if n.target is operator.getitem and n.args[1] == slice(1, None, None)]
    assert len(views) == 1
    views[0].args = (views[0].args[0], slice(0, -1, None))
    graph.recompile()
    return compile_fx(graph, inputs)


def first_micro() -> MicroBatch:
    return MicroBatch(fields={name: column[:SAMPLES] for name, column in data().items()}, ids=np.arange(SAMPLES))


def agreement(model: nn.Module, *, loss: Any = None, precision: str = "fp32") -> CompiledParity:
    """Compare as a run would; the model is compiled as is."""
    torch.compiler.reset()
    model.compile(backend="eager")
    return compare_compiled_with_eager(model, FakeDevice(), loss or loss_of(model), first_micro(), precision=precision)


# --- a right one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "compiled: loss and 8 gradients agree with the eager model ("),
        ({"dropout": 0.1}, "compiled: 3 of 8 gradients agree with the eager model ("),
        ({"has_memory": True, "dropout": 0.1}, "compiled: 3 of 8 gradients agree with the eager model ("),
    ],
)
@pytest.mark.parametrize("backend", ["as it is", pytest.param("inductor", marks=pytest.mark.slow)])
def test_check_does_not_change_a_compiled_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, options: Any, words: str
) -> None:
    """Weights, running statistics and all draws of the run with the check are those of the run without."""
    if backend == "as it is":
        compile_with(monkeypatch, as_it_is)
    finals = []
    for verify in ("on", "off"):
        torch.compiler.reset()
        model = made(**options)
        run = train(model, tmp_path / verify, verify=verify)
        assert open_run(run).plan["settings"]["compile"]["value"] == "on"
        finals.append(model.state_dict())
    (line,) = reported(tmp_path / "on")
    assert line.startswith(words)
    assert (", dropout alone " in line) == ("dropout" in options)
    assert reported(tmp_path / "off") == ["compiled: not compared with the model's own code: verify=off"]
    for name in finals[0]:
        assert torch.equal(finals[0][name], finals[1][name]), name


def test_a_passed_check_is_remembered_for_the_same_model_and_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    compile_with(monkeypatch, as_it_is)
    changes: dict[str, Any] = {"first": {}, "again": {}, "always": {"verify": "always"}, "smaller": {"micro_batch": 8}}
    lines = {name: reported(train(made(), tmp_path / name, **changed))[0] for name, changed in changes.items()}
    compared = "compiled: loss and 8 gradients agree with the eager model ("
    assert lines.pop("again").startswith("compiled, verified before: loss and 8 gradients agree")
    assert all(line.startswith(compared) for line in lines.values())


def test_a_passed_check_is_repeated_after_the_compiler_was_configured_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    compile_with(monkeypatch, as_it_is)

    def line(name: str) -> str:
        return reported(train(made(), tmp_path / name))[0]

    compared, remembered = "compiled: loss and 8 gradients agree", "compiled, verified before: "
    assert line("first").startswith(compared)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert line("other folder").startswith(remembered)
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    assert line("variable").startswith(compared)
    monkeypatch.delenv("TORCHINDUCTOR_FREEZING")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert line("option").startswith(compared)
    assert line("as at first").startswith(remembered)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_check_restores_the_model(dropout: float, ends: str) -> None:
    model, device, calls = made(dropout=dropout, has_memory=True), FakeDevice(), []
    model.head.bias.grad = mine = torch.ones(4)
    model.dropout.eval() if not dropout else model.head.eval()

    def loss(micro: MicroBatch) -> Tensor:
        random.random(), np.random.rand(), torch.rand((), generator=device._generator)
        calls.append(1)
        if ends != "well" and len(calls) == 3:
            raise KeyboardInterrupt
        return loss_of(model)(micro)

    def everything() -> list[Any]:
        draws = [torch.get_rng_state().tolist(), device.generator.get_state().tolist(), random.getstate()]
        tensors = {name: (id(t), t.data_ptr(), t.tolist()) for name, t in model.state_dict(keep_vars=True).items()}
        modes = [module.training for module in model.modules()]
        return [*draws, np.random.get_state()[1].tolist(), tensors, modes, [p.grad is None for p in model.parameters()]]

    before = everything()
    try:
        assert compare_compiled_with_eager(model, device, loss, first_micro(), precision="fp32").agrees
    except KeyboardInterrupt:
        assert ends != "well"
    assert everything() == before
    assert len(calls) >= 3
    assert model.head.bias.grad is mine
    assert mine.tolist() == [1.0] * 4


def test_every_pass_starts_from_the_same_buffers() -> None:
    """Like a model that keeps state between steps."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(300))
            self.register_buffer("num_calls", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            self.num_calls = self.num_calls * 2
            return (self.weight * self.num_calls).sum() + x.sum()

    model = Counting()
    result = agreement(model, loss=lambda micro: model(micro.y))
    assert result.agrees
    assert result.dropout_error is None, "nothing was drawn"
    assert result.largest == 0.0


@pytest.mark.parametrize("every", [2, 3, 4, 5])
def test_loss_that_counts_its_calls_agrees(every: int) -> None:
    """Computes something else in some calls, compiled or not."""
    model, calls = made(), []

    def loss(micro: MicroBatch) -> Tensor:
        calls.append(1)
        result = loss_of(model)(micro)
        return result if len(calls) % every else result + model.head.weight.square().sum()

    result = agreement(model, loss=loss)
    assert result.agrees, str(result)


def test_rare_random_draw_agrees() -> None:
    """Two passes as written may have none of it, and the compiled one some."""

    class Skipped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (torch.rand((3,))[2 if torch.compiler.is_compiling() else 0] > 0.2)

    model = made(act=Skipped())
    torch.compiler.reset()
    model.compile(backend="eager")
    for seed in range(30):
        torch.manual_seed(seed)
        result = compare_compiled_with_eager(model, FakeDevice(), loss_of(model), first_micro(), precision="fp32")
        assert result.agrees, f"{seed}: {result}"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_rounding_agrees(precision: str, dropout: float) -> None:
    """Half precision that is not rounded in between, as compilers do."""
    size = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-3}[precision]
    model = made(dropout=dropout, act=Planted(lambda x: x + size * torch.sin(1e4 * x.detach())))
    result = agreement(model, precision=precision)
    assert result.agrees, str(result)
    assert result.largest > 0.0


def test_loss_may_be_a_weighted_sum_in_float64() -> None:
    model = made().double()

    def loss(micro: MicroBatch) -> tuple[Tensor, int]:
        return functional.cross_entropy(model(micro.x), micro.y, reduction="sum"), len(micro)

    result = agreement(model, loss=loss)
    assert result.agrees
    assert result.eager_loss == pytest.approx(loss_of(model)(first_micro()).item(), rel=1e-5)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_float32_rounding_of_the_model_agrees(is_wrong: bool) -> None:
    """Eager code rounds numbers that a compiler does not; float64 shows how much that matters."""

    class Rounding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(0)))

        def forward(self) -> Tensor:
            if torch.compiler.is_compiling():
                return self.weight.square().mean() * (1.02 if is_wrong else 1.0)
            return ((self.weight + 3e5) - 3e5).square().mean()

    model = Rounding()
    result = agreement(model, loss=lambda _: model())
    assert result.agrees != is_wrong, str(result)
    assert result.largest > 5e-3, "above the bound, so float64 was compared"


@pytest.mark.parametrize(("by", "is_judged"), [(1.25, False), (2.0, True), (torch.nan, True)])
def test_without_memory_for_higher_precision_only_large_errors_differ(
    monkeypatch: pytest.MonkeyPatch, by: float, is_judged: bool
) -> None:
    def no_memory(_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(compiled._Comparison, "_higher_precision_pass", no_memory)
    model = made(act=Planted(lambda x: x.detach() + by * (x - x.detach())))
    if is_judged:
        assert not agreement(model, precision="bf16").agrees
    else:
        with pytest.raises(torch.OutOfMemoryError):
            agreement(model, precision="bf16")
    assert not agreement(model, precision="fp32").agrees, "which rounds far less"


# --- a wrong one -----------------------------------------------------------------------------------------------------


def test_wrong_embedding_is_found_and_the_run_trains_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = made(dropout=0.1)
    train(plain, tmp_path / "plain", compile="off")
    compile_with(monkeypatch, read_from_the_first_number)
    model, is_compiled = made(dropout=0.1), []

    def loss(micro: MicroBatch) -> Tensor:
        is_compiled.append(model._compiled_call_impl is not None)
        return loss_of(model)(micro)

    run = train(model, tmp_path / "run", loss=loss)
    (line,) = reported(run)
    assert line.startswith("not compiled: the gradient of place.weight differs from the eager model by ")
    learnt = open_run(run).plan["settings"]["compile"]
    assert (learnt["value"], learnt["source"]) == ("off", "measured")
    assert learnt["reason"] in line
    assert is_compiled[-NUM_STEPS:] == [False] * NUM_STEPS, "all steps"
    assert any(is_compiled)
    for name, weights in plain.state_dict().items():
        assert torch.equal(weights, model.state_dict()[name]), name


def test_run_that_resumes_eagerly_is_not_bit_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with another torch whose compiler is wrong; the first step of a run has no earlier result."""
    compile_with(monkeypatch, as_it_is)
    run = train(made(), tmp_path / "run")
    compile_with(monkeypatch, read_from_the_first_number)
    # Another torch has no remembered checks.
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "other"))
    train(made(), run, epochs=3)
    train(made(), tmp_path / "new")
    first, changed = (event for event in read_events(open_run(run)) if event.kind == "plan")
    (new,) = (event for event in read_events(open_run(tmp_path / "new")) if event.kind == "plan")
    assert [event.fields.get("exact") for event in (first, changed, new)] == [None, False, None]
    assert (changed.step, changed.get("reason")) == (NUM_STEPS, "runs eagerly")
    reasons = [newest_about(folder).reasons for folder in (run, tmp_path / "new")]
    assert reasons == [(f"since step {NUM_STEPS}: runs eagerly",), ()]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))])
def test_wrong_embedding_is_found_for_any_seed(seed: int) -> None:
    """A correct model with other random draws is not reported."""
    right, wrong = made(dropout=0.1), made(dropout=0.1)
    torch.manual_seed(seed)
    result = agreement(right)
    assert result.agrees, str(result)
    assert result.dropout_error is not None
    torch.compiler.reset()
    wrong.compile(backend=read_from_the_first_number)
    result = compare_compiled_with_eager(wrong, FakeDevice(), loss_of(wrong), first_micro(), precision="fp32")
    assert not result.agrees
    assert result.worst == "place.weight"


@pytest.mark.parametrize("num_samples", [1, 2, 4])
def test_few_samples_scatter_and_agree(num_samples: int) -> None:
    model = made(dropout=0.4)
    micro = MicroBatch(
        fields={name: column[:num_samples] for name, column in data().items()}, ids=np.arange(num_samples)
    )
    for seed in range(15):
        torch.manual_seed(seed)
        result = compare_compiled_with_eager(model, FakeDevice(), loss_of(model), micro, precision="fp32")
        assert result.agrees, str(result)


@pytest.mark.parametrize(
    ("change", "dropout", "words"),
    [
        (lambda x: x * 1.02, 0.0, "differs from the eager model by"),
        (lambda x: x + 0.0 * (x.sum() * torch.inf), 0.1, "differs from the eager model by nan"),
        (lambda x: x.detach() + 0.7 * (x - x.detach()), 0.0, "the gradient of "),
        (lambda x: x.roll(LENGTH, 0), 0.1, "differs from the eager model"),
    ],
    ids=["a scale", "not a number", "a gradient alone", "another sample"],
)
def test_planted_wrong_result_is_found(change: Any, dropout: float, words: str) -> None:
    result = agreement(made(dropout=dropout, act=Planted(change)))
    assert not result.agrees
    assert words in str(result)


def test_planted_wrong_loss_is_found() -> None:
    model, off = made(), Planted(lambda x: x + 0.01)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.off = model, off

        def forward(self, micro: MicroBatch) -> Tensor:
            return self.off(functional.cross_entropy(self.model(micro.x), micro.y))

    whole = Whole()
    result = agreement(whole, loss=whole)
    assert not result.agrees
    assert str(result).startswith("the loss differs from the eager model by ")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("wrong", "is_found_behind_dropout"),
    [(lambda by: 0.5 * (by - by.detach()), False), (lambda by: by.square().sqrt(), True)],
    ids=["half more", "not a number"],
)
def test_planted_error_in_a_small_tensor_is_found_without_dropout(
    dropout: float, wrong: Any, is_found_behind_dropout: bool
) -> None:
    """Of a gradient alone: the numbers themselves are zero."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.by + (wrong(self.by) if torch.compiler.is_compiling() else 0.0)

    result = agreement(made(dropout=dropout, act=Shifted()))
    is_found = is_found_behind_dropout or not dropout
    assert result.agrees != is_found, str(result)
    assert not is_found or result.worst == "act.by"


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("not now"), torch.OutOfMemoryError("out of memory")])
def test_failing_check_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    compile_with(monkeypatch, as_it_is)
    model, calls = made(), []

    def loss(micro: MicroBatch) -> Tensor:
        calls.append(model._compiled_call_impl is not None)
        # With slices of the batch, and with all of it.
        if fails_at <= len(calls) < fails_at + 2:
            raise error
        return loss_of(model)(micro)

    fails_at = 1_000_000
    train(model, tmp_path / "off", loss=loss, verify="off")
    # The steps come last; the memory per sample is measured before them. Three calls decide whether the loss can be
    # compiled; verify=off leaves them out.
    fails_at, model = len(calls) - NUM_STEPS + 2 + 3, made()
    calls.clear()
    run = train(model, tmp_path / "run", loss=loss)
    (line,) = reported(run)
    # The loss counts its calls, so it is not compiled itself.
    assert line.startswith("compiled without your loss function")
    assert f": not compared with the model's own code: {error}" in line
    assert open_run(run).plan["settings"]["compile"]["value"] == "on"
    assert calls[-NUM_STEPS:] == [True] * NUM_STEPS


def test_nan_loss_is_left_to_the_step() -> None:
    model = made(act=Planted(lambda x: x))
    with pytest.raises(ArithmeticError, match="its loss is nan"):
        agreement(model, loss=lambda micro: loss_of(model)(micro) * torch.nan)


def test_objects_of_the_first_step_are_frozen_for_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler keeps hundreds of thousands of objects: a pass over them at the end of each epoch took 0.15 s."""
    compile_with(monkeypatch, as_it_is)
    model, made_in_first, looked_at = made(), [], []

    def loss(micro: MicroBatch) -> Tensor:
        if not made_in_first:
            made_in_first.extend([[number] for number in range(1000)])
        looked_at.append(sum(thing is made_in_first[-1] for thing in gc.get_objects()))
        return loss_of(model)(micro)

    assert gc.get_freeze_count() == 0
    train(model, tmp_path / "run", loss=loss)
    assert looked_at[-1] == 0, "set aside"
    assert looked_at[0] == 1
    assert gc.get_freeze_count() == 0, "and back afterwards"


def test_compiled_blocks_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, as_it_is)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x) * (1.1 if torch.compiler.is_compiling() else 1.0)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 4))
    run = train(
        model, tmp_path / "run", compile="blocks", loss=lambda m: functional.cross_entropy(model(m.x[:, 0]), m.y)
    )
    assert reported(run)[0].startswith("not compiled: ")
    assert open_run(run).plan["settings"]["compile"]["value"] == "off"
    assert all(part._compiled_call_impl is None for part in model.modules())


@pytest.mark.parametrize("is_wrong", [False, True])
def test_wrong_compiled_model_wins_no_measurement(monkeypatch: pytest.MonkeyPatch, is_wrong: bool) -> None:
    compile_with(monkeypatch, as_it_is)
    with rig_of(made(act=Planted(lambda x: x * 1.1 if is_wrong else x))) as rig:
        prepared = rig.prepare({"compile": "on"}, seconds=60.0)
        with pytest.raises(ProbeFailedError, match="differs from the eager model") if is_wrong else nullcontext():
            prepared.check(seconds=60.0)
        prepared.close()


def rig_of(model: nn.Module) -> LocalStepBench:
    training = parse_training_config({"global_batch_size": SAMPLES, "epochs": 1})
    machine, system_state = current_machine()
    plan = make_plan(
        machine, describe_workload(model, data(), training, recipe="net"), overrides={}, system_state=system_state
    )
    optimizer = OptimizerChoice(lr=1e-2)
    return LocalStepBench(model, optimizer, data(), training, loss=loss_of(model), plan=plan, may_compile=True)


# --- in little memory -------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Notes the number of samples of each pass, eager and compiled. The compiler runs it as written."""

    def __init__(self, *, wrong: float = 1.0, mixes: bool = False) -> None:
        super().__init__()
        self.eager: list[int] = []
        self.compiled: list[int] = []
        self.wrong, self.mixes = wrong, mixes
        self.inner = nn.Linear(WIDTH, 300)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.wrong * self._compute(x)
        self.eager.append(len(x))
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x - x.mean(0) if self.mixes else x


def vectors() -> MicroBatch:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, WIDTH, generator=draw), torch.randint(0, 300, (SAMPLES,), generator=draw)
    return MicroBatch(fields={"x": x, "y": y}, ids=np.arange(SAMPLES))


def compared(model: Watched, loss: Any = None, **options: Any) -> CompiledParity:
    torch.compiler.reset()
    model.compile(backend="eager")
    loss = loss or (lambda micro: functional.cross_entropy(model(micro.x), micro.y))
    return compare_compiled_with_eager(model, FakeDevice(), loss, vectors(), precision="fp32", **options)


def test_eager_code_runs_on_slices_and_compiled_code_on_the_whole() -> None:
    model = Watched()
    before = num_graphs()
    result = compared(model)
    assert result.agrees
    assert result.is_compiled
    assert {*model.eager} == {SAMPLES // 4}
    assert num_graphs() == before + 1, "no slice is compiled"
    expected = functional.cross_entropy(model.inner(vectors().x), vectors().y)
    assert result.eager_loss == pytest.approx(float(expected.detach()), rel=1e-5)


def test_wrong_compiled_code_is_found_with_slices() -> None:
    model = Watched(wrong=1.02)
    result = compared(model)
    assert not result.agrees
    assert SAMPLES in model.eager, "the whole micro-batch has decided"


def test_loss_of_the_whole_batch_is_compared_as_a_whole() -> None:
    model = Watched(mixes=True)
    assert compared(model).agrees
    assert {*model.eager} == {SAMPLES // 4, SAMPLES}
    model = Watched(mixes=True)
    assert compared(model, may_slice=False).agrees
    assert {*model.eager} == {SAMPLES}


@pytest.mark.parametrize("num_without", [0, 9, 31])
def test_slices_of_unequal_weight_add_up(num_without: int) -> None:
    """The first slices may have no labels at all."""
    model = Watched()
    micro = vectors()
    weights = (torch.arange(SAMPLES) >= num_without).float() * torch.arange(SAMPLES)

    def loss(part: MicroBatch) -> tuple[Tensor, Tensor]:
        mine = weights[torch.from_numpy(part.ids)]
        each = functional.cross_entropy(model(part.x), part.y, reduction="none")
        return (each * mine).sum(), mine.sum()

    result = compared(model, loss)
    assert result.agrees, str(result)
    assert result.dropout_error is None, "all passes are equal"
    assert {*model.eager} == {SAMPLES // 4}
    each = functional.cross_entropy(model.inner(micro.x), micro.y, reduction="none")
    assert result.eager_loss == pytest.approx(float((each.detach() * weights).sum() / weights.sum()), rel=1e-5)


class WatchedBlocks(Watched):
    """Two blocks with BatchNorm. Notes how many activations are kept at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2)
        )
        self.kept: list[int] = []

    def _compute(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            for block in self.blocks:
                x = block(x)
            return self.inner(x)
        kept: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for block in self.blocks:
                x = block(x)
        self.kept.append(sum(kept))
        return self.inner(x)


def test_activations_of_a_batch_that_stays_whole_are_recomputed() -> None:
    plain, model = WatchedBlocks(), WatchedBlocks()
    plain(vectors().x)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = num_graphs()
    result = compared(model, may_slice=False)
    assert result.agrees, str(result)
    assert {*model.eager} == {SAMPLES}
    assert max(model.kept) < 0.5 * plain.kept[0]
    assert num_graphs() == before + 1
    assert not any("forward" in vars(block) for block in model.blocks)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_model_that_cannot_take_slices_is_compared_as_a_whole() -> None:
    model = Watched()

    def loss(micro: MicroBatch) -> Tensor:
        if len(micro) != SAMPLES:
            raise ValueError("I need the whole batch")
        return functional.cross_entropy(model(micro.x), micro.y)

    assert compared(model, loss).agrees
    assert {*model.eager} == {SAMPLES}


# --- nothing to compare ----------------------------------------------------------------------------------------------


class Unfollowed(Reader):
    """torch's compiler does not compile a function that breaks its graph inside an unknown context."""

    def forward(self, tokens: Tensor) -> Tensor:
        with contextlib.closing(io.StringIO()) as aside:
            print("read", file=aside)
            return self.head(self.word(tokens).amax(1))


class Forbidden(Reader):
    @torch.compiler.disable
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


@pytest.mark.parametrize("kind", [Unfollowed, Forbidden])
def test_no_agreement_is_reported_without_a_compiled_graph(tmp_path: Path, kind: type[Reader]) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    run = train(kind(), tmp_path / "run", epochs=1)
    (line,) = reported(run)
    assert line.startswith("not compiled: torch.compile produced no graph for this model  (")
    plan = open_run(run).plan["settings"]["compile"]
    assert (plan["value"], plan["reason"]) == ("off", "torch.compile produced no graph for this model")


def test_graph_of_an_earlier_training_counts(tmp_path: Path) -> None:
    torch.compiler.reset()
    for name in ("first", "second"):
        before = num_graphs()
        (line,) = reported(train(made(), tmp_path / name, epochs=1, verify="always"))
        assert line.startswith("compiled: loss and 8 gradients agree")
    assert num_graphs() == before, "or the second one shows nothing"


def test_user_profiler_stays_active() -> None:
    def yours(*_words: Any) -> None:
        pass

    sys.setprofile(yours)
    try:
        assert runs_compiled(lambda: None)
        assert sys.getprofile() is yours
    finally:
        sys.setprofile(None)


def test_model_without_a_graph_wins_no_measurement() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    with rig_of(Unfollowed()) as rig, pytest.raises(ProbeFailedError, match="produced no graph"):
        rig.prepare({"compile": "on"}, seconds=60.0).check(seconds=60.0)
